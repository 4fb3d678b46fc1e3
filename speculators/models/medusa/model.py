"""The Medusa network: from the verifier's state after its final norm at t, head k predicts token t+2+k.

Nothing is remembered from one proposal to the next: a head reads the state of the last verified position alone. Shape
suffixes as in `draft_model`; R rows.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.formats.faults import error_of, fault
from speculators.formats.verifier_weights import VerifierWeights
from speculators.formats.vocab import DraftVocab
from speculators.models.compiling import compilable
from speculators.models.draft_model import DraftContext, DraftModel, DraftSampler, Proposal
from speculators.models.layers import SkinnyLinear
from speculators.models.medusa.config import MedusaConfig
from speculators.models.proposing import Drafts, at_last, normed_states


class ResidualBlock(nn.Module):
    """x + silu(W x + b), layer by layer."""

    compiles = False

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(
            SkinnyLinear(size, size, bias=config.medusa_fc_bias) for _ in range(config.medusa_num_layers)
        )

    @compilable
    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class MedusaModel(DraftModel):
    """A Medusa draft; a shared output head is the verifier's and frozen, heads of its own are trained."""

    config: MedusaConfig
    tables = (*DraftModel.tables, "lm_heads.*.weight")

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        hidden, drafted, heads = config.hidden_size, config.truncated_vocab_size, config.medusa_num_heads
        self.blocks = nn.ModuleList(ResidualBlock(config) for _ in range(heads))
        self.lm_head: nn.Linear | None = None
        self.lm_heads: nn.ModuleList | None = None
        if config.original_lm_head:
            # Without storage until a checkpoint or the verifier gives it its values.
            self.lm_head = SkinnyLinear(hidden, drafted, bias=False, device="meta").requires_grad_(False)
        else:
            self.lm_heads = nn.ModuleList(SkinnyLinear(hidden, drafted, bias=False) for _ in range(heads))
        self.token_map: Tensor | None
        reduced = drafted < config.vocab_size
        self.register_buffer("token_map", torch.arange(drafted) if reduced else None)
        self.register_load_state_dict_pre_hook(_check_token_map)  # type: ignore[no-untyped-call]  # torch's is untyped

    @property
    def verifier_ids_D(self) -> Tensor | None:
        """int64 [D]: the verifier's id of each draft id; None where the two vocabularies are one."""
        return self.token_map

    def to_verifier(self, draft_ids: Tensor) -> Tensor:
        """int64 draft ids of any shape -> the verifier's."""
        return draft_ids if self.token_map is None else self.token_map[draft_ids]

    def vocabulary_tensors(self, vocab: DraftVocab) -> dict[str, Tensor]:
        """The verifier's id of each draft id, as vLLM stores a truncated vocabulary."""
        return {"token_map": vocab.draft_ids}

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Residual layers start as the identity (weights 0, biases U(-1/√H, 1/√H)), output heads from N(0, 0.02²)."""
        bound = 1 / sqrt(self.config.hidden_size)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.is_meta or not parameter.requires_grad:
                    continue
                if name.startswith("lm_heads."):
                    parameter.normal_(0.0, 0.02, generator=generator)
                elif name.endswith("bias"):
                    parameter.uniform_(-bound, bound, generator=generator)
                else:
                    parameter.zero_()

    @torch.no_grad()
    def start_from_verifier(self, weights: VerifierWeights, vocab: DraftVocab) -> None:
        """Give every output head of the draft's own the verifier's rows."""
        rows = weights.lm_head.index_select(0, vocab.draft_ids.to(weights.lm_head.device))
        for step in range(len(self.lm_heads or ())):
            self.output_head(step).weight.copy_(rows)

    def output_head(self, step: int) -> nn.Linear:
        """What turns the states of head `step` into logits over draft ids."""
        head = self.lm_head if self.lm_heads is None else self.lm_heads[step]
        return cast(nn.Linear, head)

    def forward(self, normed_RH: Tensor) -> list[Tensor]:
        """States after the verifier's final norm [R, H] -> per head the states [R, H] that its output head reads."""
        return [self.segment(block, normed_RH) for block in self.blocks]

    @torch.no_grad()
    def propose(self, context: DraftContext, num_tokens: int, sampler: DraftSampler) -> Proposal:
        """Draft by the first `num_tokens` heads."""
        drafts = Drafts(self, sampler, num_tokens)
        hidden_BH = at_last(normed_states(context), context).to(self.dtype)
        for step in range(num_tokens):
            drafts.draw(self.output_head(step)(self.blocks[step](hidden_BH)))
        return drafts.proposal(context)


def _check_token_map(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Refuse a map that does not name tokens of the verifier in ascending order, as the draft's ids are understood."""
    assert isinstance(module, MedusaModel)
    found = state_dict.get(f"{prefix}token_map")
    if found is None or module.token_map is None:
        return
    ids, size = found.tolist(), module.config.vocab_size
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= size:
        text = f"token_map starts {ids[:4]}; expected ascending ids within 0..{size - 1}, each once"
        raise error_of(
            [fault("d2t-invalid", f"{text}: sort them, and the rows of the output heads with them")], "draft"
        )
