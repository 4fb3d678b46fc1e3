"""What quantised aux states cost: the same draft trained on the same states, in full and in eight bits.

    python benchmarks/store_precision.py [--rows 300] [--prompts 40] [--json benchmarks/results/store_precision.json]

Each run is the quickstart's, with fewer rows: the same order of samples, the same seed, the same held-out prompts.
States are computed once; the quantised stores are written from them. The report has, for each store, its bytes a token,
the acceptance length of the draft trained on it, and how far that is from the full store's.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from speculators.extract.store import HiddenStatesStore, StoreWriter
from speculators.formats.files import write_text
from speculators.models.hardware import multiplies_bfloat16
from speculators.runtime.verifier import default_device
from speculators.train.overrides import apply_overrides
from speculators.train.quickstart import quickstart_recipe
from speculators.train.stages import Run

STORES = {"full": None, "float8_e4m3fn": "float8_e4m3fn", "int8": "int8"}


def make_run(arguments: argparse.Namespace, name: str) -> Run:
    """The quickstart on fewer rows and another store."""
    recipe = quickstart_recipe(bfloat16=multiplies_bfloat16(default_device()))
    changes = {
        "data.limit": arguments.rows,
        "extract.aux_dtype": STORES[name],
        "train.seed": arguments.seed,
        "evaluate.limit": arguments.prompts,
        "evaluate.max_num_seqs": 16,
        "out": str(arguments.out / name),
    }
    return Run(apply_overrides(recipe, [f"{key}={json.dumps(value)}" for key, value in changes.items()]))


def copy_quantised(source: HiddenStatesStore, target: Path, aux_dtype: str) -> None:
    """Write the rows of a full store to a quantised one; an unfinished one goes on."""
    identity = replace(source.identity, aux_dtype=aux_dtype)
    with StoreWriter(target, identity, source.lengths) as writer:
        for shard in writer.missing:
            samples = [source[row] for row in range(shard.first, shard.last)]
            states = [torch.cat([one.aux_hidden_states, one.last_hidden_states[:, None]], 1) for one in samples]
            writer.write(shard, [one.input_ids for one in samples], [one.loss_mask for one in samples], states)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate on every store."""
    found: dict[str, Any] = {}
    states: HiddenStatesStore | None = None
    for name, aux_dtype in STORES.items():
        run = make_run(arguments, name)
        run.run(["prepare-data"])
        if states is not None and aux_dtype is not None:
            copy_quantised(states, run.outputs.states, aux_dtype)
        run.run(["extract", "train", "evaluate"])
        store = HiddenStatesStore.open(run.outputs.states)
        states = states or store
        report = json.loads(run.outputs.evaluation("heldout", alone=True).read_text(encoding="utf-8"))
        length = report["acceptance_length"]
        found[name] = {
            "bytes_per_token": store.identity.bytes_per_token,
            "trained_tokens": store.num_tokens,
            "acceptance_length": length,
            "num_drafts": report["num_drafts"],
            "accepted_per_position": report["accepted_per_position"],
            "acceptance_cost": round(found["full"]["acceptance_length"] - length, 4) if found else 0.0,
        }
    return found


def main() -> None:
    """Measure, print, and write what was measured."""
    parser = argparse.ArgumentParser(description="Acceptance length of drafts trained on quantised states.")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/store_precision"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    text = json.dumps(measure(arguments), indent=2)
    print(text)
    if arguments.json is not None:
        write_text(arguments.json, text + "\n")


if __name__ == "__main__":
    main()
