"""How fast EAGLE-3 training is, and with --peer-python how fast that of PyPI's `speculators` is on the same data.

    python benchmarks/train_speed.py --train ROWS.jsonl --heldout ROWS.jsonl [--peer-python PEER/bin/python]
        [--steps 16 | --accuracy EPOCHS] [--dtype float32] [--threads 2]

Both trainers get the same hidden states, the same draft vocabulary, one packed row of 1024 positions a step, 3 steps of
training-time test, and as many threads. One counter serves both: non-padding positions of the packed rows per second,
prompts included, over the steps after the warm-up, without loading rows and writing checkpoints. Rounds alternate, so
that a busy machine slows both. With --accuracy both train to the end, and this project's objective measures what each
has saved on the held-out rows: the share of positions where the first 1, 2 and 3 drafts are all right.

The peer trains with its own defaults. It must live in an environment of its own, since its import name is ours.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from speculators.extract.prepared import DRAFT_VOCAB, PreparedData, read_draft_vocab
from speculators.extract.store import HiddenStatesStore
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.eagle3.draft import Eagle3Draft
from speculators.models.eagle3.objective import Eagle3Objective
from speculators.models.hardware import multiplies_bfloat16
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from speculators.train.config import TrainConfig
from speculators.train.dataset import PackedRows
from speculators.train.loop import TrainingTask, train
from speculators.train.metrics import MetricSums
from speculators.train.recipe import DataConfig, ExtractConfig, Recipe
from speculators.train.stages import Run

ROW_LENGTH = 1024
TTT_STEPS = 3
PEER_SCRIPT = Path(__file__).resolve().parent / "peer_trainer.py"


def extract_states(name: str, args: argparse.Namespace, rows: Path) -> Run:
    recipe = Recipe(
        name=name,
        verifier=args.verifier,
        family="eagle3",
        draft=Eagle3Draft(draft_vocab_size=args.draft_vocab_size),
        objective=Eagle3Objective(ttt_steps=TTT_STEPS),
        data=DataConfig(train=(str(rows),), max_length=ROW_LENGTH, validation_rows=0),
        extract=ExtractConfig(),
        out=str(args.out / name),
    )
    run = Run(recipe)
    run.run(["prepare-data", "extract"])
    return run


def throughput(steps: Sequence[dict[str, float]], warmup: int) -> dict[str, float]:
    counted = steps[warmup:]
    if not counted:
        raise SystemExit(f"{len(steps)} steps leave none after a warm-up of {warmup}; give more --steps")
    tokens, seconds = sum(step["tokens"] for step in counted), sum(step["seconds"] for step in counted)
    return {"steps": len(counted), "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train_ours(data: Run, args: argparse.Namespace, folder: Path) -> tuple[Speculator, list[dict[str, float]]]:
    weights = load_verifier_weights(data.verifier)
    vocab = read_draft_vocab(data.outputs.prepared / DRAFT_VOCAB)
    speculator = Speculator.create(data.speculator_config, weights, vocab)
    task = TrainingTask(
        draft=speculator.draft,
        objective=Eagle3Objective(ttt_steps=TTT_STEPS),
        verifier_head=VerifierHead.from_weights(weights),
        samples=HiddenStatesStore.open(data.outputs.states),
    )
    config = TrainConfig(
        epochs=args.accuracy or 1,
        max_steps=None if args.accuracy else args.steps,
        row_length=ROW_LENGTH,
        optimizer=args.optimizer,
        learning_rate=args.learning_rate,
        compute_dtype=args.dtype,
        checkpoint_every=10**6,
    )
    train(task, config, folder, show_progress=True)
    steps, before = [], 0
    for line in read_lines(folder / "metrics.jsonl"):
        tokens, before = line["tokens"] - before, line["tokens"]
        steps.append({"tokens": tokens, "seconds": tokens / line["tokens_per_second"]})
    return speculator, steps


def write_peer_data(trained: Run, heldout: Run, folder: Path) -> float:
    """Write what the peer reads, training rows first; return the share of rows that are for training."""
    states = folder / "hidden_states"
    states.mkdir(parents=True)
    table, counts = [], []
    for run in (trained, heldout):
        store = HiddenStatesStore.open(run.outputs.states)
        counts.append(len(store))
        for row in range(len(store)):
            sample = store[row]
            layers = torch.cat([sample.aux_hidden_states, sample.last_hidden_states[:, None]], dim=1)
            tensors = {"hidden_states": layers.contiguous(), "token_ids": sample.input_ids.contiguous()}
            save_file(tensors, str(states / f"hs_{len(table)}.safetensors"))
            ids, mask = sample.input_ids.tolist(), sample.loss_mask.long().tolist()
            table.append({"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)})
    Dataset.from_list(table).with_format("torch").save_to_disk(str(folder / "dataset"))
    vocab = read_draft_vocab(trained.outputs.prepared / DRAFT_VOCAB)
    np.save(folder / "d2t.npy", vocab.d2t.numpy())
    np.save(folder / "t2d.npy", vocab.t2d.numpy())
    # Half a row more than the training rows, so that rounding down gives exactly those.
    return (counts[0] + 0.5) / sum(counts)


def train_peer(
    data: Run, share: float, args: argparse.Namespace, shared: Path, folder: Path
) -> tuple[Path, list[dict[str, Any]]]:
    folder.mkdir(parents=True)
    steps = folder / "steps.jsonl"
    options = {
        "verifier-name-or-path": data.verifier,
        "data-path": shared / "dataset",
        "hidden-states-path": shared / "hidden_states",
        "on-missing": "raise",
        "train-data-ratio": share,
        "total-seq-len": ROW_LENGTH,
        "ttt-steps": TTT_STEPS,
        "draft-vocab-size": args.draft_vocab_size,
        "d2t-path": shared / "d2t.npy",
        "t2d-path": shared / "t2d.npy",
        "hidden-states-dtype": args.dtype,
        "loss-implementation": "eager",
        "draft-attn-impl": "eager",
        "num-workers": 0,
        "checkpoint-freq": 1,
        "epochs": args.accuracy or 1,
        "save-path": folder / "checkpoints",
    }
    if not args.accuracy:
        options["max-steps"] = args.steps
    command = [args.peer_python, PEER_SCRIPT, steps, "train"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            [str(word) for word in command], stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
        )
    if done.returncode:
        raise SystemExit(f"the peer's training failed; see {folder / 'log.txt'}")
    newest = max((folder / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    return newest, [line for line in read_lines(steps) if "tokens" in line]


@torch.no_grad()
def heldout_accuracy(speculator: Speculator, verifier: str, heldout: Run) -> list[float]:
    """Share of held-out positions where drafts 1..k are all the verifier's likeliest tokens, for k = 1, 2, 3."""
    weights = load_verifier_weights(verifier)
    speculator = speculator.to("cpu", torch.float32)
    if speculator.draft.missing_tensors():
        speculator.attach_verifier(weights)
    rows = PackedRows(HiddenStatesStore.open(heldout.outputs.states), ROW_LENGTH)
    objective, head, sums = Eagle3Objective(ttt_steps=TTT_STEPS), VerifierHead.from_weights(weights), MetricSums()
    head = head.to("cpu", torch.float32)
    speculator.draft.eval()
    for batches in rows.step_batches(0, rows.steps(0, 1, 1), torch.device("cpu"), prefetch=False):
        sums.add(objective.step(speculator.draft, batches[0], head).metrics)
    return [count.rate for count in sums.per_position()]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    trained, heldout = extract_states("train", args, args.train), extract_states("heldout", args, args.heldout)
    shared = args.out / "peer_data"
    share = write_peer_data(trained, heldout, shared) if args.peer_python else 0.0
    steps: dict[str, list[list[dict[str, Any]]]] = {"ours": []} | ({"peer": []} if args.peer_python else {})
    saved: dict[str, Speculator] = {}
    for number in range(1 if args.accuracy else args.rounds):
        if args.peer_python:
            checkpoint, of_peer = train_peer(trained, share, args, shared, args.out / f"peer-{number}")
            saved["peer"] = Speculator.from_pretrained(checkpoint)
            steps["peer"].append(of_peer)
        saved["ours"], of_ours = train_ours(trained, args, args.out / f"ours-{number}")
        steps["ours"].append(of_ours)
    report: dict[str, Any] = {
        "verifier": trained.verifier,
        "rows": len(PreparedData(trained.outputs.prepared)),
        "tokens": PreparedData(trained.outputs.prepared).num_tokens,
        "draft_vocab_size": args.draft_vocab_size,
        "ttt_steps": TTT_STEPS,
        "row_length": ROW_LENGTH,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "epochs": args.accuracy,
        "ours_settings": {"optimizer": args.optimizer, "learning_rate": args.learning_rate},
        "trainers": {},
    }
    for name, rounds in steps.items():
        found: dict[str, Any] = {"rounds": [throughput(one, args.warmup) for one in rounds]}
        tokens, seconds = (sum(one[key] for one in found["rounds"]) for key in ("tokens", "seconds"))
        found["tokens_per_second"] = tokens / seconds
        if args.accuracy:
            found["heldout_accuracy"] = heldout_accuracy(saved[name], trained.verifier, heldout)
        report["trainers"][name] = found
    if args.peer_python:
        speeds = {name: found["tokens_per_second"] for name, found in report["trainers"].items()}
        report["ratio"] = speeds["ours"] / speeds["peer"]
    return report


