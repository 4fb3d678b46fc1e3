"""Writing a speculator in another project's layout: read, refuse what the layout cannot say, write tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from speculators.convert.plan import CheckpointPlan
from speculators.convert.source import SourceCheckpoint
from speculators.convert.targets import TARGETS, target_layout
from speculators.convert.writing import new_directory, write_plan
from speculators.errors import UsageError
from speculators.formats.checkpoint import account_for, read_headers
from speculators.formats.faults import error_of
from speculators.formats.hub import resolve
from speculators.models.speculator import family_of


def export(
    directory: str | os.PathLike[str],
    layout: str,
    out: str | os.PathLike[str],
    progress: Callable[[int], None] = lambda _: None,
) -> Path:
    """Write a speculator, a directory or a hub repository, in a layout of `TARGETS` to a new directory; returns it.

    `progress` is told bytes as they are written. FormatError where the speculator has a fault, or the layout cannot say
    what it is, and then there is no `out`.
    """
    plan = planned_export(directory, layout)
    target = Path(out)
    with new_directory(target) as folder:
        write_plan(plan, folder, progress)
    return target


def planned_export(directory: str | os.PathLike[str], layout: str) -> CheckpointPlan:
    """What `export` would write, with what it drops and why."""
    if layout not in TARGETS:
        raise UsageError(f"layout is {layout!r}; expected one of {', '.join(TARGETS)}")
    speculator = SourceCheckpoint.open(resolve(directory))
    config = family_of(speculator.config.get("speculators_model_type"), directory).config.from_json(
        speculator.config, directory
    )
    headers = read_headers(speculator.directory)
    faults = [item for item in account_for(headers, config.expected_tensors()) if item.level == "ERROR"]
    if faults:
        raise error_of(faults, directory)
    return target_layout(layout).plan(speculator, config, layout)
