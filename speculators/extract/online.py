"""Hidden states made when a row is read: nothing on disk, and no more in memory than the rows that are being used."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from speculators.errors import StoreError
from speculators.extract.manifest import DTYPES
from speculators.extract.prepared import PreparedData
from speculators.models.draft_model import Sample
from speculators.runtime.verifier import Verifier


class OnlineSamples:
    """Prepared rows with the states that the verifier gives them now; `samples[i]` is a `Sample` on the CPU.

    States are rounded to `store_dtype`, as a store of that dtype would have them: training on either is the same. The
    verifier belongs to this object, which several threads may read. StoreError, naming the row, for NaN or infinite
    states.
    """

    def __init__(
        self, verifier: Verifier, prepared: PreparedData, aux_layer_ids: Sequence[int], *, store_dtype: str = "bfloat16"
    ) -> None:
        if store_dtype not in DTYPES:
            raise StoreError(f"dtype {store_dtype!r}: expected one of {', '.join(DTYPES)}")
        self._verifier, self._prepared = verifier, prepared
        self._layers = tuple(sorted({*aux_layer_ids, verifier.num_layers}))
        self._aux = [self._layers.index(layer) for layer in aux_layer_ids]
        self._dtype = DTYPES[store_dtype]
        self._mutex = threading.Lock()

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row."""
        return self._prepared.lengths

    def __len__(self) -> int:
        return len(self._prepared)

    def __getitem__(self, row: int) -> Sample:
        ids, mask = self._prepared[row]
        with self._mutex:
            states_TLH = self._verifier.capture([ids.tolist()], self._layers)[0]
            states_TLH = states_TLH.to("cpu", self._dtype, copy=True)
        if not bool(torch.isfinite(states_TLH).all()):
            raise StoreError(f"row {row}: the verifier's states are NaN or infinite; leave the row out")
        return Sample(ids, mask, states_TLH[:, self._aux], states_TLH[:, -1])
