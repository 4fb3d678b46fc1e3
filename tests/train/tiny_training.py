"""A tiny EAGLE-3 training task made of real parts: a random verifier's own states, a draft, and the serving loop."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from speculators.formats.checkpoint import read_config
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.formats.vocab import DraftVocab
from speculators.models import FAMILIES
from speculators.models.draft_model import PackedBatch, Sample, StepOutput
from speculators.models.family import VerifierShape
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from speculators.runtime.verifier import Verifier
from speculators.train.loop import TrainingTask

LENGTHS = (9, 21, 14, 30, 8, 17, 26, 11, 19, 23)
DRAFT_VOCAB = 96


@dataclass
class Samples:
    """Samples in memory."""

    samples: list[Sample]

    @property
    def lengths(self) -> list[int]:
        return [len(sample.input_ids) for sample in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


@cache
def load(directory: Path) -> Verifier:
    return Verifier.from_pretrained(directory, dtype="float32")


def make_samples(verifier: Verifier, lengths: Sequence[int], layers: list[int], *, seed: int = 0) -> Samples:
    """Random documents with the verifier's states in bfloat16; the first third of each is a prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, verifier.vocab_size, (length,), generator=generator) for length in lengths]
    states = verifier.capture([row.tolist() for row in rows], [*layers, verifier.num_layers])
    return Samples(
        [
            Sample(row, torch.arange(len(row)) >= len(row) // 3, state[:, :-1].bfloat16(), state[:, -1].bfloat16())
            for row, state in zip(rows, states, strict=True)
        ]
    )


def make_speculator(directory: Path, *, seed: int = 0) -> Speculator:
    """A fresh draft over a third of the vocabulary."""
    options: Any = FAMILIES["eagle3"].draft(draft_vocab_size=DRAFT_VOCAB)
    config = options.resolve(VerifierShape.from_config_dict(read_config(directory), str(directory)))
    vocab = DraftVocab.from_ids(range(0, 3 * DRAFT_VOCAB, 3), load(directory).vocab_size)
    return Speculator.create(config, load_verifier_weights(directory), vocab, seed=seed)


def make_task(directory: Path, *, seed: int = 0, lengths: Sequence[int] = LENGTHS, **parts: Any) -> TrainingTask:
    """A task on fresh draft weights; the same arguments give the same task."""
    speculator = make_speculator(directory, seed=seed)
    objective: Any = FAMILIES["eagle3"].objective()
    return TrainingTask(
        draft=speculator.draft,
        objective=objective,
        verifier_head=VerifierHead.from_weights(load_verifier_weights(directory)),
        samples=make_samples(load(directory), lengths, speculator.config.aux_layer_ids),
        **parts,
    )


def stop_at(step: int, signum: int, objective: Any, passes_per_step: int) -> Any:
    """The same objective, which sends this process a signal in the first pass of a step."""

    class Interrupting(type(objective)):
        def step(self, draft: Any, batch: PackedBatch, verifier_head: Any) -> StepOutput:
            calls.append(1)
            if len(calls) == (step - 1) * passes_per_step + 1:
                os.kill(os.getpid(), signum)
            return super().step(draft, batch, verifier_head)

    calls: list[int] = []
    return Interrupting(**objective.model_dump())
