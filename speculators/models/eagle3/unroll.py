"""Training-time unrolling of an EAGLE-3 draft over packed documents.

Only what the loss needs is computed: keys and values of step 0 for every context position, queries and all that follows
for the positions active at a step. Shape suffixes: C context positions, R active ones, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.models.attention import packed_attention, plan_blocks
from speculators.models.layers import DecoderLayer

if TYPE_CHECKING:
    from speculators.models.eagle3.network import Eagle3FirstLayer, FusedDraftModel

Rotation = tuple[Tensor, Tensor]


@dataclass
class Unroll:
    """Training inputs, aligned and free of padding: documents one after another, `document_lengths` positions each.

    Context position c holds `features_CX` of some token, the id of the token after it in `token_ids_C` (int64) and its
    rotary position in `positions_C` (int64). `slots[k]` (int64 [R], ascending) are the context positions to unroll to
    step k; slot c then takes the token at c + k. `slots[k]` must be a subset of `slots[k-1]`.

    Attention windows end at the query's own position c + k, as in serving; with `windows_from_start` they end at c, and
    what the query's position computed at the steps 1..k is visible besides.
    """

    features_CX: Tensor
    token_ids_C: Tensor
    positions_C: Tensor
    document_lengths: Sequence[int]
    slots: Sequence[Tensor]
    windows_from_start: bool = False


class TokenPart:
    """What tokens contribute to the first layer's queries, keys and values, computed once for all steps.

    That layer's input is [embedding ; state], so each projection is a sum of two, the first of which depends on the
    token alone. The norm's gain is folded into the weight: where the embeddings are frozen, no product with the weight
    is needed for a gradient by them; where they are trained, autograd takes it through the normed embeddings.
    """

    def __init__(self, layer: Eagle3FirstLayer, embeds_CH: Tensor) -> None:
        attention, norm = layer.self_attn, layer.input_layernorm
        normed = F.rms_norm(embeds_CH, norm.weight.shape, None, norm.eps)
        self._contributed, self._state_weights = {}, {}
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(attention, name)
            of_token, of_state = torch.split(projection.weight, norm.weight.shape[0], 1)
            self._contributed[name] = F.linear(normed, of_token * norm.weight, projection.bias)
            self._state_weights[name] = of_state

    def project(self, name: str, state: Tensor, tokens: Tensor | None) -> Tensor:
        """The projection `name` of states [R, H] beside the tokens at context positions `tokens` [R] (None: all)."""
        contributed = self._contributed[name]
        contributed = contributed if tokens is None else contributed.index_select(0, tokens)
        return contributed + F.linear(state, self._state_weights[name])


class Trunk:
    """The layers over one packed batch; keeps the keys and values that later steps attend to."""

    def __init__(self, model: FusedDraftModel, inputs: Unroll) -> None:
        self.model, self.inputs, self.layers = model, inputs, model.blocks()
        self.end = int(inputs.positions_C.max()) + len(inputs.slots)
        self.tokens = TokenPart(model.first_layer, model.embed(inputs.token_ids_C))
        self.context: list[tuple[Tensor, Tensor]] = []
        self.own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]

    def first(self, hidden: Tensor) -> Tensor:
        """Step 0: states of every context position [C, H] in, of those active at step 0 [R, H] out."""
        rotation = self.model.rotary.at(self.inputs.positions_C, self.end, hidden.dtype)
        everyone = torch.arange(len(hidden), device=hidden.device)
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            state, residual = self._enter(layer, hidden)
            self.context.append(self._key_value(index, state, None, rotation))
            slots = self.inputs.slots[0] if last else everyone
            if last:
                state, residual = state.index_select(0, slots), residual.index_select(0, slots)
                rotation = (rotation[0].index_select(0, slots), rotation[1].index_select(0, slots))
            query = layer.self_attn.as_query(self._project(index, "q_proj", state, slots), *rotation)
            hidden = layer.finish(residual, self._attend(index, query, slots, 0))
        return hidden

    def later(self, hidden: Tensor, step: int) -> Tensor:
        """Step k >= 1: states of the positions active at step k-1 in, of those active at step k out."""
        slots = self.inputs.slots[step]
        kept = torch.searchsorted(self.inputs.slots[step - 1], slots)
        hidden, tokens = hidden.index_select(0, kept), slots + step
        positions_R = self.inputs.positions_C.index_select(0, slots) + step
        rotation = self.model.rotary.at(positions_R, self.end, hidden.dtype)
        for index, layer in enumerate(self.layers):
            state, residual = self._enter(layer, hidden)
            earlier = [(key.index_select(0, kept), value.index_select(0, kept)) for key, value in self.own[index]]
            self.own[index] = [*earlier, self._key_value(index, state, tokens, rotation)]
            query = layer.self_attn.as_query(self._project(index, "q_proj", state, tokens), *rotation)
            hidden = layer.finish(residual, self._attend(index, query, slots, step))
        return hidden

    def _enter(self, layer: DecoderLayer, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if layer is not self.model.first_layer:
            return layer.prepare(hidden)
        state: Tensor = self.model.first_layer.hidden_norm(hidden)
        return state, state if self.model.first_layer.norm_before_residual else hidden

    def _project(self, index: int, name: str, state: Tensor, tokens: Tensor | None) -> Tensor:
        if index == 0:
            return self.tokens.project(name, state, tokens)
        projected: Tensor = getattr(self.layers[index].self_attn, name)(state)
        return projected

    def _key_value(self, index: int, state: Tensor, tokens: Tensor | None, rotation: Rotation) -> tuple[Tensor, Tensor]:
        attention = self.layers[index].self_attn
        key = attention.as_key(self._project(index, "k_proj", state, tokens), *rotation)
        return key, attention.as_heads(self._project(index, "v_proj", state, tokens))

    def _attend(self, index: int, query: Tensor, slots: Tensor, step: int) -> Tensor:
        attention, own, window = self.layers[index].self_attn, self.own[index], self.layers[index].self_attn.window
        if window is not None and not self.inputs.windows_from_start:
            own = own[max(step - window, 0) :]
            window -= step
        blocks = plan_blocks(slots, self.inputs.document_lengths, window)
        return packed_attention(query, *self.context[index], own, blocks, attention.scale)
