"""A picture of how a training went."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speculators.train.metrics import read_metrics

Curve = list[tuple[int, float]]
PANELS: Mapping[str, Mapping[str, str]] = {
    "loss": {"loss": "training rows", "validation_loss": "held-out rows"},
    "right with all before": {},
    "tokens per verification": {
        "expected_acceptance_length": "expected, training rows",
        "validation_acceptance_length": "expected, held-out rows",
        "measured_acceptance_length": "measured by decoding",
    },
    "learning rate": {"lr": "matrices", "lr_norms": "norms", "lr_heads": "heads"},
}


def curves_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Curve]]:
    """What is drawn of the lines of a metrics log: by panel and label, (step, value) where there is a value.

    Of the rates those of norms and heads are left out where they are the same.
    """
    found: dict[str, dict[str, Curve]] = {}
    for panel, names in PANELS.items():
        curves = {label: _curve(lines, key) for key, label in names.items()}
        found[panel] = {label: curve for label, curve in curves.items() if curve}
    rates = found["learning rate"]
    for label in ("norms", "heads"):
        if rates.get(label) == rates.get("matrices"):
            rates.pop(label, None)
    positions = max((len(line.get("per_position", ())) for line in lines), default=0)
    for k in range(positions):
        counted = [(line["step"], line["per_position"][k]) for line in lines if len(line.get("per_position", ())) > k]
        points = [(step, count["sum"] / count["count"]) for step, count in counted if count["count"]]
        found["right with all before"][f"draft token {k + 1}"] = points
    return found


def _curve(lines: Sequence[Mapping[str, Any]], key: str) -> Curve:
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def draw_curves(log: Path, picture: Path) -> None:
    """Draw loss, accuracy of each draft token, acceptance lengths and rates over a metrics log's steps as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = list(read_metrics(log))
    found = curves_of(lines)
    figure = Figure(figsize=(7, 10), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(found), 1, sharex=True)
    for panel, (title, curves) in zip(panels, found.items(), strict=True):
        for label, points in curves.items():
            sparse = len(points) < len(lines) / 2
            panel.plot(*zip(*points, strict=True), label=label, marker="o" if sparse else None)
        if curves:
            panel.legend()
        panel.set_ylabel(title)
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("optimizer step")
    temporary = picture.with_name(f".{picture.name}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    os.replace(temporary, picture)
