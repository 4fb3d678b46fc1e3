"""The training loop. It knows no draft family: an objective makes a loss of a batch, and a measurement decodes."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import GeneralTracker
from accelerate.utils import set_seed
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from speculators.errors import TrainingError
from speculators.models.draft_model import DraftModel, Objective, SampleSource
from speculators.models.hardware import multiplies_bfloat16
from speculators.models.losses import VerifierHead
from speculators.models.memory import keep_freed_memory
from speculators.train.config import ComputeDtype, TrainConfig
from speculators.train.dataset import PackedRows, Passes
from speculators.train.faults import Suspects, blamed, where
from speculators.train.judging import Judge
from speculators.train.launching import launched_dtype
from speculators.train.metrics import MetricsLog, MetricSums, Throughput
from speculators.train.optim import build_optimizers, clip_gradients, learning_rate_at, set_learning_rate
from speculators.train.packing import pass_seed
from speculators.train.resume import (
    AVERAGES,
    PARAMETERS,
    Checkpoint,
    CheckpointFolder,
    RunState,
    fingerprint_lengths,
    load_parameters,
    trained_parameters,
)
from speculators.train.signals import SignalBox, Stopped, caught_signals
from speculators.train.speed import MFU, PARTS, Speed
from speculators.train.tracking import require_trackers, tracked, tracked_values
from speculators.train.trainee import Trainee, autocast
from speculators.train.workers import Workers


@dataclass
class TrainingTask:
    """What is trained, on what, and how it is judged.

    `measure` decodes with the draft as it is and returns its acceptance length. `settings` (JSON) is whatever else must
    be the same for a run to be resumed: the objective's knobs, the store's fingerprint. `trackers` of accelerate's
    interface are told what `metrics.jsonl` is told, beside those that the configuration names.
    """

    draft: DraftModel
    objective: Objective
    verifier_head: VerifierHead
    samples: SampleSource
    validation: SampleSource | None = None
    measure: Callable[[DraftModel], float] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    trackers: Sequence[GeneralTracker] = ()


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
    checkpoint by acceptance length (by loss where none was measured), in evaluation mode: their moving averages, where
    `config.ema_decay` asks for them. Raises TrainingError, UsageError for a tracker that is not installed, and
    `Stopped` after a signal, when the checkpoint is safe.

    Several processes (`torchrun`, `accelerate launch`) share every step: it is the same as that of one process with as
    many times the accumulation. They must see one folder, which the first of them writes. Where one of them dies, the
    others end within a minute, with its reason.
    """
    return TrainingRun(task, config, directory, show_progress).go()


def compute_dtype(name: ComputeDtype, device: torch.device) -> torch.dtype:
    """What matrix products run in; "auto" is bfloat16 where the hardware multiplies it, else float32."""
    if name != "auto":
        return torch.float32 if name == "float32" else torch.bfloat16
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


