"""Hidden states from a verifier in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from speculators.errors import StoreError
from speculators.extract.filling import Advance, FillResult, RowFault, fill_store
from speculators.extract.manifest import DTYPES, StoreIdentity
from speculators.extract.prepared import PreparedData
from speculators.extract.store import StoreWriter
from speculators.runtime.verifier import Verifier

MAX_PADDING = 0.1


class LocalSource:
    """Runs the verifier over rows; those of like length share a pass of at most `batch_tokens` tokens, with padding.

    A longer row has a pass of its own. States are computed in the verifier's dtype and rounded to the store's.
    """

    def __init__(self, verifier: Verifier, identity: StoreIdentity, *, batch_tokens: int = 4096) -> None:
        if batch_tokens < 1:
            raise StoreError(f"batch_tokens is {batch_tokens}, expected 1 or more")
        self._verifier, self._batch_tokens = verifier, batch_tokens
        self._layer_ids, self._dtype = identity.layer_ids, DTYPES[identity.dtype]

    def states(self, rows: Sequence[Tensor], advance: Advance) -> list[Tensor | RowFault]:
        """States of each row, on the CPU."""
        found: list[Tensor | RowFault] = [torch.empty(0)] * len(rows)
        for batch in batches_by_length([len(row) for row in rows], self._batch_tokens):
            captured = self._verifier.capture([rows[i].tolist() for i in batch], self._layer_ids)
            for i, states_TLH in zip(batch, captured, strict=True):
                found[i] = states_TLH.to("cpu", self._dtype, copy=True)
            advance(len(batch), sum(len(rows[i]) for i in batch))
        return found


def extract_rows(
    verifier: Verifier, prepared: PreparedData, writer: StoreWriter, *, batch_tokens: int = 4096, progress: bool = True
) -> FillResult:
    """Run the verifier over all rows whose shard is missing, and write them shard by shard."""
    source = LocalSource(verifier, writer.identity, batch_tokens=batch_tokens)
    return fill_store(source, prepared, writer, progress=progress)


def batches_by_length(
    lengths: Sequence[int], batch_tokens: int, *, max_padding: float = MAX_PADDING
) -> Iterator[list[int]]:
    """Yield row numbers, longest rows first, in batches of at most `batch_tokens` tokens, padding included.

    At most `max_padding` of a batch's tokens are padding.
    """
    batch: list[int] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch:
            size = (len(batch) + 1) * lengths[batch[0]]
            if size > batch_tokens or size - tokens - lengths[row] > max_padding * size:
                yield batch
                batch, tokens = [], 0
        batch.append(row)
        tokens += lengths[row]
    if batch:
        yield batch
