"""Hidden states from a verifier in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from speculators.errors import StoreError
from speculators.extract.prepared import PreparedData
from speculators.extract.progress import RowProgress
from speculators.extract.store import DTYPES, StoreWriter
from speculators.runtime.verifier import Verifier


def extract_rows(
    verifier: Verifier, prepared: PreparedData, writer: StoreWriter, *, batch_tokens: int = 4096, progress: bool = True
) -> None:
    """Run the verifier over all rows whose shard is missing, and write them shard by shard.

    Within a shard, rows of like length share a pass of at most `batch_tokens` tokens, padding included (a longer row
    has its own). States are computed in the verifier's dtype and rounded to the store's. An interruption loses the
    shard under way and nothing else.
    """
    if batch_tokens < 1:
        raise StoreError(f"batch_tokens is {batch_tokens}, expected 1 or more")
    identity = writer.identity
    with RowProgress("extract", len(prepared), done=writer.num_rows_done, enabled=progress) as bar:
        for shard in writer.missing:
            rows = [prepared[row] for row in range(shard.first, shard.last)]
            ids = [row_ids for row_ids, _ in rows]
            states: list[Tensor] = [torch.empty(0)] * len(rows)
            for batch in batches_by_length([len(row_ids) for row_ids in ids], batch_tokens):
                captured = verifier.capture([ids[i].tolist() for i in batch], identity.layer_ids)
                for i, states_TLH in zip(batch, captured, strict=True):
                    states[i] = states_TLH.to("cpu", DTYPES[identity.dtype], copy=True)
                bar.advance(len(batch), sum(len(ids[i]) for i in batch))
            writer.write(shard, ids, [mask for _, mask in rows], states)


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield row numbers, longest rows first, in batches of at most `batch_tokens` tokens, padding included."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
