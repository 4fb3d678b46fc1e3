"""Hidden states from a verifier in this process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

import torch
from torch import Tensor

from speculators.errors import StoreError
from speculators.extract.filling import Advance, FillResult, RowFault, fill_store
from speculators.extract.manifest import DTYPES, StoreIdentity
from speculators.extract.prepared import PreparedData
from speculators.extract.store import StoreWriter
from speculators.models.memory import free_bytes, keep_freed_memory
from speculators.runtime.verifier import Verifier

_MAX_PASSES = 8  # at a time: beyond that, memory for activations grows and cores share a pass well


class LocalSource:
    """Runs the verifier over rows; those of like length share a pass of at most `batch_tokens` tokens.

    A longer row has a pass of its own. States are computed in the verifier's dtype and rounded to the store's. On a CPU
    the process keeps the memory that tensors free, for good, and the verifier a second copy of its weights where these
    take little of what is free.
    """

    def __init__(self, verifier: Verifier, identity: StoreIdentity, *, batch_tokens: int = 4096) -> None:
        if batch_tokens < 1:
            raise StoreError(f"batch_tokens is {batch_tokens}, expected 1 or more")
        if verifier.device.type == "cpu":
            keep_freed_memory()
            verifier.pack_weights(free_bytes() // 4)
        self._verifier, self._batch_tokens = verifier, batch_tokens
        self._layer_ids, self._dtype = identity.layer_ids, DTYPES[identity.dtype]
        self._pool: ThreadPoolExecutor | None = None
        self._joined = self._cores = 0

    def states(self, rows: Sequence[Tensor], advance: Advance) -> list[Tensor | RowFault]:
        """States of each row, on the CPU."""
        return self.begin(rows, advance).result()

    def begin(self, rows: Sequence[Tensor], advance: Advance) -> _Passes:
        """Hand rows to the cores, behind those that were begun before; `result()` waits for their states.

        An accelerator, or a single core, does its work when the result is asked for.
        """
        workers = self._workers()
        batches = batches_by_length([len(row) for row in rows], self._batch_tokens, workers=workers)
        return _Passes(self, rows, batches, advance, parted=workers > 1 and len(batches) > 1)

    def capture(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """States of rows in one pass."""
        captured = self._verifier.capture([row.tolist() for row in rows], self._layer_ids)
        return [states_TLH.to("cpu", self._dtype) for states_TLH in captured]

    def join(self) -> ThreadPoolExecutor:
        """The threads, one a core, that work for all passes begun; each must `leave`."""
        if self._pool is None:
            workers = self._workers()
            self._cores = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(workers, "extract", torch.set_num_threads, (self._cores // workers,))
        self._joined += 1
        return self._pool

    def leave(self) -> None:
        """End the threads where nothing else is begun."""
        self._joined -= 1
        if not self._joined and self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
            torch.set_num_threads(self._cores)  # what a worker sets holds for some libraries everywhere

    def _workers(self) -> int:
        """Passes at a time: on a CPU each core has one of its own, and waits for no other core."""
        apart = self._verifier.device.type == "cpu" and self._verifier.reentrant
        cores = torch.get_num_threads() if self._pool is None else self._cores
        return min(cores, _MAX_PASSES) if apart else 1


class _Passes:
    """Rows in batches, each of which is a pass; several threads work on them where they are `parted`."""

    def __init__(
        self,
        source: LocalSource,
        rows: Sequence[Tensor],
        batches: Sequence[Sequence[int]],
        advance: Advance,
        *,
        parted: bool,
    ) -> None:
        self._source, self._rows, self._batches, self._advance = source, rows, batches, advance
        self._futures: list[Future[list[Tensor]]] = []
        self._joined = parted
        if parted:
            pool = source.join()
            self._futures = [pool.submit(source.capture, self._of(batch)) for batch in batches]

    def result(self) -> list[Tensor | RowFault]:
        """States of each row."""
        found: list[Tensor | RowFault] = [torch.empty(0)] * len(self._rows)
        try:
            for number, batch in enumerate(self._batches):
                of_batch = self._futures[number].result() if self._futures else self._source.capture(self._of(batch))
                for i, states_TLH in zip(batch, of_batch, strict=True):
                    found[i] = states_TLH
                self._advance(len(batch), sum(len(self._rows[i]) for i in batch))
        finally:
            self.cancel()
        return found

    def cancel(self) -> None:
        """Let what no thread has taken up be; waits for the passes under way where they are the last."""
        for future in self._futures:
            future.cancel()
        self._futures = []
        if self._joined:
            self._joined = False
            self._source.leave()

    def _of(self, batch: Sequence[int]) -> list[Tensor]:
        return [self._rows[i] for i in batch]


def extract_rows(
    verifier: Verifier, prepared: PreparedData, writer: StoreWriter, *, batch_tokens: int = 4096, progress: bool = True
) -> FillResult:
    """Run the verifier over all rows whose shard is missing, and write them shard by shard."""
    source = LocalSource(verifier, writer.identity, batch_tokens=batch_tokens)
    return fill_store(source, prepared, writer, progress=progress)


def batches_by_length(lengths: Sequence[int], batch_tokens: int, *, workers: int = 1) -> list[list[int]]:
    """Row numbers, longest rows first, in batches of at most `batch_tokens` tokens, or of one longer row.

    Batches are of like size, and as many as keep `workers` busy to the end.
    """
    total = sum(lengths)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    fewest = max(math.ceil(total / batch_tokens / workers), 1) * workers
    for number in count(fewest, workers):
        batches: list[list[int]] = [[] for _ in range(number)]
        before = 0
        for row in order:
            middle = (before + lengths[row] / 2) / max(total, 1)
            batches[min(int(middle * number), number - 1)].append(row)
            before += lengths[row]
        batches = [batch for batch in batches if batch]
        if all(len(batch) == 1 or sum(lengths[i] for i in batch) <= batch_tokens for batch in batches):
            break
    return batches
