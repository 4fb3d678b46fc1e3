import math
import signal
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file

from speculators.errors import TrainingError
from speculators.models import FAMILIES
from speculators.models.draft_model import DraftModel, PackedBatch, StepOutput
from speculators.models.family import Count
from speculators.train.config import TrainConfig
from speculators.train.dataset import Rows
from speculators.train.loop import compute_dtype, train
from speculators.train.metrics import read_metrics
from speculators.train.resume import trained_parameters
from speculators.train.signals import Stopped
from tests.train.tiny_training import load, make_samples, make_task, stop_at

CONFIG: dict[str, Any] = {
    "row_length": 64,
    "learning_rate": 2e-3,
    "weight_decay": 0.1,
    "warmup_ratio": 0.2,
    "compute_dtype": "float32",
    "epochs": 3,
    "measure_every": 100,
}


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{**CONFIG, **changes})


def lines(directory: Path) -> list[dict[str, Any]]:
    return list(read_metrics(directory / "metrics.jsonl"))


def weights(draft: DraftModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trained_parameters(draft).items()}


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_six_steps_are_three_and_a_signal_and_three_to_the_bit(
    tiny_verifier: Path, tmp_path: Path, optimizer: str, signum: int, code: int
) -> None:
    # 10 documents make 3 rows of 64: each epoch has a step of two passes and a shorter one.
    settings = config(optimizer=optimizer, accumulation=2)
    straight = make_task(tiny_verifier)
    train(straight, settings, tmp_path / "straight")
    assert len(lines(tmp_path / "straight")) == 6

    first = make_task(tiny_verifier)
    first.objective = stop_at(3, signum, first.objective, 2)
    with pytest.raises(Stopped) as stopped:
        train(first, settings, tmp_path / "split")
    assert stopped.value.code == code
    assert [line["step"] for line in lines(tmp_path / "split")] == [1, 2, 3]

    second = make_task(tiny_verifier, seed=5)
    torch.manual_seed(77)
    train(second, settings, tmp_path / "split")
    assert_same_bits(weights(straight.draft), weights(second.draft))
    keep = ("step", "epoch", "loss", "lr", "grad_norm", "tokens", "per_position")
    assert [[line[key] for key in keep] for line in lines(tmp_path / "straight")] == [
        [line[key] for key in keep] for line in lines(tmp_path / "split")
    ]


def test_the_loss_falls_and_every_metric_is_logged(tiny_verifier: Path, tmp_path: Path) -> None:
    task = make_task(tiny_verifier)
    result = train(task, config(epochs=8, schedule="constant"), tmp_path)
    found = lines(tmp_path)
    assert [line["step"] for line in found] == list(range(1, result.steps + 1))
    assert found[-1]["loss"] < 0.9 * found[0]["loss"]
    assert result.tokens == 8 * sum(task.samples.lengths) == found[-1]["tokens"]
    assert result.tokens_per_second is not None
    assert 0 < result.utilisation <= 1
    for line in found:
        assert line["lr"] == pytest.approx(2e-3 * min(1.0, line["step"] / math.ceil(0.2 * result.steps)))
        assert [set(position) for position in line["per_position"]] == [{"sum", "count"}] * 3
        shares = [position["sum"] / position["count"] for position in line["per_position"]]
        assert line["expected_acceptance_length"] == pytest.approx(1 + sum(shares))
        assert line["measured_acceptance_length"] is None
        assert line["grad_norm"] > 0
    assert not task.draft.training


def test_passes_make_the_same_step_however_rows_are_split(tiny_verifier: Path, tmp_path: Path) -> None:
    # A row with few supervised tokens beside a full one: means of means would weigh them alike.
    lengths = (60, 12, 58, 9)
    runs = {}
    for rows, accumulation in ((4, 1), (2, 2), (1, 4)):
        task = make_task(tiny_verifier, lengths=lengths)
        settings = config(epochs=4, rows_per_step=rows, accumulation=accumulation)
        train(task, settings, tmp_path / str(rows))
        runs[rows] = weights(task.draft), [line["loss"] for line in lines(tmp_path / str(rows))]
    for rows in (1, 2):
        assert runs[rows][1] == pytest.approx(runs[4][1], rel=1e-5)
        for name, tensor in runs[4][0].items():
            torch.testing.assert_close(runs[rows][0][name], tensor, rtol=1e-4, atol=1e-5)


