"""A training in which one process ends in a given way: `python -m tests.train.dying` is one of its processes."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from speculators.errors import SpeculatorsError
from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.train.config import TrainConfig
from speculators.train.loop import TrainingTask, train
from tests.train.processes import ROOT
from tests.train.tiny_training import make_task

STEP = 3


def make_dying(task: TrainingTask, how: str) -> None:
    """Let this process end in a step: by an exception, by SIGKILL, or by hanging."""

    class Dying(type(task.objective)):
        def step(self, draft: Any, batch: PackedBatch, verifier_head: Any) -> StepOutput:
            calls.append(1)
            if len(calls) == STEP:
                if how == "raise":
                    raise OSError("the moon is gone")
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            return super().step(draft, batch, verifier_head)

    calls: list[int] = []
    task.objective = Dying(**task.objective.model_dump())


def start(verifier: Path, out: Path, how: str, dying: int) -> list[subprocess.Popen[str]]:
    """Two processes without a launcher, which would end one when the other dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        settings = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **{key: str(it) for key, it in place.items()}}
        words = ["--verifier", str(verifier), "--out", str(out), "--how", how if rank == dying else "live"]
        found.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.train.dying", *words],
                cwd=ROOT,
                env={**os.environ, **settings},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return found


def wait_for_steps(log: Path, processes: list[subprocess.Popen[str]]) -> float:
    """Wait until the step before the end is logged, and return when that was."""
    while not (log.exists() and log.read_text(encoding="utf-8").count("\n") >= STEP - 1):
        assert all(process.poll() in (None, -signal.SIGKILL, 1) for process in processes)
        time.sleep(0.05)
    return time.monotonic()


def main() -> None:
    """Be one of the processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--verifier", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--how", default="live")
    arguments = parser.parse_args()
    task = make_task(arguments.verifier)
    if arguments.how != "live":
        make_dying(task, arguments.how)
    config = TrainConfig(epochs=50, row_length=64, max_steps=20, compute_dtype="float32", measure_every=1000)
    try:
        train(task, config, arguments.out)
    except SpeculatorsError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
