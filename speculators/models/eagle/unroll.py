"""Training-time unrolling of an EAGLE draft over packed documents.

Keys and values of step 0, where every position has the verifier's own state, are made for all positions; at step k a
query stands k positions further on, takes the state that step k-1 left there, and sees the step-0 keys of the positions
it started from and its own of the steps between. This is what drafting computes, and the harmonised context of HASS
(arXiv 2408.15766). Shape suffixes: C context positions, R active ones, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculators.models.attention import packed_attention, plan_blocks

if TYPE_CHECKING:
    from speculators.models.eagle.model import EagleLayer, EagleModel

Rotation = tuple[Tensor, Tensor]


@dataclass
class Unroll:
    """Training inputs, aligned and free of padding: documents one after another, `document_lengths` positions each.

    Context position c holds `features_CH` of some token (the verifier's state after its final norm), the id of the
    token after it in `token_ids_C` (int64) and its rotary position in `positions_C` (int64). `slots[k]` (int64 [R],
    ascending) are the context positions to unroll to step k; slot c then takes the token at c + k. `slots[k]` must be a
    subset of `slots[k-1]`.
    """

    features_CH: Tensor
    token_ids_C: Tensor
    positions_C: Tensor
    document_lengths: Sequence[int]
    slots: Sequence[Tensor]


class Trunk:
    """The layers over one packed batch; keeps the keys and values that later steps attend to."""

    def __init__(self, model: EagleModel, inputs: Unroll) -> None:
        self.model, self.inputs, self.layers = model, inputs, model.blocks()
        self.end = int(inputs.positions_C.max()) + len(inputs.slots)
        self.context: list[tuple[Tensor, Tensor]] = []
        self.own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]

    def first(self, features_CH: Tensor) -> Tensor:
        """Step 0: states of every context position [C, H] in, outputs of those active at step 0 [R, H] out."""
        hidden = self.model.fuse(self.inputs.token_ids_C, features_CH)
        rotation = self.model.rotary.at(self.inputs.positions_C, self.end, hidden.dtype)
        slots = torch.arange(len(hidden), device=hidden.device)
        for index, layer in enumerate(self.layers):
            state, residual = layer.prepare(hidden)
            self.context.append(layer.self_attn.key_value(state, *rotation))
            if index == len(self.layers) - 1:
                slots = self.inputs.slots[0]
                state, residual = state.index_select(0, slots), residual.index_select(0, slots)
                rotation = (rotation[0].index_select(0, slots), rotation[1].index_select(0, slots))
            hidden = layer.finish(residual, self._attend(index, layer, state, rotation, slots))
        return hidden

    def later(self, hidden: Tensor, step: int) -> Tensor:
        """Step k >= 1: outputs of the positions active at step k-1 in, of those active at step k out."""
        slots = self.inputs.slots[step]
        kept = torch.searchsorted(self.inputs.slots[step - 1], slots)
        hidden = self.model.fuse(self.inputs.token_ids_C.index_select(0, slots + step), hidden.index_select(0, kept))
        positions_R = self.inputs.positions_C.index_select(0, slots) + step
        rotation = self.model.rotary.at(positions_R, self.end, hidden.dtype)
        for index, layer in enumerate(self.layers):
            state, residual = layer.prepare(hidden)
            earlier = [(key.index_select(0, kept), value.index_select(0, kept)) for key, value in self.own[index]]
            self.own[index] = [*earlier, layer.self_attn.key_value(state, *rotation)]
            hidden = layer.finish(residual, self._attend(index, layer, state, rotation, slots))
        return hidden

    def _attend(self, index: int, layer: EagleLayer, state: Tensor, rotation: Rotation, slots: Tensor) -> Tensor:
        query = layer.self_attn.query(state, *rotation)
        blocks = plan_blocks(slots, self.inputs.document_lengths, None)
        return packed_attention(query, *self.context[index], self.own[index], blocks, layer.self_attn.scale)
