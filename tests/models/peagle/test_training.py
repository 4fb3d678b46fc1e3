"""A P-EAGLE draft in the training loop: sampling resumes where it stopped, and nothing of the verifier is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.formats.checkpoint import read_config
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models import FAMILIES
from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.family import VerifierShape
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from speculators.train.config import TrainConfig
from speculators.train.loop import TrainingTask, train
from speculators.train.metrics import read_metrics
from tests.train.tiny_training import LENGTHS, load, make_samples

SETTINGS = TrainConfig(
    row_length=64, learning_rate=2e-3, compute_dtype="float32", epochs=2, measure_every=100, checkpoint_every=2
)
FAMILY = FAMILIES["peagle"]


def make_task(directory: Path, seed: int, objective: Any = None, **options: Any) -> TrainingTask:
    shape = VerifierShape.from_config_dict(read_config(directory), str(directory))
    config = FAMILY.draft(num_layers=2, draft_vocab_size=None, **options).resolve(shape)
    weights = load_verifier_weights(directory)
    return TrainingTask(
        draft=Speculator.create(config, weights, seed=seed).draft,
        objective=objective or FAMILY.objective(num_depths=4),
        verifier_head=VerifierHead.from_weights(weights),
        samples=make_samples(load(directory), LENGTHS, config.aux_layer_ids),
    )


class Crashing(FAMILY.objective):
    """Fails in its fourth step."""

    def step(self, draft: Any, batch: PackedBatch, verifier_head: Any) -> StepOutput:
        calls.append(1)
        if len(calls) == 4:
            raise OSError("gone")
        return super().step(draft, batch, verifier_head)


calls: list[int] = []


def test_a_resumed_run_samples_the_same_elements(tiny_verifier: Path, tmp_path: Path) -> None:
    straight = make_task(tiny_verifier, 0)
    train(straight, SETTINGS, tmp_path / "straight")
    calls.clear()
    with pytest.raises(OSError, match="gone"):
        train(make_task(tiny_verifier, 0, Crashing(num_depths=4)), SETTINGS, tmp_path / "split")
    resumed = make_task(tiny_verifier, 7)
    torch.manual_seed(77)
    train(resumed, SETTINGS, tmp_path / "split")
    for (name, one), other in zip(
        straight.draft.state_dict().items(), resumed.draft.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
    lines = [list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("straight", "split")]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]


@pytest.mark.parametrize("options", [{}, {"hidden_size": 32}], ids=["same_width", "narrower"])
def test_all_that_is_the_drafts_own_is_trained_and_nothing_else(
    tiny_verifier: Path, tmp_path: Path, options: dict
) -> None:
    task = make_task(tiny_verifier, 0, **options)
    before = {name: tensor.clone() for name, tensor in task.draft.state_dict().items()}
    train(task, SETTINGS, tmp_path)
    moved = {name for name, tensor in task.draft.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == before.keys() - (set() if options else {"lm_head.weight"})
    if not options:
        weights = load_verifier_weights(tiny_verifier)
        assert torch.equal(before["embed_tokens.weight"], weights.embed_tokens)
        assert torch.equal(task.draft.state_dict()["lm_head.weight"], weights.lm_head)
