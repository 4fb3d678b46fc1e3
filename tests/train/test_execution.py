"""The options that say how a step is carried out: they reach the draft, and a run with them learns the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.errors import TrainingError
from speculators.models.execution import Execution
from speculators.train.config import TrainConfig
from speculators.train.loop import train
from speculators.train.resume import trained_parameters
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
    assert not list(tmp_path.rglob("*.safetensors"))
