"""What a recipe's draft is trained on: a finished store, or states that are made when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from speculators.errors import StoreError
from speculators.extract.folder import FolderSource
from speculators.extract.manifest import Manifest, StoreIdentity
from speculators.extract.online import OnlineSamples
from speculators.extract.prepared import PreparedData
from speculators.extract.run import store_identity
from speculators.extract.sourcing import open_source
from speculators.extract.store import HiddenStatesStore
from speculators.models.draft_model import SampleSource

if TYPE_CHECKING:
    from speculators.train.stages import Run


def samples_identity(run: Run) -> StoreIdentity:
    """What the states of a run's samples are: those of its store, or of the store that they would make."""
    if not run.recipe.extract.online:
        return Manifest.read(run.outputs.states).identity
    data, layers = PreparedData(run.outputs.prepared), run.speculator_config.aux_layer_ids
    return store_identity(run.verifier, data, layers, run.extract_options)


def origin(run: Run, identity: StoreIdentity) -> dict[str, Any]:
    """What tells the samples that a run trains on, whose `samples_identity` is given, from others (JSON)."""
    return {
        "verifier": identity.verifier_fingerprint,
        "rows": identity.rows_hash,
        "layers": list(identity.layer_ids),
        "dtype": identity.dtype,
        "aux_dtype": identity.aux_dtype,
        "files": run.recipe.extract.files if run.recipe.extract.online else None,
    }


@contextmanager
def open_samples(run: Run, identity: StoreIdentity) -> Iterator[SampleSource]:
    """The samples that a run trains on; a source that makes them is open as long as the context."""
    layers = run.speculator_config.aux_layer_ids
    if not run.recipe.extract.online:
        yield HiddenStatesStore.open(run.outputs.states, aux_layer_ids=layers)
        return
    data, options = PreparedData(run.outputs.prepared), run.extract_options
    with ExitStack() as opened:
        source = open_source(run.verifier, data, identity, options, opened, progress=run.progress)
        rows = _rows_with_files(source, data, options.skip_failed) if isinstance(source, FolderSource) else None
        yield OnlineSamples(source, data, identity, layers, rows=rows)


def _rows_with_files(source: FolderSource, data: PreparedData, skip_others: bool) -> list[int]:
    rows = [row for row in range(len(data)) if source.has(data[row][0])]
    if rows and (skip_others or len(rows) == len(data)):
        return rows
    raise StoreError(
        f"{source.folder} has files of {len(rows)} of the {len(data)} rows; prepare the data that it was made of, or "
        "leave the others out with extract.skip_failed"
    )
