"""One slot cache for verifier and drafts, and the attention that reads it.

A row of the cache is a slot that belongs to one request. Entries are written at explicit positions, so that a rejected
token is forgotten by moving a length: the next write lands on it and nothing is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from speculators.errors import EngineError
from speculators.models.running_state import RunningStates

_FIRST_CAPACITY = 256
_GROUP_ROWS = 8
# BLAS takes up to twice as long for a few rows less than a multiple of this (float32 on a CPU).
_PACKED_MULTIPLE = 8


@dataclass
class SlotWrite:
    """Where one forward pass writes: rows `rows` of the cache, `width` positions a row from `starts` on.

    `positions_BT` is int64, `end` the exclusive upper bound of all positions written. For layers with a running state:
    row b has `lengths[b]` tokens of `width`, the rest is padding (None: all are tokens), and its first `settled[b]`
    tokens are never taken back (None: those before the write).

    With `packed`, int64 [N], what is written lies in one row, [1, N, ...], without the padding: entry n belongs to
    place packed[n] of the B x T that have positions.
    """

    rows: slice
    starts: list[int]
    width: int
    end: int
    positions_BT: Tensor
    lengths: list[int] | None = None
    settled: list[int] | None = None
    packed: Tensor | None = None
    _masks: dict[tuple[int | None, bool], Tensor | None] = field(default_factory=dict)
    _groups: list[tuple[slice, int]] | None = None

    @classmethod
    def at(
        cls,
        rows: slice,
        starts: Sequence[int],
        width: int,
        device: torch.device,
        *,
        lengths: list[int] | None = None,
        settled: list[int] | None = None,
    ) -> "SlotWrite":
        """Plan a write of `width` tokens a row, row b at positions starts[b] .. starts[b] + width - 1."""
        first_B = torch.tensor(list(starts), dtype=torch.int64, device=device)
        positions_BT = first_B[:, None] + torch.arange(width, device=device)
        return cls(rows, list(starts), width, max(starts) + width, positions_BT, lengths, settled)

    def without_padding(self) -> "SlotWrite":
        """The same write, packed; itself where it has no padding that is worth it.

        Some padding stays, so that the number of entries is a multiple of 8.
        """
        if self.lengths is None:
            return self
        size, tokens = len(self.lengths) * self.width, sum(self.lengths)
        filling = -tokens % _PACKED_MULTIPLE
        if tokens + filling >= size:
            return self
        places: list[int] = []
        for row, length in enumerate(self.lengths):
            kept = min(filling, self.width - length)
            places += range(row * self.width, row * self.width + length + kept)
            filling -= kept
        return replace(self, packed=torch.tensor(places, dtype=torch.int64, device=self.positions_BT.device))

    def pack(self, values_BTX: Tensor) -> Tensor:
        """What belongs to the entries, [1, N, ...]; as it is where the write is not packed."""
        return values_BTX if self.packed is None else values_BTX.flatten(0, 1)[self.packed][None]

    def unpack(self, values_1NX: Tensor) -> Tensor:
        """What belongs to the entries at their rows and places, [B, T, ...], with zeros elsewhere."""
        if self.packed is None:
            return values_1NX
        spread = values_1NX.new_zeros(self.positions_BT.numel(), *values_1NX.shape[2:])
        spread[self.packed] = values_1NX[0]
        return spread.view(*self.positions_BT.shape, *values_1NX.shape[2:])

    @property
    def places_BT(self) -> Tensor:
        """Where in its row of the cache each token is written, int64: at its position."""
        return self.positions_BT

    def mask(self, window: int | None = None, *, causal: bool = True) -> Tensor | None:
        """Bool [B, 1, T, end], true where a query may look: at or before it, within `window`; None for everywhere.

        Without `causal` it also sees what this write puts after it, but nothing that an earlier one left behind that.
        """
        if (window, causal) not in self._masks:
            self._masks[window, causal] = self._build_mask(window, causal)
        return self._masks[window, causal]

    def groups(self) -> list[tuple[slice, int]]:
        """Rows to attend together, and the end of their longest: one group, or several where that saves reading."""
        if self._groups is None:
            ends = [start + self.width for start in self.starts]
            parts = [slice(row, min(row + _GROUP_ROWS, len(ends))) for row in range(0, len(ends), _GROUP_ROWS)]
            grouped = [(rows, max(ends[rows])) for rows in parts]
            read = sum((rows.stop - rows.start) * end for rows, end in grouped)
            worth_it = read < 0.8 * len(ends) * self.end
            self._groups = grouped if worth_it else [(slice(0, len(ends)), self.end)]
        return self._groups

    def _build_mask(self, window: int | None, causal: bool) -> Tensor | None:
        unbounded = window is None or self.end <= window
        if unbounded and (self.width == 1 or not causal) and min(self.starts) + self.width == self.end:
            return None
        keys_E = torch.arange(self.end, device=self.positions_BT.device)
        last_BT = self.positions_BT if causal else self.positions_BT[:, -1:].expand(-1, self.width)
        mask_BTE = keys_E <= last_BT[:, :, None]
        if not unbounded:
            assert window is not None
            mask_BTE &= keys_E > self.positions_BT[:, :, None] - window
        return mask_BTE[:, None]


class SlotCache:
    """Keys and values of every layer for a fixed number of slots.

    Storage is `[slots, kv heads, capacity, head size]` a layer, zero-initialised and grown by doubling up to what the
    longest request needs; head counts and sizes are taken from the first write of each layer. `running` has the states
    of layers that have one instead.
    """

    def __init__(self, num_layers: int, num_slots: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = device
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.running = RunningStates(num_slots, device)

    @property
    def goes_on_anywhere(self) -> bool:
        """Whether a slot's first entries, wherever they end, are all that what follows them needs."""
        return True

    def write(self, layer: int, write: SlotWrite, k_BNTD: Tensor, v_BNTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values and return views of all that the rows may attend to, [B, N, end, D]."""
        keys = self.keys[layer] = self._with_room(self.keys[layer], k_BNTD, write.end)
        values = self.values[layer] = self._with_room(self.values[layer], v_BNTD, write.end)
        keys_B, values_B = keys[write.rows], values[write.rows]
        if write.packed is not None:
            rows_N, positions_N = write.packed // write.width, write.positions_BT.flatten()[write.packed]
            keys_B[rows_N, :, positions_N] = k_BNTD[0].transpose(0, 1)
            values_B[rows_N, :, positions_N] = v_BNTD[0].transpose(0, 1)
        elif min(write.starts) + write.width == write.end:
            start = write.starts[0]
            keys_B[:, :, start : write.end] = k_BNTD
            values_B[:, :, start : write.end] = v_BNTD
        else:
            rows_B1 = torch.arange(k_BNTD.shape[0], device=self.device)[:, None]
            places_BT = write.places_BT
            keys_B[rows_B1, :, places_BT] = k_BNTD.transpose(1, 2)
            values_B[rows_B1, :, places_BT] = v_BNTD.transpose(1, 2)
        return keys_B[:, :, : write.end], values_B[:, :, : write.end]

    def read(self, layer: int, write: SlotWrite) -> tuple[Tensor, Tensor]:
        """Views of a layer's keys and values that the rows of `write` may attend to, [B, N, end, D]; none is written.

        EngineError where the layer has none up to there.
        """
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None or keys.shape[2] < write.end:
            raise EngineError(f"layer {layer} has no keys and values of {write.end} positions; write them first")
        return keys[write.rows, :, : write.end], values[write.rows, :, : write.end]

    def keep(self, rows: slice, starts: Sequence[int], kept: Sequence[Sequence[int]]) -> None:
        """Move together what stays of entries from `starts` on: row b's at starts[b] + kept[b], which ascend from 0."""
        width = max(map(len, kept))
        if all(len(row) == row[-1] + 1 for row in kept):
            return
        index_S = torch.arange(width, device=self.device)
        first_B1 = torch.tensor(list(starts), device=self.device)[:, None]
        # Rows that keep fewer copy onto themselves.
        padded = [[*row, *range(len(row), width)] for row in kept]
        source_BS, target_BS = first_B1 + torch.tensor(padded, device=self.device), first_B1 + index_S
        rows_B1 = torch.arange(len(kept), device=self.device)[:, None]
        for stored in (*self.keys, *self.values):
            if stored is not None:
                stored_B = stored[rows]
                stored_B[rows_B1, :, target_BS] = stored_B[rows_B1, :, source_BS]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` entries of one slot over another (when a finished request leaves a hole)."""
        for stored in (*self.keys, *self.values):
            if stored is not None:
                stored[target, :, :length] = stored[source, :, :length]
        self.running.move(source, target)

    def _with_room(self, stored: Tensor | None, like_BNTD: Tensor, end: int) -> Tensor:
        capacity = 0 if stored is None else stored.shape[2]
        if stored is not None and end <= capacity:
            return stored
        grown = max(end, 2 * capacity, _FIRST_CAPACITY)
        shape = (self.num_slots, like_BNTD.shape[1], grown, like_BNTD.shape[3])
        fresh = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if stored is not None:
            fresh[:, :, :capacity] = stored
        return fresh


def attend(
    write: SlotWrite,
    q_BQTD: Tensor,
    k_BNED: Tensor,
    v_BNED: Tensor,
    scale: float,
    window: int | None = None,
    *,
    causal: bool = True,
) -> Tensor:
    """`slot_attention` of all rows of a write, masked as `SlotWrite.mask` says; short rows read less than long ones."""
    groups, mask = write.groups(), write.mask(window, causal=causal)
    if mask is None or len(groups) == 1:
        return slot_attention(q_BQTD, k_BNED, v_BNED, mask, scale)
    parts = [
        slot_attention(q_BQTD[rows], k_BNED[rows, :, :end], v_BNED[rows, :, :end], mask[rows, :, :, :end], scale)
        for rows, end in groups
    ]
    return torch.cat(parts)


def slot_attention(q_BQTD: Tensor, k_BNED: Tensor, v_BNED: Tensor, mask_B1TE: Tensor | None, scale: float) -> Tensor:
    """Grouped-query attention over cached keys without repeating them.

    The query heads of one key head are folded into the query length, so `k_BNED` is read in place. `mask_B1TE` is bool
    (true = visible) or None for all. Returns [B, Q, T, D] in the query's dtype.
    """
    batch, heads, width, size = q_BQTD.shape
    groups = heads // k_BNED.shape[1]
    if groups > 1:
        q_BQTD = q_BQTD.reshape(batch, heads // groups, groups * width, size)
        if mask_B1TE is not None:
            mask_B1TE = mask_B1TE[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    out = torch.nn.functional.scaled_dot_product_attention(q_BQTD, k_BNED, v_BNED, attn_mask=mask_B1TE, scale=scale)
    return out.reshape(batch, heads, width, v_BNED.shape[-1])
