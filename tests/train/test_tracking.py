from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import GeneralTracker, get_available_trackers

from speculators.errors import UsageError
from speculators.train.config import TrainConfig
from speculators.train.loop import train
from speculators.train.stages import Run
from speculators.train.tracking import require_trackers, tracked_values
from tests.train.test_loop import config, lines
from tests.train.test_stages import make_recipe
from tests.train.tiny_training import make_task, stop_at


class Notebook(GeneralTracker):
    """A tracker that writes down what it is told."""

    name = "notebook"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {}
        self.told: list[tuple[int | None, dict[str, float]]] = []
        self.state = "new"

    @property
    def tracker(self) -> "Notebook":
        return self

    def start(self) -> None:
        assert self.state == "new"
        self.state = "started"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        assert self.state == "started"
        self.told.append((step, values))

    def finish(self) -> None:
        self.state = "finished"


def test_a_tracker_is_told_what_the_log_is_told(tiny_verifier: Path, tmp_path: Path) -> None:
    notebook = Notebook()
    train(make_task(tiny_verifier, trackers=[notebook]), config(log_every=2), tmp_path)
    written = lines(tmp_path)
    assert notebook.state == "finished"
    assert [step for step, _ in notebook.told] == [line["step"] for line in written] == [2, 4, 6, 8, 9]
    for (_, told), line in zip(notebook.told, written, strict=True):
        for key in ("loss", "lr", "grad_norm", "tokens", "expected_acceptance_length"):
            assert told[key] == line[key]
        for k, count in enumerate(line["per_position"], start=1):
            assert told[f"accuracy/{k}"] == count["sum"] / count["count"]
        assert told["seconds/compute"] == line["seconds"]["compute"]["sum"] / line["seconds"]["compute"]["count"]
        assert "measured_acceptance_length" not in told
    assert notebook.settings["learning_rate"] == 2e-3
    assert notebook.settings["betas"] == "[0.9, 0.95]"


def test_a_tracker_is_finished_when_training_is_not(tiny_verifier: Path, tmp_path: Path) -> None:
    notebook = Notebook()
    task = make_task(tiny_verifier, trackers=[notebook])
    task.objective = stop_at(2, 15, task.objective, 1)
    with pytest.raises(SystemExit):
        train(task, config(), tmp_path)
    assert notebook.state == "finished"
    assert [step for step, _ in notebook.told] == [1, 2]


def test_what_is_null_is_not_reported() -> None:
    line = {"step": 3, "loss": None, "mfu": None, "lr": 0.5, "skipped_samples": [4], "per_position": [], "seconds": {}}
    assert tracked_values(line) == {"lr": 0.5}
    counts = {"mfu": {"sum": 1.0, "count": 4.0}, "per_position": [{"sum": 0.0, "count": 0.0}]}
    assert tracked_values(counts) == {"mfu": 0.25, "accuracy/1": 0.0}


def test_a_tracker_that_is_not_installed_is_an_error_before_anything_is_done(
    tiny_verifier: Path, tmp_path: Path
) -> None:
    require_trackers(["wandb"], ["wandb", "mlflow"])
    with pytest.raises(UsageError, match=r"asks for wandb, trackio, which is not installed; pip install wandb trackio"):
        require_trackers(["wandb", "mlflow", "trackio"], ["mlflow"])
    absent = sorted({"tensorboard", "wandb", "trackio", "mlflow"} - {str(name) for name in get_available_trackers()})
    assert absent
    settings = TrainConfig.model_validate({"trackers": absent[:1]})
    assert settings.trackers == (absent[0],)
    with pytest.raises(UsageError, match=f"train.trackers asks for {absent[0]}"):
        train(make_task(tiny_verifier), settings, tmp_path / "alone")
    recipe = make_recipe(tiny_verifier, tmp_path, train=settings)
    with pytest.raises(UsageError, match=f"train.trackers asks for {absent[0]}"):
        Run(recipe, progress=False).run(["regenerate", "train"])
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "alone").exists()