def test_frozen_tensors_stay_and_every_trained_one_moves_in_float32(tiny_verifier: Path, tmp_path: Path) -> None:
    """Master weights are float32 and stay so (pitfall 6)."""
    task = make_task(tiny_verifier)
    before = {name: value.clone() for name, value in task.draft.state_dict().items()}
    train(task, config(compute_dtype="bfloat16"), tmp_path)
    trained = trained_parameters(task.draft)
    for name, value in task.draft.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in trained), name
    assert {value.dtype for value in trained.values()} == {torch.float32}


def test_bfloat16_compute_rounds_but_learns_the_same(tiny_verifier: Path, tmp_path: Path) -> None:
    losses = {}
    for dtype in ("float32", "bfloat16"):
        train(make_task(tiny_verifier), config(compute_dtype=dtype), tmp_path / dtype)
        losses[dtype] = [line["loss"] for line in lines(tmp_path / dtype)]
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)


def test_row_28_validation_and_measurement_choose_the_checkpoint(tiny_verifier: Path, tmp_path: Path) -> None:
    """Acceptance is that of prefixes, and chooses the checkpoint (pitfall 28)."""
    measured = iter([1.5, 2.5, 2.0])
    drafts: list[dict[str, torch.Tensor]] = []

    def measure(draft: DraftModel) -> float:
        assert not draft.training
        torch.rand(3)
        drafts.append(weights(draft))
        return next(measured)

    layers = make_task(tiny_verifier).draft.config.aux_layer_ids
    validation = make_samples(load(tiny_verifier), (18, 25), layers, seed=8)
    task = make_task(tiny_verifier, validation=validation, measure=measure)
    result = train(task, config(measure_every=None, schedule="constant"), tmp_path)
    found = [line for line in lines(tmp_path) if line["measured_acceptance_length"] is not None]
    assert [line["measured_acceptance_length"] for line in found] == [1.5, 2.5, 2.0]
    assert all(line["validation_loss"] > 0 and line["validation_acceptance_length"] >= 1 for line in found)
    assert result.chosen.step == found[1]["step"]
    assert result.chosen.scores["acceptance"] == 2.5
    assert_same_bits(weights(task.draft), drafts[1])
    best = tmp_path / "checkpoints"
    assert (best / "best-acceptance").resolve().name == f"step-{found[1]['step']}"
    by_loss = min(found, key=lambda line: (line["validation_loss"], -line["step"]))
    assert (best / "best-loss").resolve().name == f"step-{by_loss['step']}"
    assert by_loss["step"] != result.chosen.step


def test_row_28_simulated_acceptance_chooses_the_checkpoint_where_nothing_is_decoded(
    tiny_verifier: Path, tmp_path: Path
) -> None:
    """The held-out loss falls to the end, the acceptance of prefixes is best in the middle (pitfall 28)."""
    judged = iter([(3.0, (6, 3, 1)), (2.0, (9, 7, 5)), (1.0, (8, 6, 2))])

    class Judged(FAMILIES["eagle3"].objective):
        def step(self, draft: Any, batch: PackedBatch, verifier_head: Any) -> StepOutput:
            output = super().step(draft, batch, verifier_head)
            if not draft.training:
                loss, right = next(judged)
                output.metrics = {"loss": Count(10 * loss, 10)}
                output.metrics |= {f"full_acc_{step}": Count(number, 10) for step, number in enumerate(right)}
            return output

    layers = make_task(tiny_verifier).draft.config.aux_layer_ids
    task = make_task(tiny_verifier, validation=make_samples(load(tiny_verifier), (18, 25), layers, seed=8))
    task.objective = Judged()
    result = train(task, config(measure_every=None, keep_last=3), tmp_path)
    found = [line for line in lines(tmp_path) if "validation_loss" in line]
    assert [line["validation_loss"] for line in found] == [3.0, 2.0, 1.0]
    lengths = [line["validation_acceptance_length"] for line in found]
    assert lengths == pytest.approx([1 + 0.6 + 0.3 + 0.1, 1 + 0.9 + 0.7 + 0.5, 1 + 0.8 + 0.6 + 0.2])
    assert result.chosen.step == found[1]["step"]
    assert (tmp_path / "checkpoints" / "best-loss").resolve().name == f"step-{found[2]['step']}"
    chosen = load_file(result.chosen.path / "parameters.safetensors")
    assert_same_bits(weights(task.draft), chosen)


def test_nothing_of_a_pass_lies_beside_the_next_one(tiny_verifier: Path, tmp_path: Path) -> None:
    """The loss's graph has more than what autograd saved: the verifier's states and head, among others."""
    made: list[ref[torch.Tensor]] = []

    class Watched(FAMILIES["eagle3"].objective):
        def step(self, draft: Any, batch: PackedBatch, verifier_head: Any) -> StepOutput:
            assert [loss() for loss in made] == [None] * len(made)
            output = super().step(draft, batch, verifier_head)
            made.append(ref(output.loss))
            return output

    task = make_task(tiny_verifier)
    task.objective = Watched()
    train(task, config(accumulation=2, max_steps=1), tmp_path)
    assert len(made) == 2


