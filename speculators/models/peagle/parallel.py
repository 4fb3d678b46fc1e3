"""The training pass of a P-EAGLE draft: all depths of all anchors at once, over packed documents.

Depth 0 are the context positions themselves. An element of depth d >= 1 at anchor a sees the depth-0 keys of its
document up to a, and the keys of the depths 1..d at the same anchor: what it will see in serving, where these are the
slots a+1..a+d. Shape suffixes: C context positions, R elements of one depth, M those of the depths >= 1, E = C + M,
Q query heads, N key heads, D head size, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from speculators.models.attention import Block, packed_attention, plan_blocks
from speculators.models.eagle3.network import FusedDraftModel
from speculators.models.flex import PackedKeys, flex_packed_attention
from speculators.models.layers import DecoderLayer
from speculators.models.masks import PackedMask

# Residual [E, H], and queries, keys and values [E, heads * D] before their norms and rotation.
Projections = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass
class Depths:
    """Training inputs, aligned and free of padding: documents one after another, `document_lengths` positions each.

    Context position c holds `features_CX` of some token, the id of the token after it in `token_ids_C` (int64) and its
    rotary position in `positions_C` (int64). `anchors[d]` (int64 [R], ascending) are the context positions with an
    element of depth d; `anchors[d]` must be a subset of `anchors[d-1]`.
    """

    features_CX: Tensor
    token_ids_C: Tensor
    positions_C: Tensor
    document_lengths: Sequence[int]
    anchors: Sequence[Tensor]


class ParallelTrunk:
    """The layers over one packed batch; `mask_slot` is the embedding and state [1, H] of slots of unknown tokens."""

    def __init__(self, model: FusedDraftModel, mask_slot: tuple[Tensor, Tensor], inputs: Depths) -> None:
        self.model, self.mask_slot, self.inputs = model, mask_slot, inputs
        self.context = torch.arange(len(inputs.positions_C), device=inputs.positions_C.device)
        self.deeper = inputs.anchors[1:]
        self.sizes = [len(self.context), *map(len, self.deeper)]
        # Where the anchors of a depth lie among those of the depth before.
        self.kept = [torch.searchsorted(before, after) for before, after in pairwise(self.deeper)]
        positions = [inputs.positions_C[anchors] + depth for depth, anchors in enumerate(self.deeper, 1)]
        self.positions_E = torch.cat((inputs.positions_C, *positions))
        self.end = int(self.positions_E.max()) + 1
        self._blocks: dict[tuple[int, int | None], list[Block]] = {}

    def run(self) -> list[Tensor]:
        """The last layer's output [R, H] at the anchors of each depth."""
        layers, hidden = self.model.blocks(), self.inputs.features_CX
        for index, layer in enumerate(layers):
            slots = self.inputs.anchors[0] if index == len(layers) - 1 else self.context
            enter = partial(_entered, layer) if index else self._first
            hidden = self.model.segment(partial(self._run_layer, layer, enter, slots), hidden)
        return list(hidden.split([len(anchors) for anchors in self.inputs.anchors]))

    def _run_layer(
        self, layer: DecoderLayer, enter: Callable[[Tensor], Projections], slots: Tensor, inputs: Tensor
    ) -> Tensor:
        return self._layer(layer, *enter(inputs), slots)

    def _first(self, features_CX: Tensor) -> Projections:
        """What enters the first layer; before rotation all elements of depth >= 1 are alike there."""
        model = self.model
        embeds_CH, hidden_CH = model.embed(self.inputs.token_ids_C), model.combine(features_CX)
        of_context, residual_CH = model.first_layer.join(embeds_CH, hidden_CH)
        of_mask, residual_1H = model.first_layer.join(*self.mask_slot)
        mine = (residual_CH, *_projected(model.first_layer, of_context))
        theirs = (residual_1H, *_projected(model.first_layer, of_mask))
        count = sum(self.sizes[1:])
        residual, query, key, value = (
            torch.cat((one, other.expand(count, -1))) for one, other in zip(mine, theirs, strict=True)
        )
        return residual, query, key, value

    def _layer(
        self, layer: DecoderLayer, residual: Tensor, query: Tensor, key: Tensor, value: Tensor, slots: Tensor
    ) -> Tensor:
        """A layer's output at the context positions `slots` (int64) and at all elements of depth >= 1, in order."""
        attention = layer.self_attn
        cos, sin = self.model.rotary.at(self.positions_E, self.end, residual.dtype)
        keys, values = attention.as_key(key, cos, sin), attention.as_heads(value)
        if len(slots) < len(self.context):
            rows = torch.cat((slots, torch.arange(len(self.context), len(query), device=slots.device)))
            residual, query, cos, sin = (part.index_select(0, rows) for part in (residual, query, cos, sin))
        attended = self._attend(layer, attention.as_query(query, cos, sin), keys, values, slots)
        return layer.finish(residual, attended)

    def _attend(self, layer: DecoderLayer, q_RQD: Tensor, k_END: Tensor, v_END: Tensor, slots: Tensor) -> Tensor:
        """Attended heads [R, Q, D] of the queries, depth by depth."""
        scale, window = layer.self_attn.scale, layer.self_attn.window
        queries = q_RQD.split([len(slots), *self.sizes[1:]])
        (k_CND, *keys), (v_CND, *values) = k_END.split(self.sizes), v_END.split(self.sizes)
        own: list[tuple[Tensor, Tensor]] = []
        attended = [self._attend_depth(queries[0], (k_CND, v_CND), [], slots, window, scale)]
        for depth, anchors in enumerate(self.deeper, 1):
            if depth > 1:
                kept = self.kept[depth - 2]
                own = [(key.index_select(0, kept), value.index_select(0, kept)) for key, value in own]
            own.append((keys[depth - 1], values[depth - 1]))
            # A window ends at the element's own position, depth places behind its anchor.
            seen = own if window is None else own[max(depth - window, 0) :]
            reach = None if window is None else window - depth
            attended.append(self._attend_depth(queries[depth], (k_CND, v_CND), seen, anchors, reach, scale))
        return torch.cat(attended)

    def _attend_depth(
        self,
        q_RQD: Tensor,
        context: tuple[Tensor, Tensor],
        own: Sequence[tuple[Tensor, Tensor]],
        slots: Tensor,
        reach: int | None,
        scale: float,
    ) -> Tensor:
        """Attended heads of the queries at `slots`, which see `reach` context positions up to their anchors."""
        if self.model.execution.uses_flex(q_RQD.device):
            mask = PackedKeys(slots, self.inputs.document_lengths, PackedMask(reach), len(own))
            return flex_packed_attention(q_RQD, *context, own, mask, scale)
        return packed_attention(q_RQD, *context, own, self._plan(slots, reach), scale)

    def _plan(self, slots: Tensor, reach: int | None) -> list[Block]:
        # The trunk keeps the slots' tensors alive, so that no other one gets the same identity.
        key = (id(slots), reach)
        if key not in self._blocks:
            self._blocks[key] = plan_blocks(slots, self.inputs.document_lengths, reach)
        return self._blocks[key]


def _entered(layer: DecoderLayer, hidden: Tensor) -> Projections:
    inputs, residual = layer.prepare(hidden)
    return residual, *_projected(layer, inputs)


def _projected(layer: DecoderLayer, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    attention = layer.self_attn
    return attention.q_proj(inputs), attention.k_proj(inputs), attention.v_proj(inputs)
