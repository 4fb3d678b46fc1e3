"""Every family in the loop that trains: what keeps its precision, what a resumed run goes on with, what is left out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.formats.checkpoint import read_config
from speculators.formats.tensor_health import is_norm
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models import FAMILIES
from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.family import VerifierShape
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from speculators.train.config import TrainConfig
from speculators.train.loop import TrainingTask, train
from speculators.train.metrics import read_metrics
from tests.models.contract import contract_of
from tests.models.drafts import config_of
from tests.train.tiny_training import load, make_samples

# A step of AdamW is at most the rate: four of them stay below 2^-9, where a bfloat16 weight of 1 rounds back to 1.
SETTINGS = TrainConfig(
    row_length=48, learning_rate=2e-4, schedule="constant", warmup_ratio=0.0, compute_dtype="bfloat16", epochs=2
)
LENGTHS = (21, 14, 30, 19)
every_family = pytest.mark.parametrize("family", FAMILIES)


def make_task(
    family: str, directory: Path, seed: int = 0, objective: Any = None, lengths: Sequence[int] = LENGTHS
) -> TrainingTask:
    """A fresh draft that starts at random, over the whole vocabulary of a tiny verifier."""
    options = dict(contract_of(family).overfit.options)
    if "draft_vocab_size" in FAMILIES[family].draft.model_fields:
        options["draft_vocab_size"] = None
    config = config_of(family, VerifierShape.from_config_dict(read_config(directory), str(directory)), options)
    weights = load_verifier_weights(directory)
    verifier = load(directory)
    samples = make_samples(verifier, lengths, list(config.aux_layer_ids))
    samples.samples[2].loss_mask[:] = False
    return TrainingTask(
        draft=Speculator.create(config, weights, seed=seed).draft,
        objective=objective or make_objective(family),
        verifier_head=VerifierHead.from_weights(weights),
        samples=samples,
    )


def make_objective(family: str, kind: Any = None) -> Any:
    kind = kind or FAMILIES[family].objective
    return kind(**({"closed_form_rows": 0} if "closed_form_rows" in kind.model_fields else {}))


@every_family
def test_masters_are_float32_before_and_after_a_crash(family: str, tiny_verifier: Path, tmp_path: Path) -> None:
    """Norms move though a step is below what bfloat16 resolves, and a resumed run is the same to the bit (pitfall 6).

    Of the four samples one has nothing to learn (pitfall 23); what is drawn by chance is drawn again.
    """
    straight = make_task(family, tiny_verifier)
    before = {name: parameter.detach().clone() for name, parameter in straight.draft.named_parameters()}
    train(straight, SETTINGS, tmp_path / "straight")
    norms = [name for name in before if is_norm(name)]
    assert (norms == []) is (family == "medusa")
    for name in norms:
        moved = straight.draft.get_parameter(name).detach()
        assert torch.equal(before[name], torch.ones_like(moved)), name
        assert not torch.equal(moved, before[name]), name
        assert torch.equal(moved.bfloat16(), before[name].bfloat16()), name
    lines = list(read_metrics(tmp_path / "straight" / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]

    class Crashing(FAMILIES[family].objective):
        def step(self, draft: Any, batch: PackedBatch, verifier_head: Any) -> StepOutput:
            calls.append(1)
            if len(calls) == 3:
                raise OSError("gone")
            return super().step(draft, batch, verifier_head)

    calls: list[int] = []
    settings = SETTINGS.model_copy(update={"checkpoint_every": 1})
    crashed = make_task(family, tiny_verifier, objective=make_objective(family, Crashing))
    with pytest.raises(OSError, match="gone"):
        train(crashed, settings, tmp_path / "split")
    resumed = make_task(family, tiny_verifier, seed=7)
    torch.manual_seed(77)
    train(resumed, settings, tmp_path / "split")
    for name, parameter in resumed.draft.named_parameters():
        assert torch.equal(parameter, straight.draft.get_parameter(name)), name
        assert not parameter.requires_grad or parameter.dtype is torch.float32, name
    again = list(read_metrics(tmp_path / "split" / "metrics.jsonl"))
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]


# Four rows of one document each: with four passes a step, an epoch is a step.
FOUR_PASSES = SETTINGS.model_copy(update={"row_length": 32, "accumulation": 4, "epochs": 3})


@pytest.mark.parametrize("family", ["eagle3", "peagle", "eagle"])
def test_training_goes_on_in_training_mode_after_every_measurement(
    family: str, tiny_verifier: Path, tmp_path: Path
) -> None:
    """P-EAGLE drops elements and EAGLE adds noise in that mode alone (pitfall 27)."""
    modes: list[tuple[bool, bool]] = []

    class Watching(FAMILIES[family].objective):
        def step(self, draft: Any, batch: PackedBatch, verifier_head: Any) -> StepOutput:
            modes.append((torch.is_grad_enabled(), draft.training))
            return super().step(draft, batch, verifier_head)

    task = make_task(family, tiny_verifier, objective=make_objective(family, Watching))
    task.validation = make_samples(load(tiny_verifier), (18,), list(task.draft.aux_layer_ids), seed=8)
    train(task, FOUR_PASSES.model_copy(update={"measure_every": 1}), tmp_path)
    assert modes == ([(True, True)] * 4 + [(False, False)]) * 3


def test_checkpoints_are_counted_in_steps_of_the_optimizer(tiny_verifier: Path, tmp_path: Path) -> None:
    """Every second step of four passes each is after the eighth pass, not the second (pitfall 27)."""
    found: list[list[str]] = []

    class Watching(FAMILIES["eagle3"].objective):
        def step(self, draft: Any, batch: PackedBatch, verifier_head: Any) -> StepOutput:
            found.append(sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")))
            return super().step(draft, batch, verifier_head)

    task = make_task("eagle3", tiny_verifier, objective=make_objective("eagle3", Watching))
    train(task, FOUR_PASSES.model_copy(update={"checkpoint_every": 2, "measure_every": 100}), tmp_path)
    assert found == [[]] * 8 + [["step-2"]] * 4
