"""Training checkpoints: everything a run needs to go on to the bit, written whole or not at all.

A checkpoint is a folder `step-N` with the trained parameters (`parameters.safetensors`, float32), the optimizers'
moments (`optimizer.pt`), the random generators (`rng.pt`) and the counters, scores and settings (`state.json`); where
the run averages its weights, with the averages as well (`averages.safetensors`, float32).
`best-acceptance` and `best-loss` are links to the best ones kept.
"""

import hashlib
import json
import os
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from speculators.errors import TrainingError
from speculators.formats.files import flush, flush_folder
from speculators.train.metrics import MetricSums
from speculators.train.sharding import load_whole_state, part_like, whole, whole_state

WRITTEN_BY = "speculators training checkpoint, version 1"
PARAMETERS, AVERAGES = "parameters.safetensors", "averages.safetensors"
FILES = (PARAMETERS, "optimizer.pt", "rng.pt", "state.json")
STEP_FOLDER = re.compile(r"step-(\d+)")
TEMPORARY_FOLDER = re.compile(r"\.step-\d+\.\w+\.tmp")

Score = Literal["acceptance", "loss"]


@dataclass
class RunState:
    """Where a run is, in numbers.

    `step` counts optimizer steps, `epoch` and `step_in_epoch` the place in the data, `skipped` the steps left out for
    want of a finite gradient. `unlogged` and `unmeasured` are metric sums since the last line of the log and since the
    last measurement.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    tokens: int = 0
    skipped: int = 0
    unlogged: MetricSums = field(default_factory=MetricSums)
    unmeasured: MetricSums = field(default_factory=MetricSums)

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return {**vars(self), "unlogged": self.unlogged.to_json(), "unmeasured": self.unmeasured.to_json()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "RunState":
        """What `to_json` gave."""
        sums = {key: MetricSums(found[key]) for key in ("unlogged", "unmeasured")}
        return cls(**{**found, **sums})


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, its step, and how it was scored (None: not scored at that step)."""

    path: Path
    step: int
    scores: Mapping[str, float | None]


