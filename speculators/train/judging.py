"""How good a draft is while it is trained: its held-out loss, and the acceptance length that serving would see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from speculators.models.draft_model import DraftModel, Objective
from speculators.train.config import TrainConfig
from speculators.train.dataset import PackedRows
from speculators.train.metrics import MetricSums
from speculators.train.packing import pass_seed
from speculators.train.resume import capture_rng, restore_rng
from speculators.train.trainee import Trainee, autocast
from speculators.train.workers import Workers


@dataclass(frozen=True)
class Judge:
    """Judges the averages of the weights where there are such, else the weights; `dtype` computes."""

    trainee: Trainee
    workers: Workers
    config: TrainConfig
    objective: Objective
    dtype: torch.dtype
    validation: PackedRows | None
    measure: Callable[[DraftModel], float] | None

    def judge(self, training_loss: float | None) -> dict[str, float | None]:
        """Held-out loss and acceptance length of the draft as it is, and the scores that choose a checkpoint.

        `training_loss` is the score where nothing is held back. Random generators are left as they were; a collective.
        """
        found: dict[str, float | None] = {"score_loss": training_loss}
        generators = capture_rng()
        self.trainee.draft.eval()
        with self.trainee.averaged():
            if self.validation is not None:
                sums = self._validate(self.validation)
                # No backward pass has split them again, and decoding wants the memory.
                self.workers.forget_gathered(self.trainee.module)
                found["validation_loss"] = found["score_loss"] = sums.rate("loss")
                found["validation_acceptance_length"] = self.objective.acceptance_length(sums.counts)
                found["score_acceptance"] = found["validation_acceptance_length"]
            if self.measure is not None:
                found["measured_acceptance_length"] = found["score_acceptance"] = self._decode(self.measure)
        self.trainee.draft.train()
        restore_rng(generators)
        return found

    def _decode(self, measure: Callable[[DraftModel], float]) -> float:
        """The acceptance length that the first process measures, with a whole draft."""
        with self.trainee.whole_draft() as draft:
            length = measure(draft) if self.workers.leads else None
        return next(found for found in self.workers.gather(length) if found is not None)

    @torch.no_grad()
    def _validate(self, rows: PackedRows) -> MetricSums:
        """Every process makes as many passes, whatever number of rows there is: each pass may be a collective."""
        config, workers = self.config, self.workers
        steps = rows.dealt(0, config.rows_per_step, 1, workers.rank, workers.size)
        mine = MetricSums()
        for passes in rows.passes(0, steps, workers.device, prefetch=config.prefetch):
            torch.manual_seed(pass_seed(config.seed, "validation", passes.rows[0]))
            with autocast(workers.device, self.dtype):
                _, metrics = self.trainee.module(passes.batches[0])
            if passes.counting:
                mine.add(metrics)
        return workers.sum(mine)
