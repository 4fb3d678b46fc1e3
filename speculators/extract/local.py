"""Hidden states from a verifier in this process."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
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

    def states(self, rows: Sequence[Tensor], advance: Advance) -> list[Tensor | RowFault]:
        """States of each row, on the CPU."""
        found: list[Tensor | RowFault] = [torch.empty(0)] * len(rows)
        workers = self._workers()
        batches = batches_by_length([len(row) for row in rows], self._batch_tokens, workers=workers)
        with closing(self._captured(rows, batches, workers)) as passes:
            for batch, captured in zip(batches, passes, strict=True):
                for i, states_TLH in zip(batch, captured, strict=True):
                    found[i] = states_TLH
                advance(len(batch), sum(len(rows[i]) for i in batch))
        return found

    def _workers(self) -> int:
        """Passes at a time: on a CPU each core has one of its own, and waits for no other core."""
        apart = self._verifier.device.type == "cpu" and self._verifier.reentrant
        return min(torch.get_num_threads(), _MAX_PASSES) if apart else 1

    def _captured(
        self, rows: Sequence[Tensor], batches: Sequence[Sequence[int]], workers: int
    ) -> Generator[list[Tensor], None, None]:
        """The states of each batch, in order."""

        def capture(batch: Sequence[int]) -> list[Tensor]:
            captured = self._verifier.capture([rows[i].tolist() for i in batch], self._layer_ids)
            return [states_TLH.to("cpu", self._dtype) for states_TLH in captured]

        if workers == 1 or len(batches) == 1:
            yield from map(capture, batches)
            return
        cores = torch.get_num_threads()
        pool = ThreadPoolExecutor(workers, "extract", torch.set_num_threads, (cores // workers,))
        try:
            yield from pool.map(capture, batches)
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(cores)  # what a worker sets holds for some libraries everywhere


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