def test_measuring_does_not_change_what_is_learnt(tiny_verifier: Path, tmp_path: Path) -> None:
    plain, measured = make_task(tiny_verifier), make_task(tiny_verifier, measure=lambda draft: float(torch.rand(())))
    train(plain, config(), tmp_path / "plain")
    train(measured, config(measure_every=2, keep_best=9, keep_last=9), tmp_path / "measured")
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in lines(tmp_path / "plain")] == [
            line[name] for line in lines(tmp_path / "measured")
        ]


def test_reading_ahead_changes_nothing(tiny_verifier: Path, tmp_path: Path) -> None:
    drafts = []
    for prefetch in (True, False):
        task = make_task(tiny_verifier)
        train(task, config(prefetch=prefetch), tmp_path / str(prefetch))
        drafts.append(weights(task.draft))
    assert_same_bits(*drafts)


def test_max_steps_ends_the_run_and_the_schedule(tiny_verifier: Path, tmp_path: Path) -> None:
    result = train(make_task(tiny_verifier), config(epochs=9, max_steps=5, schedule="linear"), tmp_path)
    assert result.steps == 5
    assert [line["lr"] for line in lines(tmp_path)] == pytest.approx([2e-3 * f for f in (1, 1, 0.75, 0.5, 0.25)])


def test_a_finished_run_is_not_trained_again(tiny_verifier: Path, tmp_path: Path) -> None:
    task = make_task(tiny_verifier)
    first = train(task, config(), tmp_path)
    again = make_task(tiny_verifier, seed=3)
    second = train(again, config(), tmp_path)
    assert (second.steps, second.tokens, second.chosen) == (first.steps, first.tokens, first.chosen)
    assert_same_bits(weights(task.draft), weights(again.draft))
    assert len(lines(tmp_path)) == first.steps


def test_other_settings_do_not_continue_a_run(tiny_verifier: Path, tmp_path: Path) -> None:
    """A vocabulary map stays with its weights (pitfall 33)."""
    train(make_task(tiny_verifier), config(), tmp_path)
    with pytest.raises(TrainingError, match="train was"):
        train(make_task(tiny_verifier), config(learning_rate=1e-3), tmp_path)
    with pytest.raises(TrainingError, match="data was"):
        train(make_task(tiny_verifier, lengths=(20, 20)), config(), tmp_path)
    # Bookkeeping may change.
    train(make_task(tiny_verifier), config(log_every=7, keep_last=3), tmp_path)


def test_broken_states_are_skipped_a_few_times_then_named(tiny_verifier: Path, tmp_path: Path) -> None:
    task = make_task(tiny_verifier)
    broken: Any = task.samples
    broken.samples[3].aux_hidden_states[10] = float("nan")
    result = train(task, config(max_skipped_steps=3), tmp_path / "skips")
    assert result.steps == len(lines(tmp_path / "skips"))
    unlearnt = [line for line in lines(tmp_path / "skips") if line["loss"] is None]
    assert len(unlearnt) == 3
    assert all(line["grad_norm"] is None for line in unlearnt)
    assert [line["skipped_samples"] for line in unlearnt] == [[3]] * 3
    assert all(torch.isfinite(value).all() for value in weights(task.draft).values())
    task = make_task(tiny_verifier)
    task.samples = Rows(broken, [0, 3, 5, 6])
    with pytest.raises(
        TrainingError, match=r"samples are \[1\] \(rows \[3\] of the hidden states\), with hidden states that are not"
    ):
        train(task, config(max_skipped_steps=0), tmp_path / "rows")
    task = make_task(tiny_verifier)
    task.samples = broken
    with pytest.raises(TrainingError, match=r"no finite gradient.* samples are \[.*\b3\b.*\]"):
        train(task, config(max_skipped_steps=2), tmp_path / "stops")


def test_a_broken_loss_is_blamed_on_the_pass_that_it_came_from(tiny_verifier: Path, tmp_path: Path) -> None:
    class Breaking(FAMILIES["eagle3"].objective):
        def step(self, draft: Any, batch: PackedBatch, verifier_head: Any) -> StepOutput:
            output = super().step(draft, batch, verifier_head)
            if 2 in batch.document_ids:
                output.loss = output.loss * math.inf
                passed.append(sorted(set(batch.document_ids.flatten().tolist()) - {-1}))
            return output

    passed: list[list[int]] = []
    task = make_task(tiny_verifier)
    task.objective = Breaking()
    with pytest.raises(TrainingError, match="with a loss that is not finite") as raised:
        train(task, config(max_skipped_steps=0, accumulation=3), tmp_path)
    assert f"samples are {passed[0]}," in str(raised.value)
    assert len(passed[0]) < len(task.samples)


