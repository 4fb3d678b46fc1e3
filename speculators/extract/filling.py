"""Filling a store: rows of any source of hidden states, shard by shard, written while the next ones are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from speculators.errors import ServerError, StoreError
from speculators.extract.prepared import PreparedData
from speculators.extract.progress import RowProgress
from speculators.extract.shards import Shard
from speculators.extract.store import StoreWriter

_NAMED = 5


@dataclass(frozen=True)
class RowFault:
    """Why a row has no states."""

    reason: str


Advance = Callable[[int, int], None]


class StatesSource(Protocol):
    """Where the hidden states of rows come from: a verifier in this process, servers, or files."""

    def states(self, rows: Sequence[Tensor], advance: Advance) -> list[Tensor | RowFault]:
        """States [T, layers, H] of each row of ids [T], or why there are none; `advance(rows, tokens)` counts."""
        ...


class Begun(Protocol):
    """States that are being made."""

    def result(self) -> list[Tensor | RowFault]:
        """Wait for the states of each row."""
        ...

    def cancel(self) -> None:
        """Give up what is not done yet; also after `result`, and more than once."""
        ...


@runtime_checkable
class AheadSource(StatesSource, Protocol):
    """A source that makes states while those of rows begun before are used."""

    def begin(self, rows: Sequence[Tensor], advance: Advance) -> Begun:
        """Go on with these rows when those begun before are done."""
        ...


class _OnDemand:
    """What a source that makes nothing ahead has begun: nothing."""

    def __init__(self, source: StatesSource, rows: Sequence[Tensor], advance: Advance) -> None:
        self._source, self._rows, self._advance = source, rows, advance

    def result(self) -> list[Tensor | RowFault]:
        return self._source.states(self._rows, self._advance)

    def cancel(self) -> None:
        return


@dataclass
class FillResult:
    """Rows of a run: those that were there before, done now, skipped on wish, and failed, with the first reasons."""

    before: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    reasons: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.done} rows done, {self.before} there before, {self.skipped} skipped, {self.failed} failed"


def fill_store(
    source: StatesSource,
    prepared: PreparedData,
    writer: StoreWriter,
    *,
    skip_failed: bool = False,
    progress: bool = True,
) -> FillResult:
    """Get and write every shard of `writer` that is missing; an interruption loses the shard under way, and no more.

    ServerError, with the counts so far, where a source does not answer any more. A row without states, or with NaN or
    infinite ones, keeps its shard from being written, and StoreError at the end names it; with `skip_failed` the shard
    is written and the row is left out when the store is read. At most two shards are in memory, three where the source
    makes states ahead.
    """
    result = FillResult(before=writer.num_rows_done)
    with (
        RowProgress("extract", writer.num_rows, done=result.before, enabled=progress) as bar,
        _disk() as write,
        closing(_each_begun(source, prepared, writer.missing, bar.advance)) as each,
    ):
        for shard, ids, masks, begun in each:
            try:
                found = [checked(one, writer.dtype) for one in begun.result()]
            except ServerError as error:
                raise ServerError(f"{writer.directory}: {result}; run it again to go on. {error}") from error
            faults = {place: one for place, one in enumerate(found) if isinstance(one, RowFault)}
            _count(result, shard, faults, skip_failed)
            if faults and not skip_failed:
                continue
            states = [_zeros(writer, len(ids[i])) if isinstance(one, RowFault) else one for i, one in enumerate(found)]
            write(_writing(writer, shard, ids, masks, states, list(faults)))
    if result.failed:
        reasons = "; ".join(result.reasons)
        raise StoreError(
            f"{writer.directory}: {result}; {reasons}. Run it again for the rows that are missing, or with skip_failed "
            "to leave out those without states"
        )
    return result


def _each_begun(
    source: StatesSource, prepared: PreparedData, shards: Iterable[Shard], advance: Advance
) -> Generator[tuple[Shard, list[Tensor], list[Tensor], Begun], None, None]:
    """Each shard with the ids and masks of its rows, and their states, when those of the next are begun, too."""
    waiting: deque[tuple[Shard, list[Tensor], list[Tensor], Begun]] = deque()
    begin = source.begin if isinstance(source, AheadSource) else partial(_OnDemand, source)
    try:
        for shard in shards:
            rows = [prepared[row] for row in range(shard.first, shard.last)]
            ids, masks = [row[0] for row in rows], [row[1] for row in rows]
            waiting.append((shard, ids, masks, begin(ids, advance)))
            if len(waiting) > 1:
                yield waiting[0]
                waiting.popleft()
        while waiting:
            yield waiting[0]
            waiting.popleft()
    finally:
        for *_, begun in waiting:
            begun.cancel()


def _count(result: FillResult, shard: Shard, faults: dict[int, RowFault], skip_failed: bool) -> None:
    rows = shard.last - shard.first
    if skip_failed:
        result.skipped += len(faults)
        result.done += rows - len(faults)
    else:
        result.failed += len(faults)
        result.done += 0 if faults else rows
    named = [f"row {shard.first + place}: {fault.reason}" for place, fault in faults.items()]
    result.reasons += named[: _NAMED - len(result.reasons)]


def _writing(
    writer: StoreWriter,
    shard: Shard,
    ids: list[Tensor],
    masks: list[Tensor],
    states: list[Tensor],
    skipped: list[int],
) -> Callable[[], None]:
    return lambda: writer.write(shard, ids, masks, states, skipped=skipped)


@contextmanager
def _disk() -> Iterator[Callable[[Callable[[], None]], None]]:
    """A thread that writes one thing while the caller prepares the next; what went wrong is raised at the next one."""
    with ThreadPoolExecutor(1, thread_name_prefix="store") as pool:
        under_way: list[Future[None]] = []

        def write(task: Callable[[], None]) -> None:
            while under_way:
                under_way.pop().result()
            under_way.append(pool.submit(task))

        yield write
        while under_way:
            under_way.pop().result()


def checked(states: Tensor | RowFault, dtype: torch.dtype) -> Tensor | RowFault:
    """The states in the store's `dtype`, or why they are of no use: NaN, or more than the dtype can hold."""
    if isinstance(states, RowFault):
        return states
    states = states.to(dtype)
    # One pass without a mask of all elements; NaN and infinity stand out among the extremes.
    if bool(torch.stack(states.aminmax()).isfinite().all()):
        return states
    finite_T = states.flatten(1).isfinite().all(-1)
    return RowFault(f"NaN or infinite states, first at token {int(finite_T.int().argmin())}")


def _zeros(writer: StoreWriter, length: int) -> Tensor:
    return torch.zeros(length, len(writer.identity.layer_ids), writer.identity.hidden_size)
