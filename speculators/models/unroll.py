"""Unrolling of a draft on its own outputs over packed documents: training-time test, and HASS's harmonised context.

Keys and values of step 0, where every position has the verifier's states, are made for every context position; queries
and all that follows for the positions active at a step alone. At step k a query stands k positions further on, takes
the state that step k-1 left there, and sees the step-0 keys of the positions it started from and its own of the steps
between: what drafting computes. Shape suffixes: C context positions, R active ones, H hidden, X features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.models.attention import packed_attention, plan_blocks
from speculators.models.decoder_draft import DecoderDraftModel
from speculators.models.layers import DecoderLayer

KeyValue = tuple[Tensor, Tensor]
Rotation = tuple[Tensor, Tensor]


@dataclass
class Unroll:
    """Training inputs, aligned and free of padding: documents one after another, `document_lengths` positions each.

    Context position c holds `features_CX`, the verifier's states of some token, the id of the token after it in
    `token_ids_C` (int64) and its rotary position in `positions_C` (int64). `slots[k]` (int64 [R], ascending) are the
    context positions to unroll to step k; slot c then takes the token at c + k. `slots[k]` must be a subset of
    `slots[k-1]`.

    Attention windows end at the query's own position c + k, as in serving; with `windows_from_start` they end at c, and
    what the query's position computed at the steps 1..k is visible besides.
    """

    features_CX: Tensor
    token_ids_C: Tensor
    positions_C: Tensor
    document_lengths: Sequence[int]
    slots: Sequence[Tensor]
    windows_from_start: bool = False


class Trunk:
    """The layers over one packed batch; keeps the keys and values that later steps attend to.

    A family that feeds tokens to its layers says how: `fuse` makes the first layer's input, `enter` and `project` its
    parts.
    """

    def __init__(self, model: DecoderDraftModel, inputs: Unroll) -> None:
        self.model, self.inputs, self.layers = model, inputs, model.blocks()
        self.end = int(inputs.positions_C.max()) + len(inputs.slots)
        self.context: list[KeyValue] = []
        self.own: list[list[KeyValue]] = [[] for _ in self.layers]

    def fuse(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        """States beside the tokens at context positions `tokens` [R] (None: all) -> the first layer's input."""
        return hidden

    def enter(self, layer: DecoderLayer, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What `project` reads, and the residual."""
        return layer.prepare(hidden)

    def project(self, index: int, name: str, state: Tensor, tokens: Tensor | None) -> Tensor:
        """The projection `name` of layer `index` of states [R, H] beside the tokens at `tokens` [R] (None: all)."""
        projected: Tensor = getattr(self.layers[index].self_attn, name)(state)
        return projected

    def first(self, hidden: Tensor) -> Tensor:
        """Step 0: states of every context position [C, H] in, of those active at step 0 [R, H] out."""
        hidden = self.fuse(hidden, None)
        rotation = self.model.rotary.at(self.inputs.positions_C, self.end, hidden.dtype)
        everyone = torch.arange(len(hidden), device=hidden.device)
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            state, residual = self.enter(layer, hidden)
            self.context.append(self._key_value(index, state, None, rotation))
            slots = self.inputs.slots[0] if last else everyone
            if last:
                state, residual = state.index_select(0, slots), residual.index_select(0, slots)
                rotation = (rotation[0].index_select(0, slots), rotation[1].index_select(0, slots))
            query = layer.self_attn.as_query(self.project(index, "q_proj", state, slots), *rotation)
            hidden = layer.finish(residual, self._attend(index, query, slots, 0))
        return hidden

    def later(self, hidden: Tensor, step: int) -> Tensor:
        """Step k >= 1: states of the positions active at step k-1 in, of those active at step k out."""
        slots = self.inputs.slots[step]
        kept = torch.searchsorted(self.inputs.slots[step - 1], slots)
        tokens = slots + step
        hidden = self.fuse(hidden.index_select(0, kept), tokens)
        positions_R = self.inputs.positions_C.index_select(0, slots) + step
        rotation = self.model.rotary.at(positions_R, self.end, hidden.dtype)
        for index, layer in enumerate(self.layers):
            state, residual = self.enter(layer, hidden)
            earlier = [(key.index_select(0, kept), value.index_select(0, kept)) for key, value in self.own[index]]
            self.own[index] = [*earlier, self._key_value(index, state, tokens, rotation)]
            query = layer.self_attn.as_query(self.project(index, "q_proj", state, tokens), *rotation)
            hidden = layer.finish(residual, self._attend(index, query, slots, step))
        return hidden

    def _key_value(self, index: int, state: Tensor, tokens: Tensor | None, rotation: Rotation) -> KeyValue:
        attention = self.layers[index].self_attn
        key = attention.as_key(self.project(index, "k_proj", state, tokens), *rotation)
        return key, attention.as_heads(self.project(index, "v_proj", state, tokens))

    def _attend(self, index: int, query: Tensor, slots: Tensor, step: int) -> Tensor:
        attention, own, window = self.layers[index].self_attn, self.own[index], self.layers[index].self_attn.window
        if window is not None and not self.inputs.windows_from_start:
            own = own[max(step - window, 0) :]
            window -= step
        blocks = plan_blocks(slots, self.inputs.document_lengths, window)
        return packed_attention(query, *self.context[index], own, blocks, attention.scale)
