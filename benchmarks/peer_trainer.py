"""Run by the Python of an environment with PyPI's `speculators`: its unmodified `train` command, on a CPU.

    peer_trainer.py STEPS.jsonl train ...

Its trainer asks the accelerator for things that a CPU does not have; those questions are answered here. Each of its
training steps leaves a line in STEPS.jsonl: non-padding positions of the packed row, seconds from the loaded batch to
the end of the optimizer step, and the most memory that the process has had. Validation leaves its metrics. The first
line tells what the imports take, the last what the whole run took.
"""

import functools
import json
import logging
import sys
import time
from pathlib import Path

import speculators.train.checkpointer
import speculators.train.cli
import speculators.train.dataloader
import speculators.train.trainer
import torch
from process_memory import peak_bytes, resident_bytes
from speculators.__main__ import app

CPU = torch.device("cpu")


class UnpinnedLoader(torch.utils.data.DataLoader):
    """A DataLoader that never pins memory, which only an accelerator can use."""

    def __init__(self, *arguments, **keywords) -> None:
        super().__init__(*arguments, **keywords | {"pin_memory": False})


def stand_in_for_the_accelerator() -> None:
    torch.accelerator.current_accelerator = lambda check_available=False: None if check_available else CPU
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.is_available = lambda: False
    torch.accelerator.synchronize = lambda: None
    speculators.train.trainer.get_local_rank = lambda: "cpu"
    speculators.train.checkpointer.get_current_device = lambda: "cpu"
    speculators.train.dataloader.DataLoader = UnpinnedLoader


class StepRecorder(logging.Handler):
    """Writes what the trainer logs about its steps, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        logged = record.msg
        if isinstance(logged, dict) and "val" in logged:
            self.write({"epoch": logged["epoch"], "validation": logged["val"]})
        elif isinstance(logged, dict) and logged.get("profile"):
            timing = logged["profile"]
            tokens = round(timing["tokens_per_s"] * timing["step_ms"] / 1000)
            seconds = (timing["step_ms"] - timing["fetch_ms"]) / 1000
            self.write({"epoch": logged["epoch"], "tokens": tokens, "seconds": seconds, "peak_bytes": peak_bytes()})

    def write(self, entry: dict) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def record_after(set_up, recorder: StepRecorder):
    """The trainer replaces the handlers of its metric logger when it starts; ours joins afterwards."""

    @functools.wraps(set_up)
    def wrapped(*arguments, **keywords):
        result = set_up(*arguments, **keywords)
        logger = logging.getLogger("speculators.metrics")
        logger.addHandler(recorder)
        logger.setLevel(logging.INFO)
        return result

    return wrapped


def main() -> None:
    path = Path(sys.argv.pop(1))
    path.write_text("", encoding="utf-8")
    recorder = StepRecorder(path)
    stand_in_for_the_accelerator()
    speculators.train.cli.setup_metric_logger = record_after(speculators.train.cli.setup_metric_logger, recorder)
    started = time.perf_counter()
    recorder.write({"imports_bytes": resident_bytes(), "torch": torch.__version__})
    try:
        app()
    finally:
        recorder.write({"wall_seconds": time.perf_counter() - started, "run_peak_bytes": peak_bytes()})


if __name__ == "__main__":
    main()
