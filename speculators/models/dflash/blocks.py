"""Attention of blocks of slots over the verifier's states before their anchors and over themselves.

Slot k of a block with anchor a stands at position a + k of its document. Its layer's keys are those made of the
verifier's states at positions before a, and those of its own block. Shape suffixes: C context positions, A blocks of
one document, S slots of a block, N key heads, G query heads a key head, D head size, L context keys, W = L + S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from speculators.models.dflash.anchors import documents_of
from speculators.models.flex import attend_by_flex, number, up_to_tile

# Scores a head that exist at a time: bounds the memory of long documents.
MAX_SCORES = 1 << 20


@dataclass(frozen=True)
class BlockMask:
    """Which keys a slot sees; positions are those of one document.

    Of the context, what lies before the block's anchor. Of its block, everything, or with `causal` what is not after
    it. With `window`, only keys less than `window` positions before the slot: a window ends at the slot's own position,
    as in vLLM, not at its block's anchor.
    """

    causal: bool
    window: int | None = None

    def context(self, anchor: Tensor, slot: Tensor, key: Tensor) -> Tensor:
        """Bool, broadcast over int64 positions of anchors and context keys and numbers of slots."""
        seen = key < anchor
        return seen if self.window is None else seen & (key > anchor + slot - self.window)

    def block(self, slot: Tensor, key_slot: Tensor) -> Tensor:
        """Bool, broadcast over numbers of slots of one block."""
        seen = key_slot <= slot if self.causal else torch.ones_like(key_slot <= slot)
        return seen if self.window is None else seen & (key_slot > slot - self.window)

    def block_interval(self, slot: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
        """The first slot of its block that a slot sees, and the end of those it sees, int64."""
        first = torch.zeros_like(slot) if self.window is None else (slot + 1 - self.window).clamp(min=0)
        return first, slot + 1 if self.causal else torch.full_like(slot, num_slots)

    def context_interval(self, anchor: Tensor, slot: Tensor, document_start: Tensor) -> tuple[Tensor, Tensor]:
        """The first context key that a slot sees, and the end of those it sees, int64."""
        if self.window is None:
            return document_start, anchor
        return torch.maximum(document_start, anchor + slot + 1 - self.window), anchor


class BlockKeys:
    """Keys of blocks as `flex` takes them: those of the context, then, from a new tile on, those of all blocks."""

    def __init__(self, plan: BlockPlan, document_lengths: Sequence[int]) -> None:
        device, slots = plan.anchors_A.device, plan.num_slots
        lengths = torch.tensor(document_lengths, dtype=torch.int64, device=device)
        start_C = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        self.mask, self.num_slots = plan.mask, slots
        self.anchors_A, self.start_A = plan.anchors_A, start_C[plan.anchors_A]
        self.num_queries, self.own_start = slots * len(plan.anchors_A), up_to_tile(len(start_C))
        self.num_keys = self.own_start + self.num_queries
        self._own_start = number(self.own_start, device)

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Bool, broadcast over int64 numbers of queries and keys."""
        block, slot, own = query // self.num_slots, query % self.num_slots, key - self._own_start
        anchor = self.anchors_A[block]
        context = self.mask.context(anchor, slot, key) & (key >= self.start_A[block])
        of_block = self.mask.block(slot, own % self.num_slots) & (own >= 0) & (own // self.num_slots == block)
        seen: Tensor = context | of_block
        return seen

    def intervals(self) -> list[tuple[Tensor, Tensor]]:
        """That of the context and that of the block."""
        query_R = torch.arange(self.num_queries, device=self.anchors_A.device)
        block_R, slot_R = query_R // self.num_slots, query_R % self.num_slots
        first_R, end_R = self.mask.block_interval(slot_R, self.num_slots)
        start_R = self.own_start + block_R * self.num_slots
        context = self.mask.context_interval(self.anchors_A[block_R], slot_R, self.start_A[block_R])
        return [context, (start_R + first_R, start_R + end_R)]


@dataclass(frozen=True)
class Piece:
    """Blocks `blocks` of one document, and the context positions `keys` that any of them sees."""

    blocks: slice
    keys: slice


@dataclass(frozen=True)
class BlockPlan:
    """Blocks of a packed batch, cut into pieces of bounded size.

    `anchors_A` int64, ascending: index of each block's anchor among the context positions of all documents.
    """

    anchors_A: Tensor
    num_slots: int
    mask: BlockMask
    pieces: list[Piece]

    @classmethod
    def make(
        cls,
        anchors_A: Tensor,
        num_slots: int,
        document_lengths: Sequence[int],
        mask: BlockMask,
        max_scores: int | None = None,
    ) -> BlockPlan:
        """Plan so that a piece of more than one block has at most `max_scores` (`MAX_SCORES`) scores a head."""
        max_scores = MAX_SCORES if max_scores is None else max_scores
        anchors, pieces, start, first = anchors_A.tolist(), [], 0, 0
        for length, count in zip(document_lengths, documents_of(anchors_A, document_lengths), strict=True):
            end = start + count
            while start < end:
                low = first if mask.window is None else max(first, anchors[start] - mask.window + 1)
                stop = start + 1
                while stop < end and cls._scores(stop + 1 - start, anchors[stop] - low, num_slots) <= max_scores:
                    stop += 1
                pieces.append(Piece(slice(start, stop), slice(min(low, anchors[stop - 1]), anchors[stop - 1])))
                start = stop
            first += length
        return cls(anchors_A, num_slots, mask, pieces)

    @staticmethod
    def _scores(blocks: int, keys: int, num_slots: int) -> int:
        return blocks * num_slots * (keys + num_slots)

    def hidden(self, piece: Piece) -> Tensor:
        """Bool [A, S, 1, W], true where a slot must not look."""
        anchor_A11 = self.anchors_A[piece.blocks, None, None]
        slot_S = torch.arange(self.num_slots, device=anchor_A11.device)
        keys_L = torch.arange(piece.keys.start, piece.keys.stop, device=anchor_A11.device)
        blocks, slots = len(anchor_A11), self.num_slots
        context_ASL = self.mask.context(anchor_A11, slot_S[:, None], keys_L).expand(blocks, slots, -1)
        block_ASS = self.mask.block(slot_S[:, None], slot_S).expand(blocks, slots, -1)
        return ~torch.cat((context_ASL, block_ASS), -1)[:, :, None]


def block_attention(
    q_ASQD: Tensor, block: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], plan: BlockPlan, scale: float
) -> Tensor:
    """Attend and return [A, S, Q, D]; `block` are keys and values [A, S, N, D], `context` [C, N, D].

    Runs in the dtype of the values, on a CPU in at least float32, as the softmax does: products of many small shapes
    are slower there in half precision (see `hardware.padded_rows`). The result has the dtype of the values.
    """
    asked = block[1].dtype
    dtype = torch.promote_types(asked, torch.float32) if block[1].device.type == "cpu" else asked
    tensors = [tensor.to(dtype) for tensor in (q_ASQD, *block, *context)]
    out: Tensor = _BlockAttention.apply(*tensors, plan, scale)  # type: ignore[no-untyped-call]  # torch's apply is untyped
    return out.to(asked)


