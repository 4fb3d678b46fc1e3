from pathlib import Path
from typing import Any

from speculators.train.curves import PANELS, curves_of, draw_curves
from speculators.train.metrics import MetricsLog

LINES: list[dict[str, Any]] = [
    {
        "step": step,
        "loss": None if step == 2 else 8 / step,
        "lr": 1e-3,
        "lr_norms": 1e-3,
        "lr_heads": 5e-4,
        "per_position": [] if step == 2 else [{"sum": 3.0 * step, "count": 30.0}, {"sum": step, "count": 20.0}],
        "validation_acceptance_length": 1.25 if step == 4 else None,
        "measured_acceptance_length": 1.5 if step == 4 else None,
    }
    for step in range(1, 5)
]


def test_curves_are_rates_over_steps_where_there_are_any() -> None:
    assert curves_of(LINES) == {
        "loss": {"training rows": [(1, 8.0), (3, 8 / 3), (4, 2.0)]},
        "right with all before": {
            "draft token 1": [(1, 0.1), (3, 0.3), (4, 0.4)],
            "draft token 2": [(1, 0.05), (3, 0.15), (4, 0.2)],
        },
        "tokens per verification": {"expected, held-out rows": [(4, 1.25)], "measured by decoding": [(4, 1.5)]},
        "learning rate": {
            "matrices": [(step, 1e-3) for step in range(1, 5)],
            "heads": [(step, 5e-4) for step in range(1, 5)],
        },
    }


def test_an_old_log_and_an_empty_one_have_curves_too() -> None:
    assert curves_of([{"step": 1, "loss": 2.0}])["loss"] == {"training rows": [(1, 2.0)]}
    assert curves_of([]) == {panel: {} for panel in PANELS}


def test_curves_are_a_picture(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for line in LINES:
        log.write(line)
    draw_curves(log.path, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
