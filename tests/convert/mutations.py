"""Checkpoints of every layout with one thing wrong: refused, flagged, or the converter's fault.

`python -m tests.convert.mutations --out out/mutations.json` writes `[{layout, mutation, outcome, said}]`. A mutation is
*refused* where the conversion fails, names what is wrong and leaves nothing behind; *flagged* where the report, its
health or `--check` says more than that of the whole checkpoint does; *silent* where neither happens and the result is
another draft. One that changes nothing of the result is no mutation, and left out.
"""

import argparse
import copy
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan
from speculators.convert.run import Conversion, convert
from speculators.errors import SpeculatorsError
from tests.convert import layouts_block, layouts_eagle, layouts_native, layouts_speculators, trained_mutations
from tests.convert.foreign import ForeignCheckpoint
from tests.convert.mutation_kinds import Mutation, is_native, mutations_of
from tests.tiny_models import make_verifier

Outcome = Literal["refused", "flagged", "silent", "same"]
Make = Callable[[], ForeignCheckpoint]
CASES: list[Make] = [
    *layouts_eagle.CASES,
    *layouts_block.CASES,
    *layouts_native.CASES,
    *layouts_speculators.CASES,
]


@dataclass(frozen=True)
class Tried:
    """What became of a mutation, and what was said about it."""

    layout: str
    mutation: str
    outcome: Outcome
    said: str

    def to_json(self) -> dict[str, str]:
        return {
            "layout": self.layout,
            "mutation": self.mutation,
            "outcome": self.outcome,
            "said": self.said,
        }


@dataclass
class Converted:
    """A conversion with the numbers that it wrote, by their bytes."""

    conversion: Conversion
    tensors: dict[str, bytes] = field(default_factory=dict)

    def says(self) -> set[str]:
        """Everything that a user is told beyond what was used."""
        plan = self.conversion.plan
        dropped = {f"{name} dropped: {reason}" for name, reason in plan.dropped.items()}
        derived = {f"{name} derived: {origin}" for name, origin in plan.derived.items()}
        return {*plan.notes, *dropped, *derived, *(str(item) for item in self.conversion.health)}


def converted(
    case: ForeignCheckpoint, folder: Path, verifier: ConversionVerifier, mutation: Mutation | None = None
) -> Converted:
    """Write a checkpoint, change it, and convert it; `folder` is new."""
    case = copy.deepcopy(case)
    family = "auto"
    if mutation is not None:
        mutation.change(case)
        family = mutation.family
    source = case.write(folder / "foreign")
    if mutation is not None:
        mutation.damage(source)
    known = ConversionVerifier(str(source)) if is_native(case) else verifier
    conversion = convert(source, folder / "ours", verifier=known, family=family, options=ConvertOptions(**case.options))
    file = folder / "ours" / "model.safetensors"
    stored = load_file(file) if file.is_file() else {}
    return Converted(conversion, {name: _bytes(tensor) for name, tensor in stored.items()})


def _bytes(tensor: Tensor) -> bytes:
    return (
        f"{tensor.dtype}{list(tensor.shape)}".encode()
        + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    )


def attempt(case: ForeignCheckpoint, whole: Converted, mutation: Mutation, verifier: ConversionVerifier) -> Tried:
    """Convert a checkpoint with one thing wrong, and judge what happened."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        try:
            found = converted(case, folder, verifier, mutation)
        except SpeculatorsError as error:
            text = str(error)
            assert not (folder / "ours").exists(), f"{case.layout}: {mutation.name} left something behind"
            named = not mutation.words or any(word in text for word in mutation.words)
            assert named, f"{case.layout}: {mutation.name} is refused with the wrong name: {text}"
            return Tried(case.layout, mutation.name, "refused", text.replace(parent, ""))
        more = {text for text in found.says() - whole.says() if parent not in text}
        plan, before = found.conversion.plan, whole.conversion.plan
        same = found.tensors == whole.tensors and _meaning(plan) == _meaning(before)
        if more and (not same or mutation.words):
            return Tried(case.layout, mutation.name, "flagged", "; ".join(sorted(more)))
        return Tried(case.layout, mutation.name, "same" if same else "silent", "")


def _meaning(plan: CheckpointPlan) -> str:
    """What a plan's files say, but for the place of a verifier that was written for the test."""
    text = json.dumps([plan.config, plan.files], sort_keys=True)
    return re.sub(r"/[\w/.-]*foreign", "", text)


def tried(case: ForeignCheckpoint, verifier: ConversionVerifier, every: int = 1) -> list[Tried]:
    """Every mutation of a checkpoint, or one in `every`; those that change nothing are left out."""
    with tempfile.TemporaryDirectory() as parent:
        whole = converted(case, Path(parent), verifier)
    chosen = list(mutations_of(case, whole.conversion.plan.used))[::every]
    found = [attempt(case, whole, mutation, verifier) for mutation in chosen]
    return [one for one in found if one.outcome != "same"]


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        verifier = ConversionVerifier(str(make_verifier(Path(parent) / "verifier")))
        rows = [row.to_json() for make in CASES for row in tried(make(), verifier)]
    rows += [row.to_json() for row in trained_mutations.table()]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    counts = {name: sum(row["outcome"] == name for row in rows) for name in ("refused", "flagged", "silent")}
    print(counts)


if __name__ == "__main__":
    main()
