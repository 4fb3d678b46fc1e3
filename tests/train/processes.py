"""Training jobs in several processes and in one: `python -m tests.train.processes` writes what they differ by.

out/equivalence.json: two processes against one with twice the accumulation, 20 steps in float32.
out/resume.json: six steps straight against three, a signal, and the rest.

Under `torchrun` with a file of jobs it does them, which is how it starts itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from speculators.train.config import ComputeDtype, OptimizerName, Strategy, TrainConfig
from speculators.train.loop import TrainingRun
from speculators.train.metrics import read_metrics
from speculators.train.signals import Stopped
from tests.tiny_models import make_verifier
from tests.train import tiny_training
from tests.train.test_families import make_task
from tests.train.tiny_training import LENGTHS, load, make_samples, stop_at

ROOT = Path(__file__).resolve().parents[2]
# Of Muon's updates those of nearly degenerate directions turn with the last bit of a gradient.
BOUNDS = {"adamw": 1e-5, "muon": 2e-3}


@dataclass(frozen=True)
class Job:
    """One training: where, of which family, how. `stop_step` is told to stop by a signal to process `stop_rank`.

    `held_out` are the lengths of samples to validate on.
    """

    out: str
    family: str = "eagle3"
    strategy: Strategy = "auto"
    optimizer: OptimizerName = "adamw"
    accumulation: int = 1
    max_steps: int = 20
    stop_step: int | None = None
    stop_rank: int = 0
    ema_decay: float | None = None
    held_out: Sequence[int] = ()
    measure_every: int = 1000
    compute_dtype: ComputeDtype = "float32"

    @property
    def directory(self) -> Path:
        return Path(self.out)


def do(job: Job, verifier: Path) -> None:
    """Train, and leave beside the checkpoints what tells how it went."""
    make = tiny_training.make_task if job.family == "eagle3" else partial(make_task, job.family)
    task = make(verifier, lengths=LENGTHS)
    if job.held_out:
        layers = list(task.draft.config.aux_layer_ids)
        task.validation = make_samples(load(verifier), job.held_out, layers, seed=8)
    config = TrainConfig(
        epochs=50,
        max_steps=job.max_steps,
        row_length=64,
        accumulation=job.accumulation,
        optimizer=job.optimizer,
        strategy=job.strategy,
        learning_rate=1e-3,
        compute_dtype=job.compute_dtype,
        measure_every=job.measure_every,
        ema_decay=job.ema_decay,
    )
    if job.stop_step is not None and int(os.environ.get("RANK", "0")) == job.stop_rank:
        task.objective = stop_at(job.stop_step, signal.SIGTERM, task.objective, job.accumulation)
    run = TrainingRun(task, config, job.directory, False)
    held: set[tuple[str, int, int]] = set()
    for optimizer in run.optimizers.values():
        optimizer.register_step_post_hook(lambda *_: held.update(rows_held(run.trainee.module)))
    code = 0
    try:
        run.go()
    except Stopped as stopped:
        code = int(stopped.code or 0)
    held.update(rows_held(run.trainee.module))
    found = {"code": code, "rows": run.workers.gather(sorted(held))}
    if run.workers.leads:
        found["is_dtensor"] = all(isinstance(parameter, DTensor) for parameter in run.trainee.module.parameters())
        (job.directory / "end.json").write_text(json.dumps(found), encoding="utf-8")
    run.workers.wait()


def rows_held(module: nn.Module) -> set[tuple[str, int, int]]:
    """Of every parameter, as it lies between two passes: its name, this process's rows, and all rows."""
    parts = {
        name: parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for name, parameter in module.named_parameters()
    }
    return {(name, len(parts[name]), len(parameter)) for name, parameter in module.named_parameters()}


