"""The MTP network: one block applied to its own output, over packed documents for training and over a cache in serving.

Position p carries the verifier's state of token p after its final norm and the embedding of token p+1, and predicts
token p+2; its rotary position is p. Shape suffixes as in `draft_model`; C positions of a packed batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from speculators.formats.verifier_weights import VerifierWeights
from speculators.models.attention_interface import SlotKeyValues
from speculators.models.cache import SlotCache, SlotWrite
from speculators.models.compiling import compilable
from speculators.models.draft_model import DraftContext, DraftModel, DraftSampler, Proposal
from speculators.models.layers import SkinnyLinear, draw_parameters
from speculators.models.mtp.block import MtpBlock, build_block, build_rotary, cache_argument
from speculators.models.mtp.config import PREFIX, MtpConfig
from speculators.models.mtp.native import read_native
from speculators.models.proposing import Drafts, at_last, normed_states

Part = Literal["router", "experts"]
_PART_PREFIXES: dict[Part, str] = {"router": f"{PREFIX}mlp.gate.", "experts": f"{PREFIX}mlp.experts."}


@dataclass
class MtpSteps:
    """What a training forward reads: documents without padding one after another, `document_lengths` positions each.

    `states_CH`: the verifier's states, after its final norm; `positions_C` int64: rotary positions; `token_ids_KC`
    int64: per step the token whose embedding is read, that after the state's token at step 0.
    """

    states_CH: Tensor
    positions_C: Tensor
    token_ids_KC: Tensor
    document_lengths: list[int]


class MtpModel(DraftModel):
    """An MTP draft; frozen embeddings and head are the verifier's."""

    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        layer = config.transformer_layer_config
        self.mtp_layers = nn.ModuleList([build_block(layer)])
        self.rotary = build_rotary(layer)
        # Without storage until a checkpoint or the verifier gives them their values.
        hidden, vocab = layer.hidden_size, layer.vocab_size
        self.embed_tokens = nn.Embedding(vocab, hidden, device="meta").requires_grad_(False)
        self.lm_head = SkinnyLinear(hidden, vocab, bias=False, device="meta").requires_grad_(False)
        self._cache_argument = cache_argument(self.mtp_layers[0])

    @property
    def block(self) -> MtpBlock:
        """The one layer, whose parameters all steps share."""
        return cast(MtpBlock, self.mtp_layers[0])

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every matrix from N(0, initializer_range²); norms start neutral, biases and expert offsets at 0."""
        layer = self.config.transformer_layer_config
        gain = 0.0 if layer.style.plus_one else 1.0
        draw_parameters(self.named_parameters(), layer.initializer_range, generator, gain=gain)
        for buffer in self.mtp_layers.buffers():
            buffer.zero_()

    def native_tensors(self, directory: Path, weights: VerifierWeights) -> dict[str, Tensor]:
        """The block that the verifier's checkpoint has, if any; see `native.read_native`."""
        return read_native(directory, self.config.transformer_layer_config.num_hidden_layers, weights)

    def parameters_of(self, part: Part) -> Iterator[nn.Parameter]:
        """The parameters of the router, or of the routed experts; none in a dense block."""
        return (parameter for name, parameter in self.named_parameters() if name.startswith(_PART_PREFIXES[part]))

    def forward(self, inputs: MtpSteps) -> list[Tensor]:
        """Per step the states [C, H] that `lm_head` reads and that the next step takes for the verifier's.

        Every step attends causally within each document, to its own keys.
        """
        hidden_BCH, steps = inputs.states_CH[None].to(self.dtype), []
        options = {"documents": inputs.document_lengths}
        for token_ids_C in inputs.token_ids_KC:
            step = partial(self._apply_block, positions_BT=inputs.positions_C[None], options=options)
            hidden_BCH = self.segment(step, token_ids_C[None], hidden_BCH)
            steps.append(hidden_BCH[0])
        return steps

    def _apply_block(
        self, token_ids_BT: Tensor, hidden_BTH: Tensor, positions_BT: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """The block on one step's tokens and states; `options` tell `attention_interface.attention` where keys lie."""
        block = self.block
        inputs_BTH = self._join(token_ids_BT, hidden_BTH, positions_BT)
        turns = self.rotary(inputs_BTH, positions_BT)
        out = block(inputs_BTH, position_embeddings=turns, position_ids=positions_BT, attention_mask=None, **options)
        normed: Tensor = block.final_layernorm(out)
        return normed

    @compilable
    def _join(self, token_ids_BT: Tensor, hidden_BTH: Tensor, positions_BT: Tensor) -> Tensor:
        """Tokens and states side by side -> what enters the layer."""
        block = self.block
        embeds_BTH = self.embed_tokens(token_ids_BT).to(self.dtype)
        if self.config.transformer_layer_config.style.zero_first:
            embeds_BTH = embeds_BTH * (positions_BT != 0)[:, :, None]
        joined = torch.cat((block.token_layernorm(embeds_BTH), block.hidden_layernorm(hidden_BTH)), -1)
        entered: Tensor = block.input_proj(joined)
        return entered

    def make_cache(self, num_slots: int) -> SlotCache:
        """An empty cache of the block's keys and values for `num_slots` requests."""
        return SlotCache(1, num_slots, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def propose(self, context: DraftContext, num_tokens: int, sampler: DraftSampler) -> Proposal:
        """Bring the cache in step with the verified tokens and draft `num_tokens` more, one after another.

        What drafted positions write is overwritten once their tokens are verified.
        """
        drafts = Drafts(self, sampler, num_tokens)
        states_BTH = normed_states(context).to(self.dtype)
        hidden_BTH = self._extend(context.token_ids_BT, states_BTH, context, context.starts)
        hidden_B1H = at_last(hidden_BTH, context)[:, None]
        for step in range(num_tokens):
            if step:
                starts = [end + step - 1 for end in context.ends]
                hidden_B1H = self._extend(drafts.token_ids[-1][:, None], hidden_B1H, context, starts)
            drafts.draw(self.lm_head(hidden_B1H).squeeze(1))
        return drafts.proposal(context)

    def _extend(self, token_ids_BT: Tensor, hidden_BTH: Tensor, context: DraftContext, starts: Sequence[int]) -> Tensor:
        """Run the block at new positions, whose keys and values go into the cache."""
        write = SlotWrite.at(context.rows, starts, token_ids_BT.shape[1], token_ids_BT.device)
        options = {"slot_write": write, self._cache_argument: SlotKeyValues(context.cache, write)}
        return self._apply_block(token_ids_BT, hidden_BTH, write.positions_BT, options)
