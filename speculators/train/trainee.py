"""The draft that one process trains, alone or with others, and what is done to all of its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch

from speculators.errors import TrainingError
from speculators.models.draft_model import DraftModel, Objective
from speculators.models.losses import VerifierHead
from speculators.train.averaging import AveragedWeights
from speculators.train.config import TrainConfig
from speculators.train.resume import trained_parameters
from speculators.train.sharding import whole
from speculators.train.workers import StepModule, Workers


class Trainee:
    """A draft on this process's device, whole or in parts; making one is a collective.

    `module` makes loss and counts of a batch. `parameters` are those that are trained, by name, `averages` their moving
    averages where the configuration wants them. Of a draft in parts the given one stays on the CPU, and is filled where
    a whole one is needed.
    """

    def __init__(
        self, draft: DraftModel, objective: Objective, head: VerifierHead, workers: Workers, config: TrainConfig
    ) -> None:
        self.draft = draft
        self._whole = draft
        self._workers = workers
        workers.equalise(draft)
        if workers.shards:
            self.draft = deepcopy(draft)
            self._whole.to("cpu")
        self.module = workers.wrap(StepModule(self.draft, objective, head))
        self.parameters = trained_parameters(self.draft)
        self.averages = None if config.ema_decay is None else AveragedWeights(self.parameters, config.ema_decay)

    def averaged(self) -> AbstractContextManager[None]:
        """The averages in place of the parameters, where there are averages."""
        if self.averages is None:
            return nullcontext()
        return self.averages.in_place(lambda: self._workers.forget_gathered(self.module))

    @contextmanager
    def whole_draft(self) -> Iterator[DraftModel]:
        """The draft with whole parameters, for use outside of training; a collective.

        TrainingError where they are no longer float32 afterwards.
        """
        draft = self.draft
        if self._workers.shards:
            self._assemble()
            draft = self._whole.eval()
        yield draft.to(self._workers.device) if self._workers.leads else draft
        # Masters that were cast even once have lost what distinguishes them from their bfloat16 rounding.
        for name, parameter in trained_parameters(draft).items():
            if parameter.dtype is not torch.float32:
                raise TrainingError(f"{name} is {parameter.dtype} after the measurement; it must use a copy to cast")
        if self._workers.shards:
            draft.to("cpu")

    @torch.no_grad()
    def _assemble(self) -> None:
        """Copy what is trained in parts into the whole draft, one tensor at a time."""
        for name, parameter in trained_parameters(self._whole).items():
            parameter.copy_(whole(self.parameters[name]))


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Matrix products in `dtype`."""
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype=dtype)
