"""Run as a process of its own by `train_compare.py`: this project's trainer on a finished store of hidden states.

    our_trainer.py JOB.json STEPS.jsonl

The job names a family with its options and settings. What is recorded has the form that `peer_trainer.py` writes: a
line for what the imports take, one a training step, and one for the whole run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from process_memory import peak_bytes, resident_bytes

from speculators.extract.prepared import DRAFT_VOCAB, read_draft_vocab
from speculators.extract.store import HiddenStatesStore
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models import FAMILIES
from speculators.models.family import VerifierShape
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from speculators.train.config import TrainConfig
from speculators.train.loop import TrainingTask, compute_dtype, train


def read_config(family: str, draft: Mapping[str, Any], verifier: Path) -> Any:
    """The draft's options, completed by the verifier's shape."""
    shape = json.loads((verifier / "config.json").read_text(encoding="utf-8"))
    return FAMILIES[family].draft(**draft).resolve(VerifierShape.from_config_dict(shape, str(verifier)))


def steps_of(log: Path) -> list[dict[str, float]]:
    """Tokens and seconds of every line of a metrics log that has one line a step."""
    steps, before = [], 0
    for text in log.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        tokens, before = line["tokens"] - before, line["tokens"]
        steps.append({"epoch": line["epoch"], "tokens": tokens, "seconds": tokens / line["tokens_per_second"]})
    return steps


def run(job: Mapping[str, Any], record: list[dict[str, Any]]) -> None:
    """Train, save the speculator in the job's folder, and add what is to be recorded."""
    folder, verifier = Path(job["out"]), Path(job["verifier"])
    config = read_config(job["family"], job["draft"], verifier)
    weights = load_verifier_weights(verifier)
    vocab = read_draft_vocab(Path(job["prepared"]) / DRAFT_VOCAB)
    speculator = Speculator.create(config, weights, vocab)
    task = TrainingTask(
        draft=speculator.draft,
        objective=FAMILIES[job["family"]].objective(**job["objective"]),
        verifier_head=VerifierHead.from_weights(weights),
        samples=HiddenStatesStore.open(job["states"], aux_layer_ids=config.aux_layer_ids),
    )
    settings = TrainConfig(**{**job["train"], "log_every": 1})
    train(task, settings, folder, show_progress=True)
    speculator.save_pretrained(folder / "speculator")
    dtype = compute_dtype(settings.compute_dtype, torch.device("cpu"))
    trained = sum(parameter.numel() for parameter in speculator.draft.trained_parameters())
    record.append({"compute_dtype": str(dtype).removeprefix("torch."), "trained_parameters": trained})
    record.extend(steps_of(folder / "metrics.jsonl"))


def main() -> None:
    job, path = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    torch.set_num_threads(job["threads"])
    # These are imported when they are asked for.
    family = FAMILIES[job["family"]]
    _ = family.draft, family.config, family.model, family.objective
    record: list[dict[str, Any]] = [{"imports_bytes": resident_bytes(), "torch": torch.__version__}]
    started = time.perf_counter()
    run(job, record)
    record.append({"wall_seconds": time.perf_counter() - started, "run_peak_bytes": peak_bytes()})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in record), encoding="utf-8")


if __name__ == "__main__":
    main()
