"""Writing a speculator in another project's layout: read, refuse what the layout cannot say, write tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from speculators.convert.plan import CheckpointPlan
from speculators.convert.source import SourceCheckpoint
from speculators.convert.targets import TARGETS, target_layout
from speculators.convert.writing import new_directory, require_new, write_plan
from speculators.errors import UsageError
from speculators.formats.checkpoint import account_for, read_headers
from speculators.formats.config import SpeculatorConfig
from speculators.formats.faults import error_of
from speculators.formats.hub import resolve
from speculators.models.speculator import family_of


def export(
    directory: str | os.PathLike[str],
    layout: str,
    out: str | os.PathLike[str],
    *,
    verifier: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Path:
    """Write a speculator, a directory or a hub repository, in a layout of `TARGETS` to a new directory; returns it.

    `verifier` is where its verifier is found now, for layouts that hold something of that too; the speculator's own
    word otherwise. `revision` and `token` are for a repository. `progress` is told bytes as they are written.
    FormatError where the speculator has a fault, or the layout cannot say what it is, and then there is no `out`.
    """
    require_new(Path(out))
    return write_export(planned_export(directory, layout, verifier, revision, token), out, progress)


def write_export(
    plan: CheckpointPlan, out: str | os.PathLike[str], progress: Callable[[int], None] = lambda _: None
) -> Path:
    """Write a planned export to a new directory; returns it."""
    target = Path(out)
    with new_directory(target) as folder:
        write_plan(plan, folder, progress)
    return target


def planned_export(
    directory: str | os.PathLike[str],
    layout: str,
    verifier: str | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> CheckpointPlan:
    """What `export` would write, with what it drops and why."""
    if layout not in TARGETS:
        raise UsageError(f"layout is {layout!r}; expected one of {', '.join(TARGETS)}")
    speculator = SourceCheckpoint.open(resolve(directory, revision, token))
    config = family_of(speculator.config.get("speculators_model_type"), directory).config.from_json(
        speculator.config, directory
    )
    headers = read_headers(speculator.directory)
    faults = [item for item in account_for(headers, config.expected_tensors()) if item.level == "ERROR"]
    if faults:
        raise error_of(faults, directory)
    if verifier is not None:
        config = _with_verifier(config, verifier)
    return target_layout(layout).plan(speculator, config, layout)


def _with_verifier(config: SpeculatorConfig, verifier: str) -> SpeculatorConfig:
    written = config.to_json()
    written["speculators_config"]["verifier"]["name_or_path"] = verifier
    # Some families name it twice.
    written |= {key: verifier for key in ("base_model_name_or_path",) if key in written}
    return type(config).from_json(written)
