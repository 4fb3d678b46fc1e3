"""The MLPSpeculator network (arXiv 2404.19124): a recurrence from the verifier's last state over drafted tokens.

From the verifier's state s of token t after its final norm, and with token i the one at t+1+i:
s = proj_i(s) + (w_e / w_s) emb_i(token i); s = gelu(norm_i(s)); the logits head_i(s) predict token t+2+i. Here
w_s = 0.5^(0.5/n) and w_e = sqrt((1 - w_s²) inner / 2) for n steps. Shape suffixes as in `draft_model`; R rows, I the
width of the recurrence.
"""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.formats.faults import error_of, fault
from speculators.models.compiling import compilable
from speculators.models.draft_model import DraftContext, DraftModel, DraftSampler, Proposal
from speculators.models.layers import SkinnyLinear, draw_parameters
from speculators.models.mlp_speculator.config import MlpSpeculatorConfig
from speculators.models.proposing import Drafts, at_last, normed_states

_EPS = 1e-6


class ScaleShiftNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight + bias: no mean is subtracted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., I] -> [..., I], dtype kept."""
        normed = F.rms_norm(hidden.float(), self.weight.shape, self.weight.float(), _EPS) + self.bias.float()
        return normed.to(hidden.dtype)


class MlpSpeculatorModel(DraftModel):
    """An MLPSpeculator; nothing of it is the verifier's. Tied weights are there, and stored, once."""

    config: MlpSpeculatorConfig
    tables = ("emb.*.weight", "head.*.weight")

    def __init__(self, config: MlpSpeculatorConfig) -> None:
        super().__init__(config)
        inner, vocab = config.width, config.vocab_size
        steps = 1 if config.tie_weights else config.n_predict
        widths = [config.emb_dim] + [inner] * (min(2, config.n_predict) if config.tie_weights else config.n_predict)
        self.emb = nn.ModuleList(nn.Embedding(vocab, inner) for _ in range(steps))
        self.proj = nn.ModuleList(SkinnyLinear(width, inner, bias=False) for width in widths[:-1])
        self.ln = nn.ModuleList(ScaleShiftNorm(inner) for _ in range(steps))
        self.head = nn.ModuleList(SkinnyLinear(inner, vocab, bias=False) for _ in range(steps))
        state_weight = 0.5 ** (0.5 / config.n_predict)
        self.token_scale = sqrt((1 - state_weight**2) * inner / 2) / state_weight
        self.register_load_state_dict_pre_hook(_drop_copies)  # type: ignore[no-untyped-call]  # torch's is untyped

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw embeddings and matrices from N(0, 1/inner); norms start with gain 1 and bias 0."""
        draw_parameters(self.named_parameters(), self.config.width**-0.5, generator)

    def start(self, normed: Tensor) -> Tensor:
        """The verifier's states after its final norm [..., H] -> the recurrence's first states [..., H]."""
        states = normed.to(self.dtype)
        if not self.config.scale_input:
            return states
        return (F.rms_norm(states.float(), states.shape[-1:], None, _EPS) / sqrt(2)).to(states.dtype)

    @compilable
    def advance(self, state: Tensor, token_ids: Tensor, step: int) -> Tensor:
        """Step `step`: states [..., H or I] and int64 tokens [...] -> states [..., I] that its head reads."""
        mixed = _of_step(self.proj, step)(state) + self.token_scale * _of_step(self.emb, step)(token_ids)
        return F.gelu(_of_step(self.ln, step)(mixed))

    def output_head(self, step: int) -> nn.Linear:
        """What turns the states of step `step` into logits."""
        return cast(nn.Linear, _of_step(self.head, step))

    def forward(self, normed_RH: Tensor, token_ids_RK: Tensor) -> list[Tensor]:
        """States after the verifier's final norm, and the K tokens after each -> per step the states [R, I]."""
        state, states = self.start(normed_RH), []
        for step, token_ids_R in enumerate(token_ids_RK.unbind(1)):
            state = self.segment(partial(self.advance, step=step), state, token_ids_R)
            states.append(state)
        return states

    @torch.no_grad()
    def propose(self, context: DraftContext, num_tokens: int, sampler: DraftSampler) -> Proposal:
        """Draft by the first `num_tokens` steps, one after another; nothing is remembered for the next proposal."""
        drafts = Drafts(self, sampler, num_tokens)
        state_BH = self.start(at_last(normed_states(context), context))
        ids_B = at_last(context.token_ids_BT, context)
        for step in range(num_tokens):
            state_BH = self.advance(state_BH, ids_B, step)
            ids_B = drafts.draw(self.output_head(step)(state_BH))
        return drafts.proposal(context)


def _of_step(modules: nn.ModuleList, step: int) -> nn.Module:
    """That of a step, or the last one there is where steps share it."""
    return modules[min(step, len(modules) - 1)]


def _drop_copies(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Take the copies out that a file holds of tied weights; refuse those that are none."""
    assert isinstance(module, MlpSpeculatorModel)
    for name, original in module.config.copies().items():
        copy = state_dict.pop(prefix + name, None)
        stored = state_dict.get(prefix + original)
        if copy is not None and stored is not None and not torch.equal(copy, stored):
            text = (
                f"{name} differs from {original} although tie_weights is true; store them alike, or tie_weights false"
            )
            raise error_of([fault("contradiction", text)], "draft")
