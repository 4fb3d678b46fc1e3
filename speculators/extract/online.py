"""Hidden states made when a row is read: nothing on disk, and no more in memory than the rows that are being used."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from speculators.errors import StoreError
from speculators.extract.filling import RowFault, StatesSource, checked
from speculators.extract.manifest import DTYPES, StoreIdentity
from speculators.extract.prepared import PreparedData
from speculators.extract.quantised import dequantise, quantise
from speculators.models.draft_model import Sample


class OnlineSamples:
    """Prepared rows with the states that a source gives them now; `samples[i]` is a `Sample` on the CPU.

    States are rounded, and quantised, as a store of that identity would have them: training on either is the same. The
    samples have `aux_layer_ids`, some of the identity's layers. `rows` are those that there are samples of, else all.
    Several threads may read them; the source is asked by one at a time. StoreError, naming the row, where it has no
    states, others than were asked for, or NaN and infinite ones.
    """

    def __init__(
        self,
        source: StatesSource,
        prepared: PreparedData,
        identity: StoreIdentity,
        aux_layer_ids: Sequence[int],
        *,
        rows: Sequence[int] | None = None,
    ) -> None:
        self._source, self._prepared, self._identity = source, prepared, identity
        self._aux = [identity.layer_ids.index(layer) for layer in aux_layer_ids]
        self._rows = range(len(prepared)) if rows is None else list(rows)
        self._lengths = [prepared.lengths[row] for row in self._rows]
        self._mutex = threading.Lock()

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        row, identity = self._rows[index], self._identity
        ids, mask = self._prepared[row]
        with self._mutex:
            found = self._source.states([ids], lambda *_: None)[0]
        states_TLH = checked(found, DTYPES[identity.dtype])
        if isinstance(states_TLH, RowFault):
            raise StoreError(f"row {row}: {states_TLH.reason}; leave the row out")
        shape = [len(ids), len(identity.layer_ids), identity.hidden_size]
        if list(states_TLH.shape) != shape:
            raise StoreError(f"row {row}: got states {list(states_TLH.shape)}, expected {shape}; of which verifier?")
        if identity.aux_dtype is not None:
            rounded = dequantise(*quantise(states_TLH[:, :-1], identity.aux_dtype), states_TLH.dtype)
            states_TLH = torch.cat([rounded, states_TLH[:, -1:]], 1)
        return Sample(ids, mask, states_TLH[:, self._aux], states_TLH[:, -1])
