"""Unrolling of a draft on its own outputs over packed documents: training-time test, and HASS's harmonised context.

Keys and values of step 0, where every position has the verifier's states, are made for every context position; queries
and all that follows for the positions active at a step alone. At step k a query stands k positions further on, takes
the state that step k-1 left there, and sees the step-0 keys of the positions it started from and its own of the steps
between: what drafting computes. Shape suffixes: C context positions, R active ones, H hidden, X features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from speculators.models.attention import packed_attention, plan_blocks
from speculators.models.decoder_draft import DecoderDraftModel
from speculators.models.flex import PackedKeys, flex_packed_attention
from speculators.models.layers import DecoderLayer
from speculators.models.masks import PackedMask

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


class Memory:
    """The keys and values of each layer that later steps attend to: of step 0, and of every step after it.

    A trunk does not hold it: what is kept to run a layer again would then lead to what that layer made, a cycle that is
    never freed where a loss is dropped before its backward.
    """

    def __init__(self, num_layers: int) -> None:
        self.context: list[KeyValue] = []
        self.own: list[list[KeyValue]] = [[] for _ in range(num_layers)]


class Trunk:
    """The layers over one packed batch.

    A family that feeds tokens to its layers says how: `fuse` makes the first layer's input, `enter` and `project` its
    parts.
    """

    def __init__(self, model: DecoderDraftModel, inputs: Unroll) -> None:
        self.model, self.inputs, self.layers = model, inputs, model.blocks()
        self.end = int(inputs.positions_C.max()) + len(inputs.slots)

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

    def first(self, hidden: Tensor, memory: Memory) -> Tensor:
        """Step 0: states of every context position [C, H] in, of those active at step 0 [R, H] out."""
        hidden = self.model.segment(partial(self.fuse, tokens=None), hidden)
        rotation = self.model.rotary.at(self.inputs.positions_C, self.end, hidden.dtype)
        everyone = torch.arange(len(hidden), device=hidden.device)
        for index in range(len(self.layers)):
            slots = self.inputs.slots[0] if index == len(self.layers) - 1 else everyone
            hidden, *context = self.model.segment(partial(self._first_layer, index, slots, rotation), hidden)
            memory.context.append((context[0], context[1]))
        return hidden

    def later(self, hidden: Tensor, memory: Memory, step: int) -> Tensor:
        """Step k >= 1: states of the positions active at step k-1 in, of those active at step k out."""
        slots = self.inputs.slots[step]
        kept = torch.searchsorted(self.inputs.slots[step - 1], slots)
        hidden = self.model.segment(partial(self.fuse, tokens=slots + step), hidden.index_select(0, kept))
        positions_R = self.inputs.positions_C.index_select(0, slots) + step
        rotation = self.model.rotary.at(positions_R, self.end, hidden.dtype)
        for index in range(len(self.layers)):
            earlier = [(key.index_select(0, kept), value.index_select(0, kept)) for key, value in memory.own[index]]
            layer = partial(self._later_layer, index, step, rotation, [memory.context[index], *earlier])
            hidden, *own = self.model.segment(layer, hidden)
            memory.own[index] = [*earlier, (own[0], own[1])]
        return hidden

    def _first_layer(self, index: int, slots: Tensor, rotation: Rotation, hidden: Tensor) -> tuple[Tensor, ...]:
        """A layer at step 0: its output at `slots`, and keys and values of every context position."""
        layer = self.layers[index]
        state, residual = self.enter(layer, hidden)
        context = self._key_value(index, state, None, rotation)
        if index == len(self.layers) - 1:
            state, residual = state.index_select(0, slots), residual.index_select(0, slots)
            rotation = (rotation[0].index_select(0, slots), rotation[1].index_select(0, slots))
        query = layer.self_attn.as_query(self.project(index, "q_proj", state, slots), *rotation)
        return layer.finish(residual, self._attend(index, query, context, [], slots, 0)), *context

    def _later_layer(
        self, index: int, step: int, rotation: Rotation, before: Sequence[KeyValue], hidden: Tensor
    ) -> tuple[Tensor, ...]:
        """A layer at step k >= 1: its output, and the keys and values it adds to those of the steps `before`."""
        layer, slots = self.layers[index], self.inputs.slots[step]
        state, residual = self.enter(layer, hidden)
        own = self._key_value(index, state, slots + step, rotation)
        query = layer.self_attn.as_query(self.project(index, "q_proj", state, slots + step), *rotation)
        attended = self._attend(index, query, before[0], [*before[1:], own], slots, step)
        return layer.finish(residual, attended), *own

    def _key_value(self, index: int, state: Tensor, tokens: Tensor | None, rotation: Rotation) -> KeyValue:
        attention = self.layers[index].self_attn
        key = attention.as_key(self.project(index, "k_proj", state, tokens), *rotation)
        return key, attention.as_heads(self.project(index, "v_proj", state, tokens))

    def _attend(
        self, index: int, query: Tensor, context: KeyValue, own: Sequence[KeyValue], slots: Tensor, step: int
    ) -> Tensor:
        attention = self.layers[index].self_attn
        window = attention.window
        if window is not None and not self.inputs.windows_from_start:
            own = own[max(step - window, 0) :]
            window -= step
        if self.model.execution.uses_flex(query.device):
            mask = PackedKeys(slots, self.inputs.document_lengths, PackedMask(window), len(own))
            return flex_packed_attention(query, *context, own, mask, attention.scale)
        blocks = plan_blocks(slots, self.inputs.document_lengths, window)
        return packed_attention(query, *context, own, blocks, attention.scale)