class TrainingRun:
    """One process's part of `train`: `parameters` are those that it trains, whole or split, by name."""

    def __init__(self, task: TrainingTask, config: TrainConfig, directory: Path, show_progress: bool) -> None:
        require_trackers(config.trackers)
        task.objective.require_possible(config.execution())
        self.task = task
        self.config = config
        self.directory = directory
        trackers = [*config.trackers, *task.trackers]
        self.workers = Workers(config.strategy, trackers=trackers, logging_directory=directory / "trackers")
        self.device = self.workers.device
        self.dtype = compute_dtype(launched_dtype(config, os.environ), self.device)
        set_seed(config.seed)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.checkpoints = self._checkpoint_folder()
        self.trainee = self._trainee()
        self.draft = self.trainee.draft
        self.parameters = self.trainee.parameters
        self.optimizers = build_optimizers(self.draft.named_parameters(), config, task.draft.vocabulary_tables())
        self.rows = PackedRows(task.samples, config.row_length, seed=config.seed, window=config.pack_window)
        self.judge = self._judge()
        epochs = [len(self._steps_of(epoch)) for epoch in range(config.epochs)]
        self.total_steps = min(sum(epochs), config.max_steps or sum(epochs))
        self.log = MetricsLog(directory / "metrics.jsonl")
        self.state = RunState()
        self.told_to_stop: int | None = None
        self.skipped_samples: list[int] = []
        self.overall = Throughput()
        self.recent = Throughput(warmup_steps=0)
        self.speed = Speed(self.device, self.dtype, counts_flops=config.count_flops)
        self.show_progress = show_progress and self.workers.leads

    def _checkpoint_folder(self) -> CheckpointFolder:
        settings = {
            "train": self.config.fixed_by_a_checkpoint(),
            "passes_per_step": self.config.accumulation * self.workers.size,
            "data": fingerprint_lengths(self.task.samples.lengths),
            "compute_dtype": str(self.dtype),
            **self.task.settings,
        }
        keep = {"keep_last": self.config.keep_last, "keep_best": self.config.keep_best}
        return CheckpointFolder(self.directory / "checkpoints", settings, **keep, writes=self.workers.leads)

    def _trainee(self) -> Trainee:
        head = self.task.verifier_head.to(self.device, self.dtype)
        draft = self.task.draft.to(self.device).train()
        draft.execute(self.config.execution())
        if not self.checkpoints.all():
            self.task.objective.begin(draft, self.task.samples, head)
        return Trainee(draft, self.task.objective, head, self.workers, self.config)

    def _judge(self) -> Judge:
        task, config, validation = self.task, self.config, None
        if task.validation is not None and len(task.validation):
            validation = PackedRows(task.validation, config.row_length, window=config.pack_window)
        return Judge(self.trainee, self.workers, config, task.objective, self.dtype, validation, task.measure)

    @property
    def averages(self) -> Mapping[str, Tensor] | None:
        """The parameters' moving averages, where the run keeps them."""
        return None if self.trainee.averages is None else self.trainee.averages.values

    def _steps_of(self, epoch: int) -> list[list[list[int]]]:
        return self.rows.steps(epoch, self.config.rows_per_step, self.config.accumulation * self.workers.size)

    def go(self) -> TrainResult:
        """Train to the end, or until a signal."""
        settings = self.config.model_dump(mode="json")
        with self.workers.watched(), tracked(self.workers.accelerator, self.directory.name, settings):
            self._train()
            return self._finish()

    def _train(self) -> None:
        self.state = self.checkpoints.load_newest(self.parameters, self.optimizers, self.averages) or RunState()
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

    def _epoch(self, signals: SignalBox, report: Callable[[str], None]) -> None:
        config, workers = self.config, self.workers
        shares = self.rows.dealt(
            self.state.epoch, config.rows_per_step, config.accumulation, workers.rank, workers.size
        )
        first = self.state.step_in_epoch
        ahead = shares[first : first + self.total_steps - self.state.step]
        for passes in self.rows.passes(self.state.epoch, ahead, self.device, prefetch=config.prefetch):
            epoch, learning_rate = self.state.epoch, learning_rate_at(config, self.state.step, self.total_steps)
            grad_norm = self._step(passes, signals, learning_rate)
            self.state.step_in_epoch += 1
            ended = self.state.step_in_epoch == len(shares)
            if ended:
                self.state.epoch, self.state.step_in_epoch = self.state.epoch + 1, 0
            measured = self._measure() if self._measures_now(ended) else {}
            line = self._log(epoch, learning_rate, grad_norm, measured)
            if line:
                report(_figures(line))
            if measured or self.told_to_stop or self.state.step % config.checkpoint_every == 0:
                self._save(measured)
            if self.told_to_stop:
                report("stopped; the same command goes on from here")
                raise Stopped(self.told_to_stop)

    def _step(self, passes: Passes, signals: SignalBox, learning_rate: float) -> float:
        """One optimizer step; returns the gradient norm before clipping."""
        started = time.perf_counter()
        self.speed.add("data", passes.waited)
        with self.speed.computing(sum(batch.num_tokens for batch in passes.batches)):
            mine, weight, finite = self._passes(passes)
        with self.speed.timed("optimizer"):
            told = self.workers.gather((mine.counts, weight, passes.num_tokens, signals.received))
            sums, weight = MetricSums.of(one[0] for one in told), sum(one[1] for one in told)
            tokens = sum(one[2] for one in told)
            self.told_to_stop = next((one[3] for one in told if one[3] is not None), None)
            for parameter in self.parameters.values():
                if parameter.grad is not None and weight:
                    # What several processes exchange is the mean over them.
                    parameter.grad.div_(weight / self.workers.size)
            grad_norm = clip_gradients(self.parameters.values(), self.config.clip_norm)
            if math.isfinite(grad_norm):
                self._update(learning_rate)
            else:
                self._skip(passes, finite)
                sums = MetricSums()
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
        for meter in (self.overall, self.recent):
            meter.add(tokens, time.perf_counter() - started)
        self.speed.end_step(passes.num_tokens)
        self.state.step += 1
        self.state.tokens += tokens
        self.state.unlogged.add(sums.counts)
        self.state.unmeasured.add(sums.counts)
        return grad_norm

    def _passes(self, passes: Passes) -> tuple[MetricSums, float, list[bool]]:
        """Gradients of this process's passes: their counts, what they weigh, and which of them have a finite loss."""
        mine, weight, finite = MetricSums(), 0.0, []
        for number, (rows, batch) in enumerate(zip(passes.rows, passes.batches, strict=True)):
            torch.manual_seed(pass_seed(self.config.seed, self.state.epoch, rows))
            with self.workers.passing(self.trainee.module, last=number == len(passes.rows) - 1):
                with autocast(self.device, self.dtype):
                    loss, metrics = self.trainee.module(batch)
                # Passes weigh by what they count, so that the step is the same however its rows are split into passes.
                count = metrics["loss"].count if number < passes.counting else 0.0
                (loss * count).backward()
            finite.append(bool(loss.isfinite()))
            # With it goes what its graph still has of the pass, before the next one is made.
            del loss
            if number < passes.counting:
                mine.add(metrics)
                weight += count
        return mine, weight, finite

    def _update(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizers, learning_rate)
        for optimizer in self.optimizers.values():
            optimizer.step()
        if self.trainee.averages is not None:
            self.trainee.averages.update(self.state.step - self.state.skipped)

    def _skip(self, passes: Passes, finite: Sequence[bool]) -> None:
        """Leave out a step, as often as is allowed; a collective."""
        self.state.skipped += 1
        samples, what = blamed(self.workers.gather(Suspects.among(passes.batches, finite)))
        self.skipped_samples += samples
        if self.state.skipped > self.config.max_skipped_steps:
            raise TrainingError(
                f"step {self.state.step + 1} has no finite gradient, the {self.state.skipped}th such step of this run; "
                f"its samples are {samples}{where(self.task.samples, samples)}, with {what}. Lower "
                "train.learning_rate, or look for broken states in these samples"
            )

    def _measures_now(self, epoch_ended: bool) -> bool:
        every = self.config.measure_every
        due = epoch_ended if every is None else self.state.step % every == 0
        return due or self.state.step == self.total_steps

    def _measure(self) -> dict[str, float | None]:
        training_loss = self.state.unmeasured.rate("loss")
        self.state.unmeasured = MetricSums()
        return self.judge.judge(training_loss)

    def _log(
        self, epoch: int, learning_rate: float, grad_norm: float, measured: Mapping[str, float | None]
    ) -> dict[str, Any]:
        """Write a line of the log where one is due, and return it; a collective then."""
        due = measured or self.state.step % self.config.log_every == 0 or self.state.step == self.total_steps
        if not due:
            return {}
        sums, speed = self.state.unlogged, self.workers.sum(self.speed.take()).counts
        line: dict[str, Any] = {
            "step": self.state.step,
            "loss": sums.rate("loss"),
            "epoch": epoch,
            "lr": learning_rate,
            "lr_norms": learning_rate * self.config.norm_rate,
            "lr_heads": learning_rate * self.config.head_rate,
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            "tokens": self.state.tokens,
            "tokens_per_second": self.recent.tokens_per_second,
            "seconds": {part: asdict(speed[part]) for part in PARTS},
            "mfu": asdict(speed[MFU]) if MFU in speed else None,
            "per_position": [asdict(count) for count in sums.per_position()],
            "expected_acceptance_length": self.task.objective.acceptance_length(sums.counts) if sums.counts else None,
            "measured_acceptance_length": None,
            **{key: value for key, value in measured.items() if not key.startswith("score_")},
        }
        if self.skipped_samples:
            line["skipped_samples"] = self.skipped_samples
        if measurements := self.draft.loss_choice.news():
            line["losses_measured"] = [asdict(one) for one in measurements]
        if self.workers.leads:
            self.log.write(line)
            self.workers.accelerator.log(tracked_values(line), step=self.state.step)
        self.state.unlogged, self.skipped_samples = MetricSums(), []
        self.recent = Throughput(warmup_steps=0)
        return line

    def _save(self, measured: Mapping[str, float | None]) -> None:
        scores = {name: measured.get(f"score_{name}") for name in ("acceptance", "loss")}
        scores["measured"] = measured.get("measured_acceptance_length")
        self.checkpoints.save(self.state, self.parameters, self.optimizers, scores, self.averages)

    def _finish(self) -> TrainResult:
        self.workers.wait()
        best = self.checkpoints.best("acceptance") or self.checkpoints.best("loss") or self.checkpoints.all()[-1:]
        file = PARAMETERS if self.averages is None else AVERAGES
        load_parameters(best[0], trained_parameters(self.task.draft), file)
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
