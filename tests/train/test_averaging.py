"""The moving average of the weights: by its formula, and through the loop that keeps, saves and exports it."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculators.errors import TrainingError
from speculators.models.draft_model import DraftModel
from speculators.train.averaging import AveragedWeights, decay_at
from speculators.train.loop import TrainingRun, train
from speculators.train.signals import Stopped
from tests.train.test_loop import assert_same_bits, config, lines, weights
from tests.train.tiny_training import load, make_samples, make_task, stop_at

DECAY = 0.4


def test_the_decay_rises_to_what_was_asked_for() -> None:
    assert [decay_at(0.5, n) for n in range(10)] == pytest.approx(
        [0.1, 2 / 11, 0.25, 4 / 13, 5 / 14, 0.4, 7 / 16, 8 / 17, 0.5, 0.5]
    )


def test_the_average_is_a_weighted_sum_of_the_weights() -> None:
    weight = torch.tensor([1.0, -3.0])
    kept = AveragedWeights({"w": weight}, 0.9)
    values = [[2.0, 5.0], [4.0, 1.0], [0.0, 7.0]]
    for updates, value in enumerate(values):
        weight.copy_(torch.tensor(value))
        kept.update(updates)
    first, second, third = 1 / 10, 2 / 11, 3 / 12
    shares = [first * second * third, (1 - first) * second * third, (1 - second) * third, 1 - third]
    expected = [sum(share * v[i] for share, v in zip(shares, [[1.0, -3.0], *values], strict=True)) for i in range(2)]
    torch.testing.assert_close(kept.values["w"], torch.tensor(expected))
    assert kept.values["w"].dtype is torch.float32


def test_averages_stand_in_for_the_weights_and_leave_no_trace() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5)
    kept = AveragedWeights({"w": weight}, 0.9)
    weight.mul_(3.7)
    kept.update(50)
    own, average = weight.clone(), kept.values["w"].clone()
    calls: list[Tensor] = []
    with kept.in_place(lambda: calls.append(weight.clone())):
        assert torch.equal(weight, average)
    assert torch.equal(weight, own)
    assert torch.equal(kept.values["w"], average)
    assert [call.tolist() for call in calls] == [average.tolist(), own.tolist()]
    with pytest.raises(OSError, match="gone"), kept.in_place(lambda: None):
        raise OSError("gone")
    assert torch.equal(weight, own)


def stored(directory: Path, step: int, name: str) -> dict[str, Tensor]:
    return load_file(directory / "checkpoints" / f"step-{step}" / f"{name}.safetensors")


def test_the_average_is_judged_and_exported_and_the_weights_are_what_is_trained(
    tiny_verifier: Path, tmp_path: Path
) -> None:
    plain = make_task(tiny_verifier)
    train(plain, config(checkpoint_every=1, keep_last=99), tmp_path / "plain")
    judged: list[dict[str, Tensor]] = []

    def measure(draft: DraftModel) -> float:
        judged.append(weights(draft))
        return 1.0 + len(judged)

    layers = make_task(tiny_verifier).draft.config.aux_layer_ids
    held_out = make_samples(load(tiny_verifier), (18, 25), layers, seed=8)
    task = make_task(tiny_verifier, measure=measure, validation=held_out)
    settings = config(ema_decay=DECAY, checkpoint_every=1, keep_last=99, measure_every=4)
    train(task, settings, tmp_path / "averaged")

    # The objective prepares a fresh draft before the first step.
    train(make_task(tiny_verifier), config(max_steps=1, learning_rate=1e-30), tmp_path / "start")
    average = stored(tmp_path / "start", 1, "parameters")
    for step in range(1, 10):
        own = stored(tmp_path / "averaged", step, "parameters")
        assert_same_bits(own, stored(tmp_path / "plain", step, "parameters"))
        keep = min(DECAY, step / (9 + step))
        average = {name: keep * average[name] + (1 - keep) * value for name, value in own.items()}
        for name, value in stored(tmp_path / "averaged", step, "averages").items():
            torch.testing.assert_close(value, average[name], rtol=1e-5, atol=1e-7)
    assert not (tmp_path / "plain" / "checkpoints" / "step-1" / "averages.safetensors").exists()
    # Measurements are after the steps 4, 8 and 9; the last was the best.
    for step, seen in zip((4, 8, 9), judged, strict=True):
        assert_same_bits(seen, stored(tmp_path / "averaged", step, "averages"))
    assert_same_bits(weights(task.draft), stored(tmp_path / "averaged", 9, "averages"))
    # The held-out loss is that of the average: of a run whose parameters have these values it is the same.
    other = TrainingRun(make_task(tiny_verifier, validation=held_out), config(), tmp_path / "other", False)
    with torch.no_grad():
        for name, value in stored(tmp_path / "averaged", 9, "averages").items():
            other.parameters[name].copy_(value)
    judgement = other.judge.judge(None)
    for key in ("validation_loss", "validation_acceptance_length"):
        assert judgement[key] == lines(tmp_path / "averaged")[-1][key]
    assert lines(tmp_path / "averaged")[-1]["loss"] == lines(tmp_path / "plain")[-1]["loss"]


def test_a_stopped_average_goes_on_to_the_bit(tiny_verifier: Path, tmp_path: Path) -> None:
    settings = config(accumulation=2, ema_decay=DECAY)
    straight = make_task(tiny_verifier)
    train(straight, settings, tmp_path / "straight")
    first = make_task(tiny_verifier)
    first.objective = stop_at(3, signal.SIGUSR1, first.objective, 2)
    with pytest.raises(Stopped) as stopped:
        train(first, settings, tmp_path / "split")
    assert stopped.value.code == 128 + signal.SIGUSR1
    second = make_task(tiny_verifier, seed=5)
    train(second, settings, tmp_path / "split")
    assert_same_bits(weights(straight.draft), weights(second.draft))
    for name in ("parameters", "averages"):
        assert_same_bits(stored(tmp_path / "straight", 6, name), stored(tmp_path / "split", 6, name))


def test_an_average_is_not_begun_in_the_middle_of_a_run(tiny_verifier: Path, tmp_path: Path) -> None:
    train(make_task(tiny_verifier), config(), tmp_path)
    with pytest.raises(TrainingError, match=r'train was {"ema_decay": null} and is {"ema_decay": 0.9}'):
        train(make_task(tiny_verifier), config(ema_decay=0.9), tmp_path)


def test_averages_that_are_gone_are_named(tiny_verifier: Path, tmp_path: Path) -> None:
    train(make_task(tiny_verifier), config(max_steps=2, ema_decay=DECAY), tmp_path)
    (tmp_path / "checkpoints" / "step-2" / "averages.safetensors").unlink()
    with pytest.raises(TrainingError, match=r"averages\.safetensors is damaged"):
        train(make_task(tiny_verifier), config(max_steps=2, ema_decay=DECAY), tmp_path)
