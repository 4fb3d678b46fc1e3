"""Attention over packed documents for a draft that is unrolled on its own outputs.

A query of step k sees the step-0 keys of its document up to itself, and the keys that its own position got at the steps
1..k. Shape suffixes: C context positions, R queries (some of the C, in order), N key heads, G query heads a key head,
Q = N*G, D head size, L keys of a block, P own keys, W = L + P.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speculators.models.masks import PackedMask

# Queries of one document that share a block of scores, and scores a head that such a block has at most, where that
# leaves it a query: they bound the memory of long documents.
BLOCK_ROWS = 512
MAX_SCORES = 1 << 21
# Weights of one attention that are kept for its backward; where there are more, they are made again, block by block.
MAX_KEPT_WEIGHTS = 1 << 26


@dataclass(frozen=True)
class Block:
    """Queries `rows` at the context positions `slots_R` (int64) of one document, which look at positions `keys`."""

    rows: slice
    keys: slice
    slots_R: Tensor
    mask: PackedMask

    @property
    def hidden(self) -> Tensor:
        """Bool [rows, keys], true where a query must not look; made when asked for, since all blocks' would be a grid.

        A grid of 32k by 32k takes a gigabyte.
        """
        keys = torch.arange(self.keys.start, self.keys.stop, device=self.slots_R.device)
        return ~self.mask.in_document(self.slots_R[:, None], keys)

    @property
    def size(self) -> int:
        """Scores a head."""
        return len(self.slots_R) * int(self.keys.stop - self.keys.start)


def plan_blocks(slots_R: Tensor, document_lengths: Sequence[int], window: int | None) -> list[Block]:
    """Cut the queries at ascending context positions `slots_R` (int64) into blocks within one document.

    A query sees the last `window` context positions up to its own (None: all of them; 0 or less: none).
    """
    mask = PackedMask(window)
    ends = torch.tensor(document_lengths, dtype=torch.int64).cumsum(0)
    slots = slots_R.cpu()
    bounds = torch.searchsorted(slots, ends).tolist()
    blocks, first_row, first_key = [], 0, 0
    for last_row, document_end in zip(bounds, ends.tolist(), strict=True):
        for rows in _cut(slots, slice(first_row, last_row), first_key, window):
            end = int(slots[rows.stop - 1]) + 1
            first = first_key if window is None else min(max(first_key, int(slots[rows.start]) - window + 1), end)
            blocks.append(Block(rows, slice(first, end), slots_R[rows], mask))
        first_row, first_key = last_row, document_end
    return blocks


def _cut(slots: Tensor, document: slice, first_key: int, window: int | None) -> Iterator[slice]:
    """A document's queries in runs of at most `BLOCK_ROWS`, and fewer where these would see too many keys."""
    row = document.start
    while row < document.stop:
        stop = min(row + BLOCK_ROWS, document.stop)
        first = first_key if window is None else max(first_key, int(slots[row]) - window + 1)
        # Fewer rows never see more keys.
        stop = min(stop, row + max(MAX_SCORES // max(int(slots[stop - 1]) + 1 - first, 1), 1))
        yield slice(row, stop)
        row = stop


def packed_attention(
    q_RQD: Tensor,
    k_CND: Tensor,
    v_CND: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    blocks: Sequence[Block],
    scale: float,
) -> Tensor:
    """Attend and return [R, Q, D]; `own`: keys and values [R, N, D] of the steps 1..k at each query.

    Runs in the dtype of `v_CND`, on a CPU in at least float32, as the softmax does: products of many small shapes are
    slower there in half precision (see `hardware.padded_rows`). The result has the dtype of `v_CND`.
    """
    own_k_RNPD = torch.stack([key for key, _ in own], 2) if own else k_CND.new_empty(len(q_RQD), k_CND.shape[1], 0, 1)
    own_v_RNPD = torch.stack([value for _, value in own], 2) if own else own_k_RNPD
    asked = v_CND.dtype
    dtype = torch.promote_types(asked, torch.float32) if v_CND.device.type == "cpu" else asked
    tensors = [tensor.to(dtype) for tensor in (q_RQD, k_CND, v_CND, own_k_RNPD, own_v_RNPD)]
    out: Tensor = _PackedAttention.apply(*tensors, blocks, scale)  # type: ignore[no-untyped-call]  # torch's apply is untyped
    return out.to(asked)


class _PackedAttention(torch.autograd.Function):
    """Scores, softmax and their gradients block by block: autograd would fill and add a whole tensor a slice."""

    @staticmethod
    def forward(
        ctx: Any,
        q_RQD: Tensor,
        k_CND: Tensor,
        v_CND: Tensor,
        own_k_RNPD: Tensor,
        own_v_RNPD: Tensor,
        blocks: Sequence[Block],
        scale: float,
    ) -> Tensor:
        heads = _Heads(q_RQD, k_CND, v_CND, own_k_RNPD, own_v_RNPD)
        out_NGRD = torch.empty_like(heads.q_NGRD)
        kept = q_RQD.shape[1] * sum(block.size for block in blocks) <= MAX_KEPT_WEIGHTS
        weights = []
        with torch.autocast(q_RQD.device.type, enabled=False):
            for block in blocks:
                weights_NGRW = heads.weights(block, scale)
                out_NGRD[:, :, block.rows] = heads.mix(block, weights_NGRW)
                if kept:
                    weights.append(weights_NGRW)
        ctx.save_for_backward(q_RQD, k_CND, v_CND, own_k_RNPD, own_v_RNPD, *weights)
        ctx.blocks, ctx.scale = blocks, scale
        return out_NGRD.permute(2, 0, 1, 3).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient_RQD: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: with gradient checkpointing they can be had a single time.
        saved = ctx.saved_tensors
        inputs, kept = saved[:5], saved[5:]
        heads = _Heads(*inputs)
        gradients = _Heads(*(torch.zeros_like(tensor) for tensor in inputs))
        out_NGRD = _grouped(gradient_RQD, inputs[1].shape[1])
        with torch.autocast(gradient_RQD.device.type, enabled=False):
            for number, block in enumerate(ctx.blocks):
                weights = kept[number] if kept else heads.weights(block, ctx.scale)
                heads.backward(block, weights, out_NGRD[:, :, block.rows], ctx.scale, gradients)
        return gradients.q_RQD, gradients.k_CND, gradients.v_CND, gradients.own_k_RNPD, gradients.own_v_RNPD, None, None


def _grouped(tensor_RQD: Tensor, kv_heads: int) -> Tensor:
    rows, heads, size = tensor_RQD.shape
    return tensor_RQD.view(rows, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)


class _Heads:
    """The five tensors of an attention (or their gradients), and views of them with heads in front."""

    def __init__(self, q_RQD: Tensor, k_CND: Tensor, v_CND: Tensor, own_k_RNPD: Tensor, own_v_RNPD: Tensor) -> None:
        self.q_RQD, self.k_CND, self.v_CND = q_RQD.contiguous(), k_CND, v_CND
        self.own_k_RNPD, self.own_v_RNPD = own_k_RNPD, own_v_RNPD
        self.q_NGRD = _grouped(self.q_RQD, k_CND.shape[1])
        self.k_NCD, self.v_NCD = k_CND.transpose(0, 1), v_CND.transpose(0, 1)
        self.own_k_NRPD, self.own_v_NRPD = own_k_RNPD.transpose(0, 1), own_v_RNPD.transpose(0, 1)

    def weights(self, block: Block, scale: float) -> Tensor:
        """Softmax over the block's keys and the queries' own, [N, G, R, W]."""
        q_NGRD = self.q_NGRD[:, :, block.rows]
        kv_heads, groups = q_NGRD.shape[:2]
        scores = torch.bmm(q_NGRD.flatten(1, 2), self.k_NCD[:, block.keys].transpose(1, 2))
        hidden = block.hidden
        scores_NGRL = scores.view(kv_heads, groups, *hidden.shape).masked_fill_(hidden, float("-inf"))
        if self.own_k_RNPD.shape[2]:
            own_NGRP = (q_NGRD[:, :, :, None] * self.own_k_NRPD[:, None, block.rows]).sum(-1)
            scores_NGRL = torch.cat((scores_NGRL, own_NGRP), -1)
        wide = torch.promote_types(q_NGRD.dtype, torch.float32)
        return scores_NGRL.mul_(scale).softmax(-1, dtype=wide).to(q_NGRD.dtype)

    def mix(self, block: Block, weights_NGRW: Tensor) -> Tensor:
        """Values weighed, [N, G, R, D]."""
        width = block.keys.stop - block.keys.start
        main_NSL = weights_NGRW[..., :width].flatten(1, 2)
        out_NGRD = torch.bmm(main_NSL, self.v_NCD[:, block.keys]).view(self.q_NGRD[:, :, block.rows].shape)
        if self.own_v_RNPD.shape[2]:
            own_v_NRPD = self.own_v_NRPD[:, None, block.rows]
            out_NGRD += (weights_NGRW[..., width:, None] * own_v_NRPD).sum(-2)
        return out_NGRD

    def backward(self, block: Block, weights_NGRW: Tensor, out_NGRD: Tensor, scale: float, into: _Heads) -> None:
        """Add one block's gradients, given that of its output."""
        rows, keys, width = block.rows, block.keys, block.keys.stop - block.keys.start
        out_NSD, q_NSD = out_NGRD.flatten(1, 2), self.q_NGRD[:, :, rows].flatten(1, 2)
        main_NSL = weights_NGRW[..., :width].flatten(1, 2)
        into.v_NCD[:, keys] += torch.bmm(main_NSL.transpose(1, 2), out_NSD)
        change = torch.bmm(out_NSD, self.v_NCD[:, keys].transpose(1, 2)).view(*weights_NGRW.shape[:3], width)
        has_own = bool(self.own_k_RNPD.shape[2])
        if has_own:
            own_v_NRPD = self.own_v_NRPD[:, None, rows]
            into.own_v_NRPD[:, rows] = (weights_NGRW[..., width:, None] * out_NGRD[:, :, :, None]).sum(1)
            change = torch.cat((change, (out_NGRD[:, :, :, None] * own_v_NRPD).sum(-1)), -1)
        scores = torch._softmax_backward_data(change, weights_NGRW, -1, weights_NGRW.dtype).mul_(scale)
        main_NSL = scores[..., :width].flatten(1, 2)
        into.k_NCD[:, keys] += torch.bmm(main_NSL.transpose(1, 2), q_NSD)
        q_NGRD = torch.bmm(main_NSL, self.k_NCD[:, keys]).view(out_NGRD.shape)
        if has_own:
            own_NGRP1 = scores[..., width:, None]
            q_NGRD += (own_NGRP1 * self.own_k_NRPD[:, None, rows]).sum(-2)
            into.own_k_NRPD[:, rows] = (own_NGRP1 * self.q_NGRD[:, :, rows, None]).sum(1)
        into.q_NGRD[:, :, rows] = q_NGRD
