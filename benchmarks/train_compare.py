"""This project's trainer and that of PyPI's `speculators`, side by side on the same hidden states, for one family.

    python benchmarks/train_compare.py --family eagle3 --train ROWS.jsonl --heldout ROWS.jsonl \\
        --peer-python .venv-peer/bin/python [--part speed|memory|accuracy|all] [--steps 24] [--rounds 3] [--epochs 3]

Both get the same rows, draft vocabulary, shape of draft (see `compare_families.py`), packed rows of 1024 positions, one
a step, and as many threads; each trains with its own recommended or default optimizer. Every training is a process of
its own.

* `speed`: short trainings, turn about. Tokens are the non-padding positions of the packed rows, prompts included;
  seconds are those of the steps after a warm-up, without loading rows and writing checkpoints.
* `memory`: the most resident memory of a short training, above what its process has after its imports.
* `accuracy`: both train for as many optimizer steps, the peer's for --epochs; then this project's evaluator measures
  both saved drafts on the held-out rows.

Parts are merged into one file, by default benchmarks/results/train_FAMILY.json. What has ended is not run again: an
interrupted comparison goes on, and `--fresh` starts anew. The peer must live in an environment of its own, since its
import name is ours (`make .venv-peer/complete`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from compare_families import (
    ANCHORS_A_ROW,
    AUX_LAYERS,
    FAMILIES,
    ROW_LENGTH,
    Comparison,
    peer_flags,
)
from compare_runs import Trained, Trainers
from rich.console import Console
from rich.table import Table

from speculators.formats.files import write_text

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ("speed", "memory", "accuracy")
SIDES = ("ours", "peer")


def settings_of(arguments: argparse.Namespace, trainers: Trainers, comparison: Comparison) -> dict[str, Any]:
    """What must be the same for parts to be merged."""
    blocks = {}
    if comparison.blocks:
        blocks["blocks_a_packed_row"] = {
            "most": ANCHORS_A_ROW,
            "ours": f"{trainers.blocks_a_row:.1f} on average, {comparison.objective['max_anchors']} a document at most",
        }
    return {
        "verifier": Path(trainers.verifier).name,
        "rows": trainers.rows,
        "tokens": trainers.tokens,
        "row_length": ROW_LENGTH,
        "rows_a_step": 1,
        "aux_layer_ids": list(AUX_LAYERS),
        "draft_vocab_size": arguments.draft_vocab_size,
        **comparison.shape,
        **blocks,
        "ours": {"draft": trainers.draft, "objective": comparison.objective, "train": comparison.train},
        "peer": {"flags": " ".join(peer_flags(comparison.peer)), "else": "its defaults"},
    }


def measure_speed(arguments: argparse.Namespace, trainers: Trainers, folder: Path) -> dict[str, Any]:
    """Tokens per second of both over several rounds; who goes first alternates."""
    found: dict[str, list[Trained]] = {side: [] for side in SIDES}
    for turn in range(arguments.rounds):
        for side in SIDES if turn % 2 else reversed(SIDES):
            train = getattr(trainers, side)
            found[side].append(train(folder / f"speed-{turn}" / side, epochs=1, max_steps=arguments.steps))
    rates = {
        side: [run.throughput(arguments.warmup)["tokens_per_second"] for run in runs] for side, runs in found.items()
    }
    medians = {side: statistics.median(values) for side, values in rates.items()}
    return {
        "steps": arguments.steps,
        "warmup_steps": arguments.warmup,
        "tokens_per_second": {side: round(value, 1) for side, value in medians.items()},
        "by_round": {side: [round(value, 1) for value in values] for side, values in rates.items()},
        "ratio_by_round": [round(one / other, 3) for one, other in zip(rates["ours"], rates["peer"], strict=True)],
        "ratio": round(medians["ours"] / medians["peer"], 3),
    }


def measure_memory(arguments: argparse.Namespace, trainers: Trainers, folder: Path) -> dict[str, Any]:
    """The peak of both processes above their imports, over one short training with its checkpoint."""
    found = {
        side: getattr(trainers, side)(folder / "memory" / side, epochs=1, max_steps=arguments.steps) for side in SIDES
    }
    above = {side: run.memory["above_imports"] for side, run in found.items()}
    return {
        "steps": arguments.steps,
        "bytes": {side: run.memory for side, run in found.items()},
        "mib_above_imports": {side: round(value / 2**20) for side, value in above.items()},
        "ratio": round(above["ours"] / above["peer"], 3),
    }


def measure_accuracy(arguments: argparse.Namespace, trainers: Trainers, folder: Path) -> dict[str, Any]:
    """Both drafts after as many optimizer steps, on the held-out rows."""
    runs = {"peer": trainers.peer(folder / "accuracy" / "peer", epochs=arguments.epochs, max_steps=None)}
    steps = len(runs["peer"].steps)
    # Where rows pack tighter here, an epoch has fewer steps: the next one then makes up for them.
    ours = trainers.ours(folder / "accuracy" / "ours", epochs=arguments.epochs + 1, max_steps=steps)
    runs["ours"] = ours
    report: dict[str, Any] = {
        "epochs_of_peer": arguments.epochs,
        "optimizer_steps": {side: len(runs[side].steps) for side in SIDES},
        "trained_tokens": {side: sum(step["tokens"] for step in runs[side].steps) for side in SIDES},
        "tokens_per_second": {
            side: round(runs[side].throughput(arguments.warmup)["tokens_per_second"], 1) for side in SIDES
        },
        "wall_seconds": {side: round(runs[side].figures["wall_seconds"], 1) for side in SIDES},
        "mib_above_imports": {side: round(runs[side].memory["above_imports"] / 2**20) for side in SIDES},
        "evaluator": "this project's, in float32, at every supervised place of the held-out rows",
        "peer_own_validation": [line["validation"] for line in runs["peer"].validations],
    }
    accuracy = {side: trainers.heldout_accuracy(runs[side].speculator) for side in SIDES}
    for kind in accuracy["ours"]:
        report[kind] = {side: accuracy[side][kind] for side in SIDES}
    return report


MEASURES = {"speed": measure_speed, "memory": measure_memory, "accuracy": measure_accuracy}


def merged(path: Path, settings: Mapping[str, Any], fresh: bool) -> dict[str, Any]:
    """The parts measured before with these settings; SystemExit where the file is of others."""
    if fresh or not path.is_file():
        return {}
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    before = report.get("settings", {})
    other = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
    if other:
        raise SystemExit(
            f"{path} was measured with {other[0]} {before.get(other[0])}, this run has {settings.get(other[0])}; give "
            "another --json, or --fresh to measure everything again"
        )
    return report


def verdict(report: Mapping[str, Any], comparison: Comparison) -> dict[str, bool]:
    """Which of the wanted ratios were found, as far as they were measured."""
    found = {}
    if "speed" in report:
        found["speed"] = report["speed"]["ratio"] >= comparison.speed
    if "memory" in report:
        found["memory"] = report["memory"]["ratio"] <= comparison.memory
    if "accuracy" in report:
        for kind in ("cumulative", "conditional", "each"):
            if kind in report["accuracy"]:
                pairs = zip(*(report["accuracy"][kind][side] for side in SIDES), strict=True)
                # A position that no block of a side came to has no rate, which is as good as 0.
                found[f"accuracy_{kind}"] = all((ours or 0) >= (theirs or 0) for ours, theirs in pairs)
    return found


def print_report(report: Mapping[str, Any]) -> None:
    """One table of everything measured so far."""
    settings = report["settings"]
    table = Table(title=f"{report['family']} on {settings['verifier']}")
    for column in ("", "ours", "PyPI's speculators", "ours / theirs", "wanted"):
        table.add_column(column, justify="left" if not column else "right")
    wanted = report["wanted"]
    if "speed" in report:
        found = report["speed"]
        rates = [f"{found['tokens_per_second'][side]:,.0f}" for side in SIDES]
        table.add_row("tokens/s, median", *rates, f"{found['ratio']:.2f}", f">= {wanted['speed']:.2f}")
    if "memory" in report:
        found = report["memory"]
        peaks = [f"{found['mib_above_imports'][side]:,}" for side in SIDES]
        table.add_row("peak MiB above imports", *peaks, f"{found['ratio']:.2f}", f"<= {wanted['memory']:.2f}")
    for kind in ("cumulative", "conditional", "each"):
        if kind in report.get("accuracy", {}):
            for position, pair in enumerate(zip(*(report["accuracy"][kind][side] for side in SIDES), strict=True)):
                ratio = f"{pair[0] / pair[1]:.2f}" if all(pair) else "-"
                rates = ["-" if one is None else f"{one:.3f}" for one in pair]
                table.add_row(f"accuracy, {kind}, {position + 1}", *rates, ratio, ">= 1.00")
    Console().print(table)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", required=True, choices=list(FAMILIES))
    parser.add_argument("--verifier", default="smollm2")
    parser.add_argument("--train", type=Path, required=True, help="JSONL rows with input_ids and loss_mask")
    parser.add_argument("--heldout", type=Path, required=True, help="JSONL rows with input_ids and loss_mask")
    parser.add_argument("--peer-python", type=Path, required=True, help="the Python that has PyPI's speculators")
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--steps", type=int, default=24, help="training steps of a short training")
    parser.add_argument("--warmup", type=int, default=4, help="steps of a training that are not counted")
    parser.add_argument("--rounds", type=int, default=3, help="short trainings of each, to measure the speed")
    parser.add_argument("--epochs", type=int, default=3, help="of the peer's training, to measure the accuracy")
    parser.add_argument("--rows", type=int, default=None, help="rows read of each file; all where not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=Path("out/train_compare"))
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured before")
    arguments = parser.parse_args(argv)
    if not arguments.peer_python.exists():
        parser.error(f"there is no {arguments.peer_python}; `make .venv-peer/complete` makes the peer's environment")
    return arguments


def main() -> int:
    arguments = parse()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    torch.set_num_threads(arguments.threads)
    comparison, folder = FAMILIES[arguments.family], arguments.out / arguments.family
    path = arguments.json or RESULTS / f"train_{arguments.family}.json"
    parts = PARTS if arguments.part == "all" else (arguments.part,)
    trainers = Trainers(arguments, comparison)
    settings = settings_of(arguments, trainers, comparison)
    report = merged(path, settings, arguments.fresh)
    if arguments.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    wanted = {"speed": comparison.speed, "memory": comparison.memory}
    report |= {"family": arguments.family, "peer": "speculators 0.9.0", "settings": settings, "wanted": wanted}
    for part in parts:
        report[part] = {"threads": arguments.threads, **MEASURES[part](arguments, trainers, folder)}
        report["found"] = verdict(report, comparison)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(report, indent=2) + "\n")
    print_report(report)
    print(f"report in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
