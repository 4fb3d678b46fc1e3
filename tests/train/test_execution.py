"""The options that say how a step is carried out: they reach the draft, and a run with them learns the same."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.errors import TrainingError, UsageError
from speculators.models.execution import Execution
from speculators.models.loss_choice import LossChoice, LossKind
from speculators.train.config import TrainConfig
from speculators.train.loop import TrainingRun, train
from speculators.train.metrics import read_metrics
from speculators.train.recipe import DataConfig, Recipe
from speculators.train.resume import trained_parameters
from speculators.train.stages import Run
from tests.train.tiny_training import make_task

SETTINGS: dict[str, Any] = {"row_length": 48, "max_steps": 3, "compute_dtype": "float32", "learning_rate": 1e-3}


def trained(verifier: Path, folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], Execution]:
    """Parameters after three steps, and how they were carried out."""
    task = make_task(verifier)
    train(task, TrainConfig(**SETTINGS, **options), folder)
    return {name: p.detach().clone() for name, p in trained_parameters(task.draft).items()}, task.draft.execution


def test_gradient_checkpointing_learns_the_same_to_the_bit(tiny_verifier: Path, tmp_path: Path) -> None:
    expected, plain = trained(tiny_verifier, tmp_path / "plain")
    found, execution = trained(tiny_verifier, tmp_path / "again", gradient_checkpointing=True)
    assert (plain, execution) == (Execution(), Execution(gradient_checkpointing=True))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_run_goes_on_with_other_ways_of_carrying_it_out(tiny_verifier: Path, tmp_path: Path) -> None:
    expected, _ = trained(tiny_verifier, tmp_path / "straight")
    trained(tiny_verifier, tmp_path / "split", checkpoint_every=1)
    checkpoints = sorted((tmp_path / "split" / "checkpoints").iterdir())
    assert checkpoints
    found, execution = trained(tiny_verifier, tmp_path / "split", gradient_checkpointing=True, attention="blocks")
    assert execution == Execution(gradient_checkpointing=True, attention="blocks")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_losses_by_triton_learn_the_same_within_rounding(tiny_verifier: Path, tmp_path: Path) -> None:
    """Three real steps, and the judgement of the draft after them: losses within 1e-5."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for losses in ("torch", "triton"):
        _, execution = trained(tiny_verifier, tmp_path / losses, losses=losses)
        assert execution == Execution(losses=losses)
        lines[losses] = list(read_metrics(tmp_path / losses / "metrics.jsonl"))
    assert len(lines["torch"]) == 3
    for plain, fused in zip(lines["torch"], lines["triton"], strict=True):
        for name in ("loss", "grad_norm", "expected_acceptance_length"):
            assert fused[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-5), name


def test_what_was_measured_is_in_the_log_once(
    tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", sys.executable)
    run = TrainingRun(make_task(tiny_verifier), TrainConfig(**SETTINGS), tmp_path, False)
    milliseconds = iter([2.0, 1.5])
    choice = LossChoice("auto", lambda measured: next(milliseconds))
    assert choice.is_fused(LossKind("kl_div", torch.device("cuda"), torch.bfloat16, 96), bool)
    run.draft.loss_choice = choice
    run.go()
    said = [line.get("losses_measured") for line in read_metrics(tmp_path / "metrics.jsonl")]
    found = {"loss": "kl_div", "vocabulary": 96, "dtype": "bfloat16", "torch_ms": 2.0, "triton_ms": 1.5}
    assert said == [[found], None, None]


# torch.compile itself looks for gradients of the tensors that it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.full
def test_a_compiled_run_learns_the_same_within_rounding(tiny_verifier: Path, tmp_path: Path) -> None:
    expected, _ = trained(tiny_verifier, tmp_path / "plain")
    found, execution = trained(tiny_verifier, tmp_path / "compiled", compile=True)
    assert execution.compile
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=name)


def test_what_the_machine_lacks_is_said_before_the_first_step(
    tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(TrainingError, match="no-such-compiler is not on the PATH"):
        trained(tiny_verifier, tmp_path, compile=True)
    with pytest.raises(TrainingError, match="'flex' has no backward"):
        trained(tiny_verifier, tmp_path, attention="flex")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(TrainingError, match="'triton' have no kernels for 'cpu'"):
        trained(tiny_verifier, tmp_path, losses="triton")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_recipe_is_refused_before_anything_is_read(
    tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(objective: dict[str, Any], **options: Any) -> None:
        recipe = Recipe(
            name="tiny",
            family="eagle3",
            verifier=str(tiny_verifier),
            objective=objective,
            data=DataConfig(train=(str(tmp_path / "absent.jsonl"),)),
            train=TrainConfig(**options),
            out=str(tmp_path / "out"),
        )
        Run(recipe, progress=False).run(["train"])

    with pytest.raises(UsageError, match=r"the loss 1\.0 js has no Triton kernel"):
        run({"loss": {"js": 1.0}}, losses="triton")
    with pytest.raises(TrainingError, match="'flex' has no backward"):
        run({}, attention="flex")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(TrainingError, match="'triton' have no kernels for 'cpu'"):
        run({}, losses="triton")
    assert not (tmp_path / "out").exists()
