"""Converting a checkpoint: open, detect, plan, write, look at what was written."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.convert.detect import detect
from speculators.convert.health import Vocabulary, written_health
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan
from speculators.convert.source import SourceCheckpoint
from speculators.convert.sources import SOURCES, source_layout
from speculators.convert.writing import new_directory, require_new, write_plan
from speculators.errors import UsageError
from speculators.formats.faults import Fault
from speculators.formats.hub import resolve

# Besides the files of a speculator, what other projects' repositories hold of a draft.
PATTERNS = ("*.json", "*.safetensors", "*.bin", "*.pt", "*.model", "*.txt", "*.jinja", "README.md")


@dataclass(frozen=True)
class Conversion:
    """What was converted: the plan that was carried out, and what the numbers that were written look like.

    `vocabulary` is None where the result is no speculator with a vocabulary of its own.
    """

    directory: Path
    plan: CheckpointPlan
    health: tuple[Fault, ...]
    vocabulary: Vocabulary | None

    def to_json(self) -> dict[str, Any]:
        """The report: `family, used, dropped, derived, ids, notes, health, vocabulary`."""
        return {
            "family": self.plan.family,
            **self.plan.account(),
            "health": [{"level": item.level, "fault": item.slug, "text": item.message} for item in self.health],
            "vocabulary": None if self.vocabulary is None else self.vocabulary.to_json(),
        }


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    verifier: ConversionVerifier,
    family: str = "auto",
    options: ConvertOptions | None = None,
    weights: str | None = None,
    revision: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Conversion:
    """Make a speculator directory `out` of a checkpoint that another project has written.

    `family` is a key of `SOURCES`, or `auto`. `weights` names the file where several could be meant. `revision` is the
    source's, where that is a repository. `progress` is told bytes as they are written. Every tensor of the source is
    used or listed as dropped; FormatError says what cannot be converted, and then there is no `out`.
    """
    require_new(Path(out))
    plan = plan_conversion(source, verifier, family, options, weights, revision)
    return carry_out(plan, out, verifier, progress)


def plan_conversion(
    source: str | os.PathLike[str],
    verifier: ConversionVerifier,
    family: str = "auto",
    options: ConvertOptions | None = None,
    weights: str | None = None,
    revision: str | None = None,
) -> CheckpointPlan:
    """Say what `convert` would write, without writing it; arguments and errors are those of `convert`."""
    if family != "auto" and family not in SOURCES:
        raise UsageError(f"family is {family!r}; expected auto or one of {', '.join(SOURCES)}")
    folder = resolve(source, revision=revision, token=verifier.token, patterns=PATTERNS)
    opened = SourceCheckpoint.open(folder, weights)
    shapes = {name: tensor.shape for name, tensor in opened.tensors.items()}
    layout = detect(opened.config, shapes) if family == "auto" else family
    return source_layout(layout).plan(opened, verifier, options or ConvertOptions())


def carry_out(
    plan: CheckpointPlan,
    out: str | os.PathLike[str],
    verifier: ConversionVerifier,
    progress: Callable[[int], None] = lambda _: None,
) -> Conversion:
    """Write a planned speculator into a new directory, and look at what was written; errors as of `convert`."""
    target = Path(out)
    with new_directory(target) as folder:
        write_plan(plan, folder, progress)
        faults, vocabulary = written_health(folder, plan, verifier)
    return Conversion(target, plan, tuple(faults), vocabulary)