def print_report(report: dict[str, Any]) -> None:
    table = Table(title=f"EAGLE-3 training, {report['dtype']}, {report['threads']} threads")
    for column in ("trainer", "tokens/s", "rounds", "held-out accuracy of drafts 1, 2, 3"):
        table.add_column(column)
    for name, found in report["trainers"].items():
        rounds = ", ".join(f"{one['tokens_per_second']:.0f}" for one in found["rounds"])
        accuracy = " ".join(f"{rate:.3f}" for rate in found.get("heldout_accuracy", []))
        table.add_row(name, f"{found['tokens_per_second']:.0f}", rounds, accuracy or "not measured")
    console = Console()
    console.print(table)
    if "ratio" in report:
        console.print(f"ours / peer: {report['ratio']:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", default="smollm2")
    parser.add_argument("--train", type=Path, required=True, help="JSONL rows with input_ids and loss_mask")
    parser.add_argument("--heldout", type=Path, required=True, help="JSONL rows with input_ids and loss_mask")
    parser.add_argument("--out", type=Path, default=Path("out/train_speed"), help="a folder that does not exist yet")
    parser.add_argument("--peer-python", type=Path, help="the Python of an environment with PyPI's speculators")
    parser.add_argument("--steps", type=int, default=16, help="training steps of a round")
    parser.add_argument("--warmup", type=int, default=4, help="steps of a round that are not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--accuracy", type=int, metavar="EPOCHS", help="train both this long and compare accuracy too")
    fast = "bfloat16" if multiplies_bfloat16(torch.device("cpu")) else "float32"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=fast, help="of the matrix products")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists; name a new folder or remove it")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)
    report = measure(args)
    path = args.out / "train_speed.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print_report(report)
    print(f"report in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
