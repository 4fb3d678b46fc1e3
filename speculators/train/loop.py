"""The training loop. It knows no draft family: an objective makes a loss of a batch, and a measurement decodes."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from speculators.errors import TrainingError
from speculators.models.draft_model import DraftModel, Objective, PackedBatch, SampleSource
from speculators.models.hardware import multiplies_bfloat16
from speculators.models.losses import VerifierHead
from speculators.models.memory import keep_freed_memory
from speculators.train.config import ComputeDtype, TrainConfig
from speculators.train.dataset import PackedRows
from speculators.train.launching import launched_dtype
from speculators.train.metrics import MetricsLog, MetricSums, Throughput
from speculators.train.optim import build_optimizers, clip_gradients, learning_rate_at, set_learning_rate
from speculators.train.packing import deal, pass_seed
from speculators.train.resume import (
    Checkpoint,
    CheckpointFolder,
    RunState,
    capture_rng,
    fingerprint_lengths,
    load_parameters,
    restore_rng,
    trained_parameters,
)
from speculators.train.sharding import whole
from speculators.train.signals import SignalBox, Stopped, caught_signals
from speculators.train.workers import StepModule, Workers


@dataclass
class TrainingTask:
    """What is trained, on what, and how it is judged.

    `measure` decodes with the draft as it is and returns its acceptance length. `settings` (JSON) is whatever else must
    be the same for a run to be resumed: the objective's knobs, the store's fingerprint.
    """

    draft: DraftModel
    objective: Objective
    verifier_head: VerifierHead
    samples: SampleSource
    validation: SampleSource | None = None
    measure: Callable[[DraftModel], float] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainResult:
    """How a run ended; the draft holds the parameters of `chosen`.

    `steps` of the optimizer, `tokens` that were trained on (padding not counted), `tokens_per_second` after the warm-up
    of this process (None where it trained too few steps to tell), `utilisation` the share of filled positions in the
    rows of the first epoch.
    """

    steps: int
    tokens: int
    tokens_per_second: float | None
    utilisation: float
    chosen: Checkpoint


def train(task: TrainingTask, config: TrainConfig, directory: Path, *, show_progress: bool = False) -> TrainResult:
    """Train a draft, or go on with the run whose checkpoints lie in `directory`.

    Writes `directory/checkpoints/` and `directory/metrics.jsonl`. In the end the draft holds the parameters of the best
    checkpoint by acceptance length (by loss where none was measured), in evaluation mode. Raises TrainingError, and
    `Stopped` after a signal, when the checkpoint is safe.

    Several processes (`torchrun`, `accelerate launch`) share every step: it is the same as that of one process with as
    many times the accumulation. They must see one folder, which the first of them writes.
    """
    return TrainingRun(task, config, directory, show_progress).go()


def compute_dtype(name: ComputeDtype, device: torch.device) -> torch.dtype:
    """What matrix products run in; "auto" is bfloat16 where the hardware multiplies it, else float32."""
    if name != "auto":
        return torch.float32 if name == "float32" else torch.bfloat16
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


@dataclass(frozen=True)
class _Passes:
    """This process's forward passes of a step: the numbers of their rows, the rows, and how many of them count."""

    rows: list[list[int]]
    batches: list[PackedBatch]
    counting: int