def flex_block_attention(
    q_ASQD: Tensor, block: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], keys: BlockKeys, scale: float
) -> Tensor:
    """What `block_attention` computes, by a fused kernel; on a CPU without gradients alone."""
    room = keys.own_start - len(context[0])
    joined = [
        torch.cat((F.pad(of_context, (0, 0, 0, 0, 0, room)), of_block.flatten(0, 1)))
        for of_context, of_block in zip(context, block, strict=True)
    ]
    out_RQD = attend_by_flex(q_ASQD.flatten(0, 1), joined[0], joined[1], keys, scale)
    return out_RQD.view(*q_ASQD.shape[:2], *out_RQD.shape[1:])


class _BlockAttention(torch.autograd.Function):
    """Piece by piece, both ways; the backward pass makes the weights again, which would fill the memory."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, plan, scale = arguments
        ctx.save_for_backward(*inputs)
        ctx.plan, ctx.scale = plan, scale
        heads = _Heads(*inputs)
        out_NASGD = torch.empty_like(heads.q_NASGD)
        with torch.autocast(inputs[0].device.type, enabled=False):
            for piece in plan.pieces:
                out_NASGD[:, piece.blocks] = heads.mix(piece, heads.weights(piece, plan.hidden(piece), scale))
        return _heads_last(out_NASGD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ASQD: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: with gradient checkpointing they can be had a single time.
        inputs, plan = ctx.saved_tensors, ctx.plan
        heads = _Heads(*inputs)
        gradients = _Heads(*(torch.zeros_like(tensor) for tensor in inputs))
        out_NASGD = _heads_first(gradient_ASQD, len(heads.q_NASGD))
        with torch.autocast(gradient_ASQD.device.type, enabled=False):
            for piece in plan.pieces:
                weights = heads.weights(piece, plan.hidden(piece), ctx.scale)
                heads.backward(piece, weights, out_NASGD[:, piece.blocks], ctx.scale, gradients)
        rest = (gradients.k_ASND, gradients.v_ASND, gradients.k_CND, gradients.v_CND)
        return _heads_last(gradients.q_NASGD), *rest, None, None


def _heads_first(tensor_ASQD: Tensor, kv_heads: int) -> Tensor:
    """[A, S, Q, D] -> [N, A, S, G, D], contiguous: large products then need no copies."""
    grouped: Tensor = tensor_ASQD.unflatten(2, (kv_heads, -1))
    return grouped.permute(2, 0, 1, 3, 4).contiguous()


def _heads_last(tensor_NASGD: Tensor) -> Tensor:
    return tensor_NASGD.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Heads:
    """The tensors of an attention, or their gradients, and one piece's part of the work on them.

    In products, x stands for G: letters that are summed over in another order than they lie in memory cost copies.
    """

    def __init__(self, q_ASQD: Tensor, k_ASND: Tensor, v_ASND: Tensor, k_CND: Tensor, v_CND: Tensor) -> None:
        self.k_ASND, self.v_ASND, self.k_CND, self.v_CND = k_ASND, v_ASND, k_CND, v_CND
        self.q_NASGD = _heads_first(q_ASQD, k_CND.shape[1])

    def weights(self, piece: Piece, hidden: Tensor, scale: float) -> Tensor:
        """Softmax over the context and the block, [N, A, S, G, W]."""
        scores = self._products(piece, self.q_NASGD[:, piece.blocks], self.k_CND, self.k_ASND)
        scores.mul_(scale).masked_fill_(hidden, float("-inf"))
        wide: Tensor = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        return wide.to(scores.dtype)

    def mix(self, piece: Piece, weights: Tensor) -> Tensor:
        """Values weighed, [N, A, S, G, D]."""
        return self._sums(piece, weights, self.v_CND, self.v_ASND)

    def backward(self, piece: Piece, weights: Tensor, out: Tensor, scale: float, into: _Heads) -> None:
        """Add one piece's gradients, given that of its output."""
        change = self._products(piece, out, self.v_CND, self.v_ASND)
        scores = torch._softmax_backward_data(change, weights, -1, weights.dtype).mul_(scale)
        q_NASGD = self.q_NASGD[:, piece.blocks]
        into.q_NASGD[:, piece.blocks] = self._sums(piece, scores, self.k_CND, self.k_ASND)
        for part, other, of_context, of_block in (
            (scores, q_NASGD, into.k_CND, into.k_ASND),
            (weights, out, into.v_CND, into.v_ASND),
        ):
            context, block = self._split(piece, part)
            of_context[piece.keys] += torch.einsum("nasxl,nasxd->lnd", context, other)
            of_block[piece.blocks] = torch.einsum("nasxk,nasxd->aknd", block, other)

    def _products(self, piece: Piece, of_slots: Tensor, of_context: Tensor, of_block: Tensor) -> Tensor:
        """Each slot's products with the context and its block, [N, A, S, G, W]."""
        context = torch.einsum("nasxd,lnd->nasxl", of_slots, of_context[piece.keys])
        return torch.cat((context, torch.einsum("nasxd,aknd->nasxk", of_slots, of_block[piece.blocks])), -1)

    def _sums(self, piece: Piece, weights: Tensor, of_context: Tensor, of_block: Tensor) -> Tensor:
        """The context's and the block's vectors weighed, [N, A, S, G, D]."""
        context, block = self._split(piece, weights)
        summed: Tensor = torch.einsum("nasxl,lnd->nasxd", context, of_context[piece.keys])
        return summed + torch.einsum("nasxk,aknd->nasxd", block, of_block[piece.blocks])

    def _split(self, piece: Piece, weights: Tensor) -> tuple[Tensor, Tensor]:
        length = piece.keys.stop - piece.keys.start
        return weights[..., :length], weights[..., length:]
