"""The processes that train one draft together, and what they tell each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import InitProcessGroupKwargs, gather_object
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from speculators.models.draft_model import DraftModel, Objective, PackedBatch
from speculators.models.family import Count
from speculators.models.losses import VerifierHead
from speculators.models.supervision import zero_loss
from speculators.train.config import Strategy
from speculators.train.launching import launched_strategy, require_honoured
from speculators.train.liveness import Watch, open_store
from speculators.train.metrics import MetricSums
from speculators.train.resume import trained_parameters
from speculators.train.sharding import shard

Told = TypeVar("Told")
# The first process decodes and saves while the others wait; one that died is noticed by the watch, not by this.
_PATIENCE = timedelta(hours=2)


class StepModule(nn.Module):
    """A draft and its objective's step as one module, so that whatever wraps it sees every use of a parameter.

    `head_weight` is the weight of the verifier's head where that is a parameter, too (see `hold_head`).
    """

    head_weight: nn.Parameter | None

    def __init__(self, draft: DraftModel, objective: Objective, verifier_head: VerifierHead) -> None:
        super().__init__()
        self.draft = draft
        self.register_parameter("head_weight", None)
        self._step, self._head = objective.step, verifier_head

    def hold_head(self) -> None:
        """Make the verifier's head a frozen parameter, for whatever splits parameters to split it as well."""
        self.head_weight = nn.Parameter(self._head.head.weight, requires_grad=False)
        self._head = self._head.with_weight(self.head_weight.to("meta"))

    def forward(self, batch: PackedBatch) -> tuple[torch.Tensor, Mapping[str, Count]]:
        """Loss and counts of one batch."""
        head = self._head if self.head_weight is None else self._head.with_weight(self.head_weight)
        output = self._step(self.draft, batch, head)
        if output.metrics["loss"].count:
            return output.loss, output.metrics
        # Nothing counts; processes exchange gradients of every parameter all the same.
        return zero_loss(self.draft), output.metrics


class Workers:
    """This process and the others of its run; alone, it talks to nobody.

    `strategy` says how a draft and its verifier's head lie on them: whole on each ("ddp"), or split ("fsdp2"); "auto"
    is what the configuration of `accelerate launch` says, else whole. UsageError for one that cannot be honoured.
    `trackers` are accelerate's, by name or made already; those that write files do it below `logging_directory`.
    """

    def __init__(
        self,
        strategy: Strategy = "auto",
        environment: Mapping[str, str] = os.environ,
        *,
        trackers: Sequence[str | GeneralTracker] = (),
        logging_directory: Path | None = None,
    ) -> None:
        require_honoured(environment)
        self.accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),
            mixed_precision="no",
            log_with=list(trackers) or None,
            project_dir=logging_directory,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)],
        )
        self.rank: int = self.accelerator.process_index
        self.size: int = self.accelerator.num_processes
        self.device: torch.device = self.accelerator.device
        self.shards = self.size > 1 and launched_strategy(strategy, environment) == "fsdp2"

    @property
    def leads(self) -> bool:
        """Whether this is the process that decodes, logs and writes."""
        return self.rank == 0

    def gather(self, value: Told) -> list[Told]:
        """What every process tells, by rank; a collective."""
        return [value] if self.size == 1 else cast(list[Told], gather_object([value]))

    def sum(self, mine: MetricSums) -> MetricSums:
        """The counts of all processes; a collective."""
        return MetricSums.of(self.gather(mine.counts))

    def wait(self) -> None:
        """Wait until every process is here; a collective."""
        self.accelerator.wait_for_everyone()

    @torch.no_grad()
    def equalise(self, module: nn.Module) -> None:
        """Give every process the first one's trainable parameters; a collective."""
        if self.size > 1:
            for parameter in trained_parameters(module).values():
                torch.distributed.broadcast(parameter.data, src=0)

    def wrap(self, module: StepModule) -> nn.Module:
        """The module with gradients that are averaged over all processes; a collective."""
        if self.shards:
            module.hold_head()
            return cast(nn.Module, shard(module, self.device, self.size))
        if self.size == 1:
            return module
        # No buffer changes, and some are of types that not every backend can send.
        buffers = [name for name, _ in module.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, buffers)
        return DistributedDataParallel(module, device_ids=None if self.device.type == "cpu" else [self.device.index])

    def watched(self) -> AbstractContextManager[object]:
        """As long as this lasts, a process that dies ends the others too, with its reason; a collective."""
        if self.size == 1:
            return nullcontext()
        self.wait()
        return Watch(open_store(), self.rank, self.size)

    def forget_gathered(self, wrapped: nn.Module) -> None:
        """Drop the whole parameters that a split module may have kept of its last pass."""
        if isinstance(wrapped, FSDPModule):
            wrapped.reshard()

    @contextmanager
    def passing(self, wrapped: nn.Module, *, last: bool) -> Iterator[None]:
        """Around a forward and backward pass: processes exchange gradients in the `last` one of a step alone."""
        waiting: AbstractContextManager[Any] = nullcontext()
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(last)
        elif isinstance(wrapped, DistributedDataParallel) and not last:
            waiting = wrapped.no_sync()
        with waiting:
            yield
