import json
import random
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speculators.errors import TrainingError
from speculators.models.family import Count
from speculators.train.config import TrainConfig
from speculators.train.metrics import MetricSums
from speculators.train.optim import build_optimizers
from speculators.train.resume import (
    CheckpointFolder,
    RunState,
    capture_rng,
    load_parameters,
    restore_rng,
    trained_parameters,
)


class Trainee:
    """A small network with its optimizers, moved by one real step at a time."""

    def __init__(self, optimizer: str = "muon", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6))
        config = TrainConfig.model_validate({"optimizer": optimizer, "weight_decay": 0.1})
        self.optimizers: dict[str, Optimizer] = build_optimizers(self.model.named_parameters(), config)
        self.parameters: dict[str, Tensor] = trained_parameters(self.model)

    def step(self) -> None:
        self.model(torch.randn(3, 4)).pow(2).sum().backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


def folder(path: Path, **options: int) -> CheckpointFolder:
    return CheckpointFolder(path, {"lr": 1.0}, **options)


def save_steps(checkpoints: CheckpointFolder, scores: dict[int, dict[str, float | None]]) -> None:
    trainee = Trainee()
    for step, score in scores.items():
        checkpoints.save(RunState(step=step), trainee.parameters, trainee.optimizers, score)


def test_everything_comes_back_to_the_bit(tmp_path: Path) -> None:
    """Master weights are float32 and stay so (pitfall 6)."""
    trainee = Trainee()
    for _ in range(3):
        trainee.step()
    state = RunState(step=3, epoch=1, step_in_epoch=2, tokens=77, skipped=1, unlogged=MetricSums({"loss": Count(1, 3)}))
    folder(tmp_path).save(state, trainee.parameters, trainee.optimizers, {})
    after = [random.random(), *torch.rand(3).tolist()]

    other = Trainee(seed=9)
    loaded = folder(tmp_path).load_newest(other.parameters, other.optimizers)
    assert loaded is not None
    assert loaded.to_json() == state.to_json()
    assert [random.random(), *torch.rand(3).tolist()] == after
    for name, parameter in trainee.parameters.items():
        assert torch.equal(other.parameters[name], parameter)
        assert other.parameters[name].dtype is torch.float32
    for name, optimizer in trainee.optimizers.items():
        found = other.optimizers[name].state_dict()["state"]
        for key, moments in optimizer.state_dict()["state"].items():
            for moment, value in moments.items():
                assert torch.equal(found[key][moment], value)
                assert found[key][moment].dtype is torch.float32


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path: Path) -> None:
    trainee = Trainee()
    assert folder(tmp_path / "none").load_newest(trainee.parameters, trainee.optimizers) is None


def test_rotation_keeps_the_newest_and_the_best_of_both_kinds(tmp_path: Path) -> None:
    scores: dict[int, dict[str, float | None]] = {
        1: {"acceptance": 1.9, "loss": 3.0},
        2: {"acceptance": 1.5, "loss": 1.0},
        3: {"acceptance": 1.6, "loss": 2.0},
        4: {"acceptance": None, "loss": None},
        5: {"acceptance": None, "loss": None},
    }
    checkpoints = folder(tmp_path, keep_last=1, keep_best=1)
    save_steps(checkpoints, scores)
    assert [found.step for found in checkpoints.all()] == [1, 2, 5]
    assert (tmp_path / "best-acceptance").resolve() == (tmp_path / "step-1").resolve()
    assert (tmp_path / "best-loss").resolve() == (tmp_path / "step-2").resolve()
    assert checkpoints.best("acceptance")[0].step == 1


def test_of_equal_scores_the_later_one_is_better(tmp_path: Path) -> None:
    checkpoints = folder(tmp_path, keep_last=9)
    save_steps(checkpoints, {step: {"acceptance": 2.0, "loss": 1.0} for step in (1, 2, 3)})
    assert [found.step for found in checkpoints.best("acceptance", 2)] == [3, 2]
    assert [found.step for found in checkpoints.best("loss", 2)] == [3, 2]