def capture_rng() -> dict[str, Any]:
    """The state of Python's and torch's generators, of the accelerator's too."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put back what `capture_rng` took."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


class CheckpointFolder:
    """The checkpoints of one run.

    `settings` is what a resumed run must have in common with the one that it continues. Only folders that this class
    wrote are read, and only files that it wrote are ever removed. Of several processes one `writes`; the others give
    their parts of what is split.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, Any],
        *,
        keep_last: int = 1,
        keep_best: int = 1,
        writes: bool = True,
    ) -> None:
        self.directory = directory
        self.settings = json.loads(json.dumps(settings))
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._writes = writes

    def all(self) -> list[Checkpoint]:
        """Complete checkpoints, by step."""
        found = []
        for path in self.directory.glob("step-*") if self.directory.exists() else ():
            state = _read_state(path)
            if state is not None and all((path / name).is_file() for name in FILES):
                found.append(Checkpoint(path, state["run"]["step"], state["scores"]))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def best(self, score: Score, count: int = 1) -> list[Checkpoint]:
        """The `count` best scored checkpoints, best first; of equals the later one. Acceptance: higher, loss: lower."""
        sign = 1 if score == "acceptance" else -1
        scored = [(value, found) for found in self.all() if (value := found.scores.get(score)) is not None]
        scored.sort(key=lambda pair: (sign * pair[0], pair[1].step), reverse=True)
        return [found for _, found in scored[:count]]

    def save(
        self,
        state: RunState,
        parameters: Mapping[str, Tensor],
        optimizers: Mapping[str, Optimizer],
        scores: Mapping[str, float | None],
        averages: Mapping[str, Tensor] | None = None,
    ) -> Checkpoint:
        """Write one checkpoint under a temporary name, rename it, then remove what need not be kept; a collective.

        `averages` of the parameters are kept beside them. TrainingError where it cannot be written (a full disk); what
        was there before stays as it was.
        """
        target = self.directory / f"step-{state.step}"
        tensors = {PARAMETERS: _whole_on_cpu(parameters)}
        if averages is not None:
            tensors[AVERAGES] = _whole_on_cpu(averages)
        moments = {name: whole_state(optimizer) for name, optimizer in optimizers.items()}
        if not self._writes:
            return Checkpoint(target, state.step, dict(scores))
        document = {"written_by": WRITTEN_BY, "settings": self.settings, "scores": dict(scores), "run": state.to_json()}
        temporary: Path | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".step-{state.step}.", suffix=".tmp", dir=self.directory))
            for name, contents in tensors.items():
                save_file(contents, temporary / name)
            torch.save(moments, temporary / "optimizer.pt")
            torch.save(capture_rng(), temporary / "rng.pt")
            (temporary / "state.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            for name in {*FILES, *tensors}:
                flush(temporary / name)
            if _read_state(target) is not None:
                _remove(target)
            os.replace(temporary, target)
            flush_folder(self.directory)
        except (OSError, SafetensorError, RuntimeError) as error:
            if temporary is not None:
                _remove(temporary)
            raise TrainingError(
                f"checkpoint {target} cannot be written: {error}. Earlier checkpoints are untouched; make room and run "
                "again to go on from the newest one"
            ) from error
        self._rotate()
        return Checkpoint(target, state.step, dict(scores))

    def load_newest(
        self,
        parameters: Mapping[str, Tensor],
        optimizers: Mapping[str, Optimizer],
        averages: Mapping[str, Tensor] | None = None,
    ) -> RunState | None:
        """Put the newest complete checkpoint into parameters, their averages, optimizers and random generators.

        None where there is no checkpoint. TrainingError where it was made with other settings or does not fit.
        """
        checkpoints = self.all()
        if self._writes:
            self._tidy({checkpoint.path for checkpoint in checkpoints})
        if not checkpoints:
            return None
        newest = checkpoints[-1]
        document = _read_state(newest.path)
        assert document is not None
        self._check_settings(newest, document["settings"])
        load_parameters(newest, parameters)
        if averages is not None:
            load_parameters(newest, averages, AVERAGES)
        try:
            moments = torch.load(newest.path / "optimizer.pt", map_location="cpu", weights_only=True)
            generators = torch.load(newest.path / "rng.pt", map_location="cpu", weights_only=True)
        except (OSError, RuntimeError) as error:
            raise TrainingError(
                f"checkpoint {newest.path} is damaged: {error}; remove it to use an earlier one"
            ) from error
        if sorted(moments) != sorted(optimizers):
            raise TrainingError(f"{newest.path} holds optimizers {sorted(moments)}, expected {sorted(optimizers)}")
        for name, optimizer in optimizers.items():
            load_whole_state(optimizer, moments[name])
        restore_rng(generators)
        return RunState.from_json(document["run"])

    def _tidy(self, complete: set[Path]) -> None:
        """Finish what an interrupted save or removal left behind."""
        for path in self.directory.iterdir() if self.directory.exists() else ():
            if TEMPORARY_FOLDER.fullmatch(path.name) or (path not in complete and _read_state(path) is not None):
                _remove(path)

    def _check_settings(self, checkpoint: Checkpoint, before: Mapping[str, Any]) -> None:
        changed = []
        for key in sorted({*before, *self.settings}):
            was, now = _differing(before.get(key), self.settings.get(key))
            if was != now:
                changed.append(f"{key} was {_short(was)} and is {_short(now)}")
        if changed:
            raise TrainingError(
                f"{checkpoint.path} was made with other settings: {'; '.join(changed)}. Train into another folder, or "
                f"remove {self.directory} to begin anew"
            )

    def _rotate(self) -> None:
        checkpoints = self.all()
        best = {score: self.best(score, self._keep_best) for score in ("acceptance", "loss")}
        kept = {checkpoint.step for checkpoint in checkpoints[-self._keep_last :]}
        kept |= {checkpoint.step for ranked in best.values() for checkpoint in ranked}
        for score, ranked in best.items():
            if ranked:
                _link(self.directory / f"best-{score}", ranked[0].path.name)
        for checkpoint in checkpoints:
            if checkpoint.step not in kept:
                _remove(checkpoint.path)


def load_parameters(checkpoint: Checkpoint, parameters: Mapping[str, Tensor], file: str = PARAMETERS) -> None:
    """Copy a checkpoint's parameters, or their averages, into those of a draft; TrainingError names what does not fit.

    `file` is PARAMETERS or AVERAGES.
    """
    path = checkpoint.path / file
    try:
        with safe_open(path, framework="pt") as stored:
            names = sorted(stored.keys())
        if names != sorted(parameters):
            raise TrainingError(f"{path} holds {names}, the draft trains {sorted(parameters)}")
        for name, parameter in parameters.items():
            # Opened anew for each: a mapping keeps what was read through it in memory.
            with safe_open(path, framework="pt") as stored:
                _load_parameter(path, name, stored.get_tensor(name), parameter)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise TrainingError(f"{path} is damaged: {error}; remove {checkpoint.path} to use an earlier one") from error


@torch.no_grad()
def _load_parameter(path: Path, name: str, saved: Tensor, parameter: Tensor) -> None:
    if saved.shape != parameter.shape or saved.dtype is not torch.float32:
        raise TrainingError(
            f"{path}: {name} is {saved.dtype} {list(saved.shape)}, expected float32 {list(parameter.shape)}"
        )
    parameter.copy_(part_like(saved, parameter))


def _whole_on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole(value.detach()).to("cpu").contiguous() for name, value in tensors.items()}


def trained_parameters(draft: nn.Module) -> dict[str, Tensor]:
    """A draft's trainable parameters by name."""
    return {name: parameter for name, parameter in draft.named_parameters() if parameter.requires_grad}


def fingerprint_lengths(lengths: Sequence[int]) -> dict[str, object]:
    """What tells one set of samples from another cheaply: how many, how long, and in which order."""
    digest = hashlib.sha256(",".join(map(str, lengths)).encode()).hexdigest()
    return {"samples": len(lengths), "tokens": sum(lengths), "lengths_sha256": digest}


def _read_state(path: Path) -> dict[str, Any] | None:
    """The state of a folder of ours, complete or not; None for any other folder."""
    if path.is_symlink() or not STEP_FOLDER.fullmatch(path.name):
        return None
    try:
        state: Any = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(state, dict) and state.get("written_by") == WRITTEN_BY
    return state if ours else None


def _remove(folder: Path) -> None:
    """Remove our files from a folder, and the folder where nothing else is in it."""
    if folder.is_symlink() or not folder.is_dir():
        return
    # The state goes last: as long as it is there, a later run knows the folder as ours and finishes the removal.
    for name in (AVERAGES, *FILES):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def _link(link: Path, target: str) -> None:
    if link.exists() and not link.is_symlink():
        return
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def _differing(one: Any, other: Any) -> tuple[Any, Any]:
    """Two values, without what two mappings have in common."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return one, other
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    return {key: one.get(key) for key in keys}, {key: other.get(key) for key in keys}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
