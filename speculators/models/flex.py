"""The fused form of packed attention for GPUs: torch's flex_attention over the masks of `masks`.

A kernel of flex goes through tiles of queries by keys. Which tiles it visits, and which of these need no mask, is
worked out here from the intervals of keys that each query sees: torch's own `create_block_mask` would evaluate the mask
on the whole grid. Shape suffixes as in `attention`; K keys of all kinds one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from speculators.models.hardware import rounded_up
from speculators.models.masks import PackedMask

TILE = 128


class SeenKeys(Protocol):
    """Which of `num_keys` keys each of `num_queries` queries sees, as a predicate and as intervals."""

    num_queries: int
    num_keys: int

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Bool, broadcast over int64 numbers of queries and keys."""
        ...

    def intervals(self) -> list[tuple[Tensor, Tensor]]:
        """First key and end, int64 [R] each, of every interval outside which a query sees nothing."""
        ...


def up_to_tile(size: int) -> int:
    """The least multiple of a tile's side that is no less."""
    return rounded_up(size, TILE)


def number(value: int, device: torch.device) -> Tensor:
    """An integer that differs from batch to batch, as a tensor: compiled code would be made again for each."""
    return torch.tensor(value, dtype=torch.int64, device=device)


class PackedKeys:
    """Keys of a draft unrolled over packed documents: those of its context, then `num_own` of each query's own.

    Queries stand at the context positions `slots_R` (int64, ascending). Each kind of keys begins with a tile.
    """

    def __init__(self, slots_R: Tensor, document_lengths: Sequence[int], mask: PackedMask, num_own: int) -> None:
        device = slots_R.device
        lengths = torch.tensor(document_lengths, dtype=torch.int64, device=device)
        self.slots_R, self.mask, self.num_own = slots_R, mask, num_own
        self.document_C = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        self.start_C = (lengths.cumsum(0) - lengths)[self.document_C]
        self.num_queries, context = len(slots_R), len(self.document_C)
        self.own_start, self.stride = up_to_tile(context), up_to_tile(self.num_queries)
        self.num_keys = self.own_start + num_own * self.stride
        self._numbers = [number(value, device) for value in (context - 1, self.own_start, self.stride)]

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Bool, broadcast over int64 numbers of queries and keys."""
        last, own_start, stride = self._numbers
        slot, place = self.slots_R[query], torch.minimum(key, last)
        context = self.mask.visible(slot, place, self.document_C[slot], self.document_C[place]) & (key <= last)
        return context | ((key >= own_start) & ((key - own_start) % stride == query))

    def intervals(self) -> list[tuple[Tensor, Tensor]]:
        """That of the context, and one a key of its own."""
        first_R, end_R = self.mask.interval(self.slots_R, self.start_C[self.slots_R])
        rows_R = torch.arange(self.num_queries, device=self.slots_R.device)
        own = [rows_R + self.own_start + step * self.stride for step in range(self.num_own)]
        return [(first_R, end_R), *((place_R, place_R + 1) for place_R in own)]

    def keys(self, context_CND: Tensor, own: Sequence[Tensor]) -> Tensor:
        """Keys (or values) [C, N, D] and own ones [R, N, D] where the mask expects them, [K, N, D]."""
        parts = [F.pad(context_CND, (0, 0, 0, 0, 0, self.own_start - len(context_CND)))]
        parts += [F.pad(own_RND, (0, 0, 0, 0, 0, self.stride - len(own_RND))) for own_RND in own]
        return torch.cat(parts)


def flex_packed_attention(
    q_RQD: Tensor,
    k_CND: Tensor,
    v_CND: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    mask: PackedKeys,
    scale: float,
) -> Tensor:
    """What `attention.packed_attention` computes; on a CPU without gradients alone."""
    keys, values = mask.keys(k_CND, [key for key, _ in own]), mask.keys(v_CND, [value for _, value in own])
    return attend_by_flex(q_RQD, keys, values, mask, scale)


def attend_by_flex(q_RQD: Tensor, k_KND: Tensor, v_KND: Tensor, mask: SeenKeys, scale: float) -> Tensor:
    """Attend and return [R, Q, D], in the dtype of the values; key heads are shared by groups of query heads."""
    q, k, v = (tensor.to(v_KND.dtype).transpose(0, 1)[None] for tensor in (q_RQD, k_KND, v_KND))
    # For a CPU, torch's code for dynamic shapes does not compile (2.13); only comparisons run it there.
    kernel = _kernel(q.device.type != "cpu")
    out: Tensor = kernel(q, k, v, block_mask=tiles(mask, q.device), scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@cache
def _kernel(dynamic: bool) -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=dynamic)


def tiles(mask: SeenKeys, device: torch.device) -> BlockMask:
    """The mask as flex takes it: per tile of queries the tiles of keys with something to see, and those seen wholly."""
    rows, columns = (up_to_tile(size) // TILE for size in (mask.num_queries, mask.num_keys))
    start_T = TILE * torch.arange(columns, device=device)
    some = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    whole = torch.zeros_like(some)

    def by_tile(values_R: Tensor, fill: int) -> Tensor:
        return F.pad(values_R, (0, rows * TILE - len(values_R)), value=fill).view(rows, TILE)

    for first_R, end_R in mask.intervals():
        seen_R = first_R < end_R
        # A query that sees nothing widens no tile's range, and leaves none seen wholly.
        first_R, end_R = torch.where(seen_R, first_R, mask.num_keys), torch.where(seen_R, end_R, 0)
        low, high = by_tile(first_R, mask.num_keys).amin(1), by_tile(end_R, 0).amax(1)
        last_first, first_end = by_tile(first_R, 0).amax(1), by_tile(end_R, mask.num_keys).amin(1)
        some |= (start_T < high[:, None]) & (start_T + TILE > low[:, None])
        whole |= (start_T >= last_first[:, None]) & (start_T + TILE <= first_end[:, None])
    part_counts, parts = _listed(some & ~whole)
    whole_counts, wholes = _listed(whole)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.visible(query, key)

    lengths = (mask.num_queries, mask.num_keys)
    return BlockMask.from_kv_blocks(
        part_counts, parts, whole_counts, wholes, BLOCK_SIZE=TILE, mask_mod=mask_mod, seq_lengths=lengths
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of keys each tile of queries has, int32 [1, 1, rows], and which: the first so many of a row."""
    counts = chosen.sum(1, dtype=torch.int32)
    order = chosen.int().argsort(stable=True, dim=1, descending=True).int()
    return counts[None, None].contiguous(), order[None, None].contiguous()