def test_rotation_deletes_only_what_was_written_here(tmp_path: Path) -> None:
    checkpoints = folder(tmp_path)
    foreign = tmp_path / "step-1"
    foreign.mkdir()
    (foreign / "state.json").write_text('{"mine": true}', encoding="utf-8")
    (tmp_path / "notes.txt").write_text("keep", encoding="utf-8")
    save_steps(checkpoints, {2: {}})
    (tmp_path / "step-2" / "plot.png").write_bytes(b"keep")
    save_steps(checkpoints, {3: {}, 4: {}})
    kept = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    ours = [f"step-4/{name}" for name in ("optimizer.pt", "parameters.safetensors", "rng.pt", "state.json")]
    assert kept == ["notes.txt", "step-1/state.json", "step-2/plot.png", *ours]


def test_a_foreign_folder_in_the_way_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "thesis.tex").write_text("keep", encoding="utf-8")
    with pytest.raises(TrainingError, match="step-2 cannot be written"):
        save_steps(folder(tmp_path), {2: {}})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["step-2", "thesis.tex"]


def test_leftovers_of_an_interrupted_save_are_removed_and_never_loaded(tmp_path: Path) -> None:
    checkpoints = folder(tmp_path)
    save_steps(checkpoints, {1: {}})
    torn = tmp_path / ".step-2.abc.tmp"
    torn.mkdir()
    (torn / "parameters.safetensors").write_bytes(b"half")
    half_removed = tmp_path / "step-0"
    half_removed.mkdir()
    (half_removed / "state.json").write_text((tmp_path / "step-1" / "state.json").read_text("utf-8"), encoding="utf-8")
    trainee = Trainee()
    loaded = checkpoints.load_newest(trainee.parameters, trainee.optimizers)
    assert loaded is not None
    assert loaded.step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    checkpoints = folder(tmp_path)
    save_steps(checkpoints, {1: {}})
    trainee = Trainee()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(TrainingError, match=r"step-2 cannot be written: .*Earlier checkpoints are untouched"):
            checkpoints.save(RunState(step=2), trainee.parameters, trainee.optimizers, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1"]
    loaded = checkpoints.load_newest(trainee.parameters, trainee.optimizers)
    assert loaded is not None


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    save_steps(folder(tmp_path), {1: {}})
    trainee = Trainee()
    changed = CheckpointFolder(tmp_path, {"lr": 2.0})
    with pytest.raises(TrainingError, match=r"other settings: lr was 1\.0 and is 2\.0"):
        changed.load_newest(trainee.parameters, trainee.optimizers)


def test_another_optimizer_and_another_draft_are_refused(tmp_path: Path) -> None:
    save_steps(folder(tmp_path), {1: {}})
    adamw = Trainee("adamw")
    with pytest.raises(TrainingError, match=r"holds optimizers \['adamw', 'muon'\], expected \['adamw'\]"):
        folder(tmp_path).load_newest(adamw.parameters, adamw.optimizers)
    newest = folder(tmp_path).all()[-1]
    with pytest.raises(TrainingError, match=r"holds \['0.bias', .* the draft trains \['other'\]"):
        load_parameters(newest, {"other": torch.zeros(1)})
    wide = dict(adamw.parameters) | {"1.weight": torch.zeros(7)}
    with pytest.raises(TrainingError, match=r"1.weight is torch.float32 \[6\], expected float32 \[7\]"):
        load_parameters(newest, wide)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save_steps(folder(tmp_path), {1: {}})
    trainee = Trainee()
    for name in ("optimizer.pt", "parameters.safetensors"):
        path = tmp_path / "step-1" / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(TrainingError, match=r"step-1.* is damaged"):
            folder(tmp_path).load_newest(trainee.parameters, trainee.optimizers)
        path.write_bytes(whole)


def test_generators_are_put_back() -> None:
    state = capture_rng()
    first = random.random(), torch.rand(2)
    restore_rng(state)
    assert random.random() == first[0]
    assert torch.equal(torch.rand(2), first[1])


def test_the_state_is_plain_json(tmp_path: Path) -> None:
    save_steps(folder(tmp_path), {1: {"acceptance": 1.25, "loss": None}})
    document = json.loads((tmp_path / "step-1" / "state.json").read_text(encoding="utf-8"))
    assert document["scores"] == {"acceptance": 1.25, "loss": None}
    assert document["run"]["step"] == 1
