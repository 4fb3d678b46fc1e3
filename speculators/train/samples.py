"""What a recipe's draft is trained on: a finished store, or states that are made when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from speculators.errors import StoreError, UsageError
from speculators.extract.fingerprint import verifier_directory, verifier_fingerprint
from speculators.extract.folder import FolderSource
from speculators.extract.manifest import Manifest, StoreIdentity
from speculators.extract.online import OnlineSamples
from speculators.extract.prepared import PreparedData
from speculators.extract.run import store_identity
from speculators.extract.sourcing import open_source
from speculators.extract.store import HiddenStatesStore
from speculators.formats.verifier_weights import VerifierTensors
from speculators.models.draft_model import SampleSource

if TYPE_CHECKING:
    from speculators.train.stages import Run


def samples_identity(run: Run) -> StoreIdentity:
    """What the states of a run's samples are: those of its store, or of the store that they would make.

    StoreError where the store is another verifier's.
    """
    if not run.recipe.extract.online:
        identity = Manifest.read(run.outputs.states).identity
        # Of a verifier whose layers' files are elsewhere nobody can tell.
        if VerifierTensors(verifier_directory(run.verifier)).is_whole:
            same = {"verifier_fingerprint": verifier_fingerprint(run.verifier)}
            identity.require_same(same, run.outputs.states)
        return identity
    data, layers = PreparedData(run.outputs.prepared), run.speculator_config.aux_layer_ids
    return store_identity(run.verifier, data, layers, run.extract_options)


def require_free_mask_token(run: Run) -> None:
    """Raise UsageError where the token that stands for unknown ones is one that the verifier wrote in the data."""
    mask: int | None = getattr(run.speculator_config, "mask_token_id", None)
    count = 0 if mask is None else int(PreparedData(run.outputs.prepared).token_counts[mask])
    if count:
        raise UsageError(
            f"mask token {mask} is in use: the data's answers have it {count} times; set draft.mask_token_id to a "
            "token that no text contains"
        )


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
