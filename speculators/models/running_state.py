"""States of layers that read one token after another, row by row, which a rejection takes back.

Such a layer has, for each row of a slot cache, the state behind the tokens that stay, and what it takes in of the
tokens behind those: drafts that may be rejected. The next write says by where it begins how many of them were accepted;
those are read first, from what was taken in, and nothing is copied for each draft. Shape suffixes: S slots, B rows of
a write, T its tokens, C what a layer takes in of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.errors import EngineError


@dataclass(frozen=True)
class StatePlan:
    """How one write moves the states of its rows; the same for every layer.

    Places are counted from the first token that a row's state has not read. The first `num_waiting` of them lie before
    the write (fewer in some rows, where `ragged`), whose own tokens stand at `written_BT`. The state reads the first
    `num_settled`, as far as `settled_BT` is true; `num_open` tokens at `open_BT` follow, which may be taken back.
    Outputs of the write are at `outputs_BT` among those of both passes. The state of `fresh` rows begins anew.
    """

    rows: slice
    fresh: Tensor | None
    num_waiting: int
    ragged: bool
    written_BT: Tensor
    num_settled: int
    settled_BT: Tensor
    num_open: int
    open_BT: Tensor
    outputs_BT: Tensor

    @property
    def batch(self) -> Tensor:
        """Row numbers [B, 1] within the write, to index with."""
        return torch.arange(len(self.written_BT), device=self.written_BT.device)[:, None]


class RunningStates:
    """What layers with a running state keep for each slot; storage is made at a layer's first write."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.device = device
        self._read = [0] * num_slots  # tokens that the state has read
        self._taken = [0] * num_slots  # tokens taken in: those, and the ones that wait behind them
        self._states: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}

    def plan(
        self,
        rows: slice,
        starts: Sequence[int],
        width: int,
        lengths: Sequence[int] | None = None,
        settled: Sequence[int] | None = None,
    ) -> StatePlan:
        """Plan a write, and count its tokens; one plan a write, used by all layers.

        Row b has `lengths[b]` tokens from position `starts[b]` on (default: `width`), of `width` with padding, and its
        first `settled[b]` tokens will never be taken back (default: those before the write). EngineError where a write
        begins before what its state has read, or leaves tokens out.
        """
        slots = range(self.num_slots)[rows]
        fresh = [row for row, start in enumerate(starts) if start == 0]
        read = [self._read[slot] if start else 0 for slot, start in zip(slots, starts, strict=True)]
        for slot, start, first in zip(slots, starts, read, strict=True):
            if start and not first <= start <= self._taken[slot]:
                raise EngineError(
                    f"cache row {slot}: a write at position {start}, but its running state has read {first} tokens and "
                    f"{self._taken[slot] - first} wait behind them; write at one of these, or at 0 for a new request"
                )
        ends = [start + length for start, length in zip(starts, lengths or [width] * len(starts), strict=True)]
        kept = [max(n, min(e, end)) for n, e, end in zip(read, settled or starts, ends, strict=True)]
        for slot, count, end in zip(slots, kept, ends, strict=True):
            self._read[slot], self._taken[slot] = count, end
        waiting, settles, opens = (
            [b - a for a, b in zip(first, then, strict=True)]
            for first, then in ((read, starts), (read, kept), (kept, ends))
        )
        num_settled, num_open = max(settles), max(opens)
        first_B1, settled_B1 = self._index(waiting)[:, None], self._index(settles)[:, None]
        written_BT = first_B1 + self._index(range(width))
        # Padding has outputs too, which nobody reads.
        last = num_settled + num_open - 1
        behind_BT = (written_BT - settled_B1 + num_settled).clamp(max=last)
        return StatePlan(
            rows,
            self._index(fresh) if fresh else None,
            max(waiting),
            min(waiting) < max(waiting),
            written_BT,
            num_settled,
            self._index(range(num_settled)) < settled_B1,
            num_open,
            settled_B1 + self._index(range(num_open)),
            torch.where(written_BT < settled_B1, written_BT, behind_BT),
        )

    def assume(self, rows: slice, starts: Sequence[int]) -> None:
        """Let rows begin anew at positions whose tokens were never written, where only time is measured."""
        for slot, start in zip(range(self.num_slots)[rows], starts, strict=True):
            self._read[slot] = self._taken[slot] = start

    def state(self, layer: int, plan: StatePlan, shape: Sequence[int]) -> Tensor:
        """A view of a layer's states before the write, float32 [B, *shape]."""
        if layer not in self._states:
            self._states[layer] = torch.zeros((self.num_slots, *shape), device=self.device)
        states = self._states[layer][plan.rows]
        if plan.fresh is not None:
            states[plan.fresh] = 0
        return states

    def joined(self, layer: int, plan: StatePlan, inputs_BTC: Tensor, context: int) -> Tensor:
        """What a layer takes in of `context` tokens that its state has read, of those that wait, and of the write.

        Zeros where there are fewer before a row's first token; something, where there are fewer in the write.
        """
        kept = self._room(layer, inputs_BTC, context + plan.num_waiting)[plan.rows]
        if plan.fresh is not None:
            kept[plan.fresh] = 0
        joined = torch.cat([kept[:, : context + plan.num_waiting], inputs_BTC], 1)
        if plan.ragged:
            joined[plan.batch, context + plan.written_BT] = inputs_BTC
        return joined

    def keep(self, layer: int, plan: StatePlan, joined: Tensor, context: int) -> None:
        """Keep of `joined` what the next write may need: `context` tokens before the open ones, and those."""
        width = context + plan.num_open
        kept = self._room(layer, joined, width)[plan.rows]
        first_B1 = plan.settled_BT.sum(1, keepdim=True)
        places_BT = first_B1 + torch.arange(width, device=self.device)
        kept[:, :width] = joined[plan.batch, places_BT.clamp(max=joined.shape[1] - 1)]

    def move(self, source: int, target: int) -> None:
        """Copy what one slot has over another."""
        for stored in (*self._states.values(), *self._inputs.values()):
            stored[target] = stored[source]
        for counts in (self._read, self._taken):
            counts[target] = counts[source]

    def _room(self, layer: int, like_BTC: Tensor, width: int) -> Tensor:
        stored = self._inputs.get(layer)
        if stored is None or stored.shape[1] < width:
            fresh = like_BTC.new_zeros(self.num_slots, width, like_BTC.shape[2])
            if stored is not None:
                fresh[:, : stored.shape[1]] = stored
            self._inputs[layer] = stored = fresh
        return stored

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)