def test_log_every_sums_over_the_steps_between(tiny_verifier: Path, tmp_path: Path) -> None:
    train(make_task(tiny_verifier), config(), tmp_path / "each")
    train(make_task(tiny_verifier), config(log_every=2), tmp_path / "second")
    each, second = lines(tmp_path / "each"), lines(tmp_path / "second")
    assert [line["step"] for line in second] == [2, 4, 6, 8, 9]
    for line in second[:-1]:
        pair = [one for one in each if one["step"] in (line["step"] - 1, line["step"])]
        for k, position in enumerate(line["per_position"]):
            assert position["count"] == sum(one["per_position"][k]["count"] for one in pair)
            assert position["sum"] == sum(one["per_position"][k]["sum"] for one in pair)


def test_a_crash_between_checkpoints_goes_on_from_the_last_one(tiny_verifier: Path, tmp_path: Path) -> None:
    straight = make_task(tiny_verifier)
    train(straight, config(), tmp_path / "straight")

    class Crashing(FAMILIES["eagle3"].objective):
        def step(self, draft: Any, batch: PackedBatch, verifier_head: Any) -> StepOutput:
            calls.append(1)
            if len(calls) == 6:
                raise OSError("gone")
            return super().step(draft, batch, verifier_head)

    calls: list[int] = []
    crashed = make_task(tiny_verifier)
    crashed.objective = Crashing()
    with pytest.raises(OSError, match="gone"):
        train(crashed, config(checkpoint_every=2), tmp_path / "split")
    assert [line["step"] for line in lines(tmp_path / "split")] == [1, 2, 3, 4, 5]
    resumed = make_task(tiny_verifier, seed=4)
    train(resumed, config(checkpoint_every=2), tmp_path / "split")
    assert_same_bits(weights(straight.draft), weights(resumed.draft))
    assert [line["step"] for line in lines(tmp_path / "split")] == list(range(1, 10))


def test_a_measurement_that_casts_the_draft_is_caught(tiny_verifier: Path, tmp_path: Path) -> None:
    """Master weights are float32 and stay so (pitfall 6)."""

    def measure(draft: DraftModel) -> float:
        draft.to(torch.bfloat16)
        return 1.0

    with pytest.raises(TrainingError, match=r"is torch\.bfloat16 after the measurement"):
        train(make_task(tiny_verifier, measure=measure), config(max_steps=1), tmp_path)


def test_compute_dtype_follows_the_hardware() -> None:
    cpu = torch.device("cpu")
    assert compute_dtype("float32", cpu) is torch.float32
    assert compute_dtype("bfloat16", cpu) is torch.bfloat16
    flags = set(Path("/proc/cpuinfo").read_text().split()) if Path("/proc/cpuinfo").exists() else set()
    expected = torch.bfloat16 if flags & {"avx512_bf16", "amx_bf16"} else torch.float32
    assert compute_dtype("auto", cpu) is expected


def test_a_row_with_nothing_to_learn_does_no_harm(tiny_verifier: Path, tmp_path: Path) -> None:
    """Nothing to learn is a zero and no NaN (pitfall 23)."""
    task = make_task(tiny_verifier, lengths=(40, 40))
    samples: Any = task.samples
    samples.samples[1].loss_mask[:] = False
    train(task, config(epochs=2), tmp_path / "alone")
    found = lines(tmp_path / "alone")
    assert sorted(line["loss"] is None for line in found) == [False, False, True, True]
    assert all(torch.isfinite(value).all() for value in weights(task.draft).values())
    # In one step with a row that teaches, it neither adds to the loss nor thins it.
    task = make_task(tiny_verifier, lengths=(40, 40))
    task.samples = samples
    train(task, config(max_steps=1, accumulation=2), tmp_path / "together")
    first = lines(tmp_path / "together")[0]
    alone = make_task(tiny_verifier, lengths=(40,))
    train(alone, config(max_steps=1), tmp_path / "only")
    assert first["loss"] == pytest.approx(lines(tmp_path / "only")[0]["loss"], rel=1e-6)
    assert first["grad_norm"] == pytest.approx(lines(tmp_path / "only")[0]["grad_norm"], rel=1e-5)
