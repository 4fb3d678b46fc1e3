"""Rows of hidden states in a paged cache: marking those about to be captured, and copying out those of one request.

Legend: N blocks, A layers, S slots of a block, H hidden size, T tokens of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.errors import StoreError

# Rows gathered at once on a GPU: what a copy costs of its memory, while the rest waits in the cache.
_CHUNK_ROWS = 2048


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a request: `count` of them from slot `offset` of the first of `block_ids` on."""

    block_ids: list[int]
    offset: int
    count: int


class CopiedRows:
    """Rows [T, A, H] on their way out of a cache; `wait` returns when they are there, and whole."""

    def __init__(self, states_TAH: Tensor, event: torch.cuda.Event | None) -> None:
        self.states_TAH = states_TAH
        self._event = event

    @property
    def done(self) -> bool:
        """Whether the cache may be overwritten."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Block the calling thread until the rows may be read; StoreError where one of them was never captured."""
        if self._event is not None:
            self._event.synchronize()
        missing_T = self.states_TAH[:, :, 0].isnan().any(dim=1)
        if missing_T.any():
            first, count = int(missing_T.int().argmax()), int(missing_T.sum())
            raise StoreError(
                f"{count} of {len(missing_T)} rows were never captured, or are NaN (the first is row {first}): vLLM "
                "skips a whole batch when one of its sequences reaches max_model_len; give it a max_model_len of at "
                "least one more than prompt and max_tokens"
            )


class PagedStates:
    """A cache [N, A, S, H] of hidden states, in which row r of a request is slot r % S of its block r // S.

    On a GPU, rows are gathered on a stream of their own into pinned memory, so that the stream that computes goes on.
    """

    def __init__(self, cache_NASH: Tensor, block_size: int) -> None:
        if cache_NASH.dim() != 4 or cache_NASH.shape[2] != block_size:
            raise StoreError(
                f"the cache of hidden states is {list(cache_NASH.shape)}, expected [blocks, layers, {block_size}, "
                "hidden size]; this version of vLLM lays it out in another way"
            )
        self._cache_NASH = cache_NASH
        self._block_size = block_size
        self._stream = torch.cuda.Stream(cache_NASH.device) if cache_NASH.is_cuda else None

    def mark(self, rows: Sequence[Rows]) -> None:
        """Write a NaN into rows that the coming step will capture: what still has it afterwards was not."""
        if not rows:
            return
        blocks, slots = (torch.cat(parts) for parts in zip(*map(self._places, rows), strict=True))
        blocks, slots = self._to_device(blocks), self._to_device(slots)
        self._cache_NASH[blocks, :, slots, 0] = float("nan")

    def copy(self, block_ids: list[int], num_rows: int) -> CopiedRows:
        """Begin to copy a request's first rows; StoreError where its blocks do not hold as many."""
        if num_rows > len(block_ids) * self._block_size:
            raise StoreError(
                f"{num_rows} tokens, but only {len(block_ids)} blocks of {self._block_size} rows were computed"
            )
        blocks_T, slots_T = self._places(Rows(block_ids, 0, num_rows))
        if self._stream is None:
            return CopiedRows(self._cache_NASH[blocks_T, :, slots_T], None)
        _, num_layers, _, hidden_size = self._cache_NASH.shape
        shape = (num_rows, num_layers, hidden_size)
        states_TAH = torch.empty(shape, dtype=self._cache_NASH.dtype, pin_memory=True)
        # What the computing stream was given until now comes first; what it is given later does not wait for this.
        self._stream.wait_stream(torch.cuda.current_stream(self._cache_NASH.device))
        with torch.cuda.stream(self._stream):
            for start in range(0, num_rows, _CHUNK_ROWS):
                part = slice(start, start + _CHUNK_ROWS)
                gathered = self._cache_NASH[self._to_device(blocks_T[part]), :, self._to_device(slots_T[part])]
                states_TAH[part].copy_(gathered, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return CopiedRows(states_TAH, event)

    def _places(self, rows: Rows) -> tuple[Tensor, Tensor]:
        places = torch.arange(rows.offset, rows.offset + rows.count)
        return torch.tensor(rows.block_ids, dtype=torch.int64)[places // self._block_size], places % self._block_size

    def _to_device(self, numbers: Tensor) -> Tensor:
        if self._stream is None:
            return numbers
        return numbers.pin_memory().to(self._cache_NASH.device, non_blocking=True)
