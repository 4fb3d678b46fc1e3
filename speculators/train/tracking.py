"""Reports to experiment trackers: accelerate's own classes, which know tensorboard, wandb, trackio and mlflow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from speculators.errors import UsageError


def require_trackers(names: Collection[str], installed: Collection[str] | None = None) -> None:
    """Raise UsageError where the package of a tracker is not installed; `installed` is what accelerate finds."""
    found = {str(tracker) for tracker in get_available_trackers()} if installed is None else set(installed)
    missing = [name for name in names if name not in found]
    if missing:
        raise UsageError(
            f"train.trackers asks for {', '.join(missing)}, which is not installed; pip install {' '.join(missing)}, "
            "or leave it out"
        )


@contextmanager
def tracked(accelerator: Accelerator, name: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Start the accelerator's trackers with a run's name and settings, and finish them at the end, however it ends.

    Only the first process has any.
    """
    flat = {key: value if isinstance(value, int | float | str) else str(value) for key, value in settings.items()}
    accelerator.init_trackers(name, config=flat)
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()


def tracked_values(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of `metrics.jsonl`, a rate for each sum and count; what is null is left out.

    The draft token k (from 1) is `accuracy/k`, a step's mean seconds for a part of it `seconds/part`.
    """
    values = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
    values |= {f"accuracy/{k}": _rate(count) for k, count in enumerate(line.get("per_position", ()), start=1)}
    values |= {f"seconds/{part}": _rate(count) for part, count in line.get("seconds", {}).items()}
    if line.get("mfu"):
        values["mfu"] = _rate(line["mfu"])
    return values


def _rate(count: Mapping[str, float]) -> float:
    return count["sum"] / count["count"] if count["count"] else 0.0
