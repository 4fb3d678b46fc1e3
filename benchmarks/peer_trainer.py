"""Run by the Python of an environment with PyPI's `speculators`: its unmodified `train` command, on a CPU.

    peer_trainer.py STEPS.jsonl train ...

Its trainer asks the accelerator for things that a CPU does not have; those questions are answered here. Each of its
training steps leaves a line in STEPS.jsonl: non-padding positions of the packed row, and seconds from the loaded batch
to the end of the optimizer step. Validation leaves its metrics.
"""

import functools
import json
import logging
import sys
from pathlib import Path

import speculators.train.checkpointer
import speculators.train.cli
import speculators.train.dataloader
import speculators.train.trainer
import torch
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
        path.write_text("", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        logged = record.msg
        if isinstance(logged, dict) and "val" in logged:
            self._write({"epoch": logged["epoch"], "validation": logged["val"]})
        elif isinstance(logged, dict) and logged.get("profile"):
            timing = logged["profile"]
            tokens = round(timing["tokens_per_s"] * timing["step_ms"] / 1000)
            seconds = (timing["step_ms"] - timing["fetch_ms"]) / 1000
            self._write({"epoch": logged["epoch"], "tokens": tokens, "seconds": seconds})

    def _write(self, entry: dict) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def record_after(set_up, path: Path):
    """The trainer replaces the handlers of its metric logger when it starts; ours joins afterwards."""

    @functools.wraps(set_up)
    def wrapped(*arguments, **keywords):
        result = set_up(*arguments, **keywords)
        logger = logging.getLogger("speculators.metrics")
        logger.addHandler(StepRecorder(path))
        logger.setLevel(logging.INFO)
        return result

    return wrapped


if __name__ == "__main__":
    stand_in_for_the_accelerator()
    recorded = record_after(speculators.train.cli.setup_metric_logger, Path(sys.argv.pop(1)))
    speculators.train.cli.setup_metric_logger = recorded
    app()
