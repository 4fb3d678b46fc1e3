"""What training measures: counts that are summed first and divided last, speed, and the log of both."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from speculators.errors import TrainingError
from speculators.models.family import Count, by_position


class MetricSums:
    """Sums of (sum, count) pairs by name, over forward passes, steps or rows."""

    def __init__(self, counts: Mapping[str, Iterable[float]] | None = None) -> None:
        self.counts: dict[str, Count] = {name: Count(*count) for name, count in (counts or {}).items()}

    @classmethod
    def of(cls, parts: Iterable[Mapping[str, Count]]) -> "MetricSums":
        """The sum of several counts."""
        sums = cls()
        for counts in parts:
            sums.add(counts)
        return sums

    def to_json(self) -> dict[str, list[float]]:
        """`[sum, count]` by name, from which sums can be made again."""
        return {name: list(count) for name, count in self.counts.items()}

    def add(self, counts: Mapping[str, Count]) -> None:
        """Add the counts of one more forward pass."""
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, Count(0.0, 0.0)).plus(count)

    def rate(self, name: str) -> float | None:
        """Sum over count of one metric; None where nothing was counted."""
        found = self.counts.get(name)
        return found.rate if found is not None and found.count else None

    def per_position(self) -> list[Count]:
        """`full_acc_0`, `full_acc_1` ... in order: positions that were right together with all before them."""
        return by_position(self.counts)


class Throughput:
    """Trained tokens per second.

    A trained token is a position of a packed row that is not padding, prompts included. The first `warmup_steps` steps
    are left out, and so is all time outside the steps: reading rows, measuring, writing checkpoints.
    """

    def __init__(self, warmup_steps: int = 3) -> None:
        self._warmup_left = warmup_steps
        self.tokens = 0
        self.seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count one optimizer step."""
        if self._warmup_left:
            self._warmup_left -= 1
            return
        self.tokens += tokens
        self.seconds += seconds

    @property
    def tokens_per_second(self) -> float | None:
        """The rate over all steps after the warm-up; None before there is one."""
        return self.tokens / self.seconds if self.seconds else None


class MetricsLog:
    """`metrics.jsonl`: one object per logged step, flushed line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def forget_after(self, step: int) -> None:
        """Drop lines after `step` (and a torn last line), which a resumed run will write again; makes the folder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        kept = [json.dumps(line) for line in read_metrics(self.path) if line["step"] <= step]
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.path)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one object; TrainingError where that fails, as on a full disk."""
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            raise TrainingError(
                f"{self.path} cannot be written: {error}; make room and run again to go on from the newest checkpoint"
            ) from error


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a metrics log in order; a torn last line is left out, another bad line is a TrainingError."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, text in enumerate(lines, start=1):
        if not text:
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise TrainingError(f"{path}:{number}: not JSON ({error.msg}); remove the line") from error
        yield line