def start(jobs: Sequence[Job], world_size: int, verifier: Path, scratch: Path) -> None:
    """Do the jobs one after another, in so many processes."""
    file = scratch / f"jobs{world_size}-{len(list(scratch.glob('jobs*')))}.json"
    file.write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")
    words = ["-m", "tests.train.processes", "--jobs", str(file), "--verifier", str(verifier)]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(world_size)] if world_size > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run([sys.executable, *launcher, *words], cwd=ROOT, env=environment, check=True, timeout=900)


def logged(job: Job) -> list[dict[str, Any]]:
    return list(read_metrics(job.directory / "metrics.jsonl"))


def weights(job: Job, name: str = "parameters") -> dict[str, Tensor]:
    return load_file(job.directory / "checkpoints" / f"step-{job.max_steps}" / f"{name}.safetensors")


def moments(job: Job) -> list[Tensor]:
    path = job.directory / "checkpoints" / f"step-{job.max_steps}" / "optimizer.pt"
    found = torch.load(path, weights_only=True)
    states = [state for name in sorted(found) for _, state in sorted(found[name]["state"].items())]
    return [state[key] for state in states for key in sorted(state)]


def largest(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest difference of any two numbers."""
    return max(float((mine - theirs).abs().max()) for mine, theirs in zip(one, other, strict=True))


def difference(one: Job, other: Job) -> dict[str, float]:
    """How far two trainings are from each other."""
    lines = list(zip(logged(one), logged(other), strict=True))
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    return {
        "steps": len(lines),
        "max_loss_diff": max(abs(mine["loss"] - its["loss"]) for mine, its in lines if mine["loss"] is not None),
        "max_lr_diff": max(abs(mine["lr"] - its["lr"]) for mine, its in lines),
        "max_weight_diff": largest(list(ours.values()), [theirs[name] for name in ours]),
        "max_state_diff": largest(moments(one), moments(other)),
    }


def end(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.directory / "end.json").read_text(encoding="utf-8"))
    return found


def equivalence(verifier: Path, scratch: Path) -> list[dict[str, Any]]:
    """Two processes against one with twice the accumulation."""
    cases = [(family, strategy, "adamw") for family in ("eagle3", "dflash", "dspark") for strategy in ("ddp", "fsdp2")]
    cases += [("eagle3", strategy, "muon") for strategy in ("ddp", "fsdp2")]
    kinds = sorted({(family, optimizer) for family, _, optimizer in cases})
    alone = {kind: Job(str(scratch / "-".join(kind)), kind[0], "auto", kind[1], 2) for kind in kinds}
    shared = {case: Job(str(scratch / "-".join(case)), *case) for case in cases}
    start(list(alone.values()), 1, verifier, scratch)
    start(list(shared.values()), 2, verifier, scratch)
    return [
        {
            "family": case[0],
            "strategy": case[1],
            "optimizer": case[2],
            "world": 2,
            **difference(job, alone[case[0], case[2]]),
            "bound": BOUNDS[case[2]],
            **end(job),
        }
        for case, job in shared.items()
    ]


def judgements(verifier: Path, scratch: Path) -> list[dict[str, Any]]:
    """Averages of the weights, judged on three held-out rows: two processes, stopped and resumed, against one."""
    alone = Job(str(scratch / "alone"), accumulation=2, max_steps=9, ema_decay=0.9, held_out=(60, 55, 40))
    alone = replace(alone, measure_every=3)
    found = []
    start([alone], 1, verifier, scratch)
    for strategy in ("ddp", "fsdp2"):
        shared = replace(alone, out=str(scratch / strategy), accumulation=1, strategy=strategy)
        start([replace(shared, stop_step=5), shared], 2, verifier, scratch)
        lines = list(zip(logged(alone), logged(shared), strict=True))
        judged = [pair for pair in lines if "validation_loss" in pair[0]]
        ours, theirs = (weights(job, "averages") for job in (alone, shared))
        found.append(
            {
                "strategy": strategy,
                "is_dtensor": end(shared)["is_dtensor"],
                "judged": [mine["step"] for mine, _ in judged],
                "max_validation_diff": max(
                    abs(mine["validation_loss"] - its["validation_loss"]) for mine, its in judged
                ),
                "max_average_diff": largest(list(ours.values()), [theirs[name] for name in ours]),
                **difference(shared, alone),
            }
        )
    return found


# Name, strategy, type of the products, processes before the signal and after.
RESUMED: tuple[tuple[str, Strategy, ComputeDtype, int, int], ...] = (
    ("one process", "auto", "float32", 1, 1),
    ("two processes", "ddp", "float32", 2, 2),
    ("two, then one", "ddp", "float32", 2, 1),
    ("two processes, split", "fsdp2", "float32", 2, 2),
    ("two processes, split, bfloat16", "fsdp2", "bfloat16", 2, 2),
    ("split, then one", "fsdp2", "float32", 2, 1),
    ("one, then split", "fsdp2", "float32", 1, 2),
)


def resumption(verifier: Path, scratch: Path) -> list[dict[str, Any]]:
    """Three steps, a signal, and three more against six, where each part is done by so many processes."""
    found = {}
    for name, strategy, dtype, before, after in RESUMED:
        folder = scratch / name.replace(" ", "-").replace(",", "")
        straight = Job(str(folder / "straight"), strategy=strategy, max_steps=6, accumulation=2 // before)
        straight = replace(straight, compute_dtype=dtype)
        stopped = replace(straight, out=str(folder / "stopped"), stop_step=3, stop_rank=before - 1)
        found[name] = before, after, straight, stopped, replace(straight, out=stopped.out, accumulation=2 // after)
    for size in (1, 2):
        start(
            [job for before, _, *jobs, _ in found.values() if before == size for job in jobs], size, verifier, scratch
        )
    between = {name: left_behind(stopped) for name, (_, _, _, stopped, _) in found.items()}
    for size in (1, 2):
        start([resumed for _, after, _, _, resumed in found.values() if after == size], size, verifier, scratch)
    return [
        {
            "case": name,
            "world": [before, after],
            **between[name],
            "lr": [line["lr"] for line in logged(resumed)],
            **difference(resumed, straight),
            "is_dtensor": end(resumed)["is_dtensor"],
        }
        for name, (before, after, straight, _, resumed) in found.items()
    ]


def left_behind(stopped: Job) -> dict[str, Any]:
    """How a run ended that was told to stop: its exit code, its checkpoints and their files, and what AdamW had done.

    `updates` are the counts of updates that its states hold, `least_moment` the least of their largest first moments.
    """
    folders = sorted((stopped.directory / "checkpoints").glob("step-*"))
    states = torch.load(folders[-1] / "optimizer.pt", weights_only=True)["adamw"]["state"].values()
    return {
        "exit_code": end(stopped)["code"],
        "checkpoint": [path.name for path in folders],
        "files": sorted(path.name for path in folders[-1].iterdir()),
        "updates": sorted({int(state["step"]) for state in states}),
        "least_moment": min(float(state["exp_avg"].abs().max()) for state in states),
    }


def main() -> None:
    """Do jobs, or compare."""
    parser = argparse.ArgumentParser(description="Training in several processes and in one.")
    parser.add_argument("--jobs", type=Path, default=None)
    parser.add_argument("--verifier", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    if arguments.jobs is not None:
        for job in json.loads(arguments.jobs.read_text(encoding="utf-8")):
            do(Job(**job), arguments.verifier)
        return
    scratch = arguments.out / "processes"
    scratch.mkdir(parents=True)
    verifier = make_verifier(scratch / "verifier")
    for name, compare in (("equivalence", equivalence), ("resume", resumption)):
        (scratch / name).mkdir()
        table = compare(verifier, scratch / name)
        (arguments.out / f"{name}.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        for row in table:
            print(row)


if __name__ == "__main__":
    main()