class TrainingRun:
    """One process's part of `train`: `parameters` are those that it trains, whole or split, by name."""

    def __init__(self, task: TrainingTask, config: TrainConfig, directory: Path, show_progress: bool) -> None:
        self.task = task
        self.config = config
        self.workers = Workers(config.strategy)
        self.device = self.workers.device
        self.dtype = compute_dtype(launched_dtype(config, os.environ), self.device)
        set_seed(config.seed)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.head = task.verifier_head.to(self.device, self.dtype)
        self.checkpoints = self._checkpoint_folder(directory)
        self.draft = self._prepared_draft()
        self.parameters = trained_parameters(self.draft)
        self.optimizers = build_optimizers(self.draft.named_parameters(), config, task.draft.vocabulary_tables())
        self.rows = PackedRows(task.samples, config.row_length, seed=config.seed, window=config.pack_window)
        self.validation: PackedRows | None = None
        if task.validation is not None and len(task.validation):
            self.validation = PackedRows(task.validation, config.row_length, window=config.pack_window)
        epochs = [len(self._steps_of(epoch)) for epoch in range(config.epochs)]
        self.total_steps = min(sum(epochs), config.max_steps or sum(epochs))
        self.log = MetricsLog(directory / "metrics.jsonl")
        self.state = RunState()
        self.told_to_stop: int | None = None
        self.overall = Throughput()
        self.recent = Throughput(warmup_steps=0)
        self.show_progress = show_progress and self.workers.leads

    def _checkpoint_folder(self, directory: Path) -> CheckpointFolder:
        settings = {
            "train": self.config.fixed_by_a_checkpoint(),
            "passes_per_step": self.config.accumulation * self.workers.size,
            "data": fingerprint_lengths(self.task.samples.lengths),
            "compute_dtype": str(self.dtype),
            **self.task.settings,
        }
        keep = {"keep_last": self.config.keep_last, "keep_best": self.config.keep_best}
        return CheckpointFolder(directory / "checkpoints", settings, **keep, writes=self.workers.leads)

    def _prepared_draft(self) -> DraftModel:
        """The draft that is trained: the task's own, or a copy of it that is split over the processes."""
        draft = self.task.draft.to(self.device).train()
        draft.execute(self.config.execution())
        if not self.checkpoints.all():
            self.task.objective.begin(draft, self.task.samples, self.head)
        self.workers.equalise(draft)
        if self.workers.shards:
            draft = deepcopy(draft)
            self.task.draft.to("cpu")
        self.module = self.workers.wrap(StepModule(draft, self.task.objective, self.head))
        return draft

    def _steps_of(self, epoch: int) -> list[list[list[int]]]:
        return self.rows.steps(epoch, self.config.rows_per_step, self.config.accumulation * self.workers.size)

    def go(self) -> TrainResult:
        """Train to the end, or until a signal."""
        self.state = self.checkpoints.load_newest(self.parameters, self.optimizers) or RunState()
        if self.workers.leads:
            self.log.forget_after(self.state.step)
        self.workers.wait()
        progress = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not self.show_progress,
        )
        with caught_signals() as signals, progress:
            bar = progress.add_task("train", total=self.total_steps, completed=self.state.step, figures="")
            while self.state.step < self.total_steps:
                self._epoch(signals, lambda text: progress.update(bar, completed=self.state.step, figures=text))
        return self._finish()

    def _epoch(self, signals: SignalBox, report: Callable[[str], None]) -> None:
        steps = self._steps_of(self.state.epoch)
        first = self.state.step_in_epoch
        ahead = steps[first : first + self.total_steps - self.state.step]
        for passes in self._dealt(self.rows, self.state.epoch, ahead):
            epoch, learning_rate = self.state.epoch, learning_rate_at(self.config, self.state.step, self.total_steps)
            grad_norm = self._step(passes, signals, learning_rate)
            self.state.step_in_epoch += 1
            ended = self.state.step_in_epoch == len(steps)
            if ended:
                self.state.epoch, self.state.step_in_epoch = self.state.epoch + 1, 0
            measured = self._measure() if self._measures_now(ended) else {}
            line = self._log({"epoch": epoch, "lr": learning_rate, "grad_norm": grad_norm}, measured)
            if line:
                report(_figures(line))
            if measured or self.told_to_stop or self.state.step % self.config.checkpoint_every == 0:
                self._save(measured)
            if self.told_to_stop:
                report("stopped; the same command goes on from here")
                raise Stopped(self.told_to_stop)

    def _dealt(self, rows: PackedRows, epoch: int, steps: Sequence[Sequence[list[int]]]) -> Iterator[_Passes]:
        """This process's passes of each step."""
        dealt = [deal(passes, self.workers.rank, self.workers.size) for passes in steps]
        loaded = rows.step_batches(epoch, [mine for mine, _ in dealt], self.device, prefetch=self.config.prefetch)
        for (mine, counting), batches in zip(dealt, loaded, strict=True):
            yield _Passes(mine, batches, counting)

    def _step(self, passes: _Passes, signals: SignalBox, learning_rate: float) -> float:
        """One optimizer step; returns the gradient norm before clipping."""
        started = time.perf_counter()
        mine, weight = MetricSums(), 0.0
        for number, (rows, batch) in enumerate(zip(passes.rows, passes.batches, strict=True)):
            torch.manual_seed(pass_seed(self.config.seed, self.state.epoch, rows))
            with self.workers.passing(self.module, last=number == len(passes.rows) - 1):
                with self._autocast():
                    loss, metrics = self.module(batch)
                # Passes weigh by what they count, so that the step is the same however its rows are split into passes.
                count = metrics["loss"].count if number < passes.counting else 0.0
                (loss * count).backward()
            if number < passes.counting:
                mine.add(metrics)
                weight += count
        tokens = sum(batch.num_tokens for batch in passes.batches[: passes.counting])
        told = self.workers.gather((mine.counts, weight, tokens, signals.received))
        sums, weight, tokens = MetricSums(), sum(one[1] for one in told), sum(one[2] for one in told)
        for counts, *_ in told:
            sums.add(counts)
        self.told_to_stop = next((one[3] for one in told if one[3] is not None), None)
        for parameter in self.parameters.values():
            if parameter.grad is not None and weight:
                # What several processes exchange is the mean over them.
                parameter.grad.div_(weight / self.workers.size)
        grad_norm = clip_gradients(self.parameters.values(), self.config.clip_norm)
        if math.isfinite(grad_norm):
            set_learning_rate(self.optimizers, learning_rate)
            for optimizer in self.optimizers.values():
                optimizer.step()
        else:
            self._skip(passes.batches)
            sums = MetricSums()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        for meter in (self.overall, self.recent):
            meter.add(tokens, time.perf_counter() - started)
        self.state.step += 1
        self.state.tokens += tokens
        self.state.unlogged.add(sums.counts)
        self.state.unmeasured.add(sums.counts)
        return grad_norm

    def _skip(self, batches: Sequence[PackedBatch]) -> None:
        self.state.skipped += 1
        if self.state.skipped > self.config.max_skipped_steps:
            mine = {number for batch in batches for number in batch.document_ids.flatten().tolist()}
            documents = sorted(set().union(*self.workers.gather(mine)) - {-1})
            raise TrainingError(
                f"step {self.state.step + 1} has no finite gradient, the {self.state.skipped}th such step of this run; "
                f"its samples are {documents}. Lower train.learning_rate, or look for broken states in these samples"
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _measures_now(self, epoch_ended: bool) -> bool:
        every = self.config.measure_every
        due = epoch_ended if every is None else self.state.step % every == 0
        return due or self.state.step == self.total_steps

    def _measure(self) -> dict[str, float | None]:
        """Held-out loss and acceptance length of the draft as it is; leaves the random generators as they were."""
        found: dict[str, float | None] = {"score_loss": self.state.unmeasured.rate("loss")}
        self.state.unmeasured = MetricSums()
        generators = capture_rng()
        self.draft.eval()
        if self.validation is not None:
            sums = self._validate(self.validation)
            found["validation_loss"] = found["score_loss"] = sums.rate("loss")
            found["validation_acceptance_length"] = self.task.objective.acceptance_length(sums.counts)
            found["score_acceptance"] = found["validation_acceptance_length"]
        if self.task.measure is not None:
            found["measured_acceptance_length"] = found["score_acceptance"] = self._decode(self.task.measure)
        self.draft.train()
        restore_rng(generators)
        return found

    def _decode(self, measure: Callable[[DraftModel], float]) -> float:
        """The acceptance length that the first process measures, with a whole draft."""
        draft = self.draft
        if self.workers.shards:
            self._assemble()
            draft = self.task.draft.eval()
        length = None
        if self.workers.leads:
            length = measure(draft.to(self.device))
            # Masters that were cast even once have lost what distinguishes them from their bfloat16 rounding.
            for name, parameter in trained_parameters(draft).items():
                if parameter.dtype is not torch.float32:
                    raise TrainingError(
                        f"{name} is {parameter.dtype} after the measurement; it must use a copy to cast"
                    )
        if self.workers.shards:
            draft.to("cpu")
        return next(found for found in self.workers.gather(length) if found is not None)

    @torch.no_grad()
    def _assemble(self) -> None:
        """Copy what is trained in parts into the task's draft, one tensor at a time."""
        for name, parameter in trained_parameters(self.task.draft).items():
            parameter.copy_(whole(self.parameters[name]))

    @torch.no_grad()
    def _validate(self, rows: PackedRows) -> MetricSums:
        mine = MetricSums()
        steps = rows.steps(0, self.config.rows_per_step, self.workers.size)
        for passes in self._dealt(rows, 0, steps):
            torch.manual_seed(pass_seed(self.config.seed, "validation", passes.rows[0]))
            with self._autocast():
                _, metrics = self.module(passes.batches[0])
            if passes.counting:
                mine.add(metrics)
        sums = MetricSums()
        for counts in self.workers.gather(mine.counts):
            sums.add(counts)
        return sums

    def _log(self, step: Mapping[str, Any], measured: Mapping[str, float | None]) -> dict[str, Any]:
        """Write a line of the log where one is due, and return it."""
        due = measured or self.state.step % self.config.log_every == 0 or self.state.step == self.total_steps
        if not due:
            return {}
        sums = self.state.unlogged
        line = {
            "step": self.state.step,
            "loss": sums.rate("loss"),
            **step,
            "tokens": self.state.tokens,
            "tokens_per_second": self.recent.tokens_per_second,
            "per_position": [asdict(count) for count in sums.per_position()],
            "expected_acceptance_length": self.task.objective.acceptance_length(sums.counts) if sums.counts else None,
            "measured_acceptance_length": None,
            **{key: value for key, value in measured.items() if not key.startswith("score_")},
        }
        if not math.isfinite(line["grad_norm"]):
            line["grad_norm"] = None
        if self.workers.leads:
            self.log.write(line)
        self.state.unlogged = MetricSums()
        self.recent = Throughput(warmup_steps=0)
        return line

    def _save(self, measured: Mapping[str, float | None]) -> None:
        scores = {name: measured.get(f"score_{name}") for name in ("acceptance", "loss")}
        scores["measured"] = measured.get("measured_acceptance_length")
        self.checkpoints.save(self.state, self.parameters, self.optimizers, scores)

    def _finish(self) -> TrainResult:
        self.workers.wait()
        best = self.checkpoints.best("acceptance") or self.checkpoints.best("loss") or self.checkpoints.all()[-1:]
        load_parameters(best[0], trained_parameters(self.task.draft))
        self.task.draft.eval()
        return TrainResult(
            steps=self.state.step,
            tokens=self.state.tokens,
            tokens_per_second=self.overall.tokens_per_second,
            utilisation=self.rows.plan(0).utilisation,
            chosen=best[0],
        )


def _figures(line: Mapping[str, Any]) -> str:
    parts = []
    if line["loss"] is not None:
        parts.append(f"loss {line['loss']:.3f}")
    if line["tokens_per_second"] is not None:
        parts.append(f"{line['tokens_per_second']:,.0f} tokens/s")
    if line["measured_acceptance_length"] is not None:
        parts.append(f"acceptance length {line['measured_acceptance_length']:.2f}")
    return ", ".join(parts)
