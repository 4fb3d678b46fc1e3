"""The runs of `train_compare.py`: states for both trainers, a process for each training, one evaluator for both."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare_families import AUX_LAYERS, ROW_LENGTH, Comparison, blocks_a_row, peer_flags
from datasets import Dataset
from safetensors.torch import save_file

from speculators.extract.prepared import DRAFT_VOCAB, read_draft_vocab
from speculators.extract.store import HiddenStatesStore
from speculators.formats.files import write_text
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models import FAMILIES
from speculators.models.eagle3.draft import Eagle3Draft
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from speculators.train.dataset import PackedRows
from speculators.train.metrics import MetricSums
from speculators.train.recipe import DataConfig, Recipe
from speculators.train.stages import Run

HERE = Path(__file__).resolve().parent
FINISHED = "finished.json"


def data_folder(arguments: argparse.Namespace) -> Path:
    """Where the rows that were asked for lie as both trainers read them."""
    folder: Path = arguments.out / f"data-{arguments.rows or 'all'}-{arguments.draft_vocab_size}"
    return folder


def extract_states(name: str, rows: Path, arguments: argparse.Namespace) -> Run:
    """Token ids and hidden states of a file of rows; what is there already is kept. All families read the same."""
    recipe = Recipe(
        name=name,
        verifier=arguments.verifier,
        family="eagle3",
        draft=Eagle3Draft(draft_vocab_size=arguments.draft_vocab_size, aux_layer_ids=list(AUX_LAYERS)),
        data=DataConfig(train=(str(rows),), max_length=ROW_LENGTH, limit=arguments.rows, validation_rows=0),
        out=str(data_folder(arguments) / name),
    )
    run = Run(recipe)
    run.run(["prepare-data", "extract"])
    return run


@dataclass(frozen=True)
class PeerData:
    """What the peer reads: a dataset, training rows first, a file of states a row, and the vocabulary's map."""

    folder: Path
    train_share: float

    @classmethod
    def written(cls, trained: Run, heldout: Run, folder: Path) -> PeerData:
        """Write it, where it is not there already."""
        stores = [HiddenStatesStore.open(run.outputs.states) for run in (trained, heldout)]
        # Half a row more than the training rows, so that rounding down gives exactly those.
        data = cls(folder, (len(stores[0]) + 0.5) / sum(map(len, stores)))
        if not (folder / FINISHED).exists():
            shutil.rmtree(folder, ignore_errors=True)
            data._write(stores)
            vocab = read_draft_vocab(trained.outputs.prepared / DRAFT_VOCAB)
            np.save(folder / "d2t.npy", vocab.d2t.numpy())
            np.save(folder / "t2d.npy", vocab.t2d.numpy())
            write_text(folder / FINISHED, "{}\n")
        return data

    def _write(self, stores: Sequence[HiddenStatesStore]) -> None:
        states, table = self.folder / "hidden_states", []
        states.mkdir(parents=True)
        for sample in (store[row] for store in stores for row in range(len(store))):
            layers = torch.cat([sample.aux_hidden_states, sample.last_hidden_states[:, None]], dim=1)
            tensors = {"hidden_states": layers.contiguous(), "token_ids": sample.input_ids.contiguous()}
            save_file(tensors, str(states / f"hs_{len(table)}.safetensors"))
            ids, mask = sample.input_ids.tolist(), sample.loss_mask.long().tolist()
            table.append({"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)})
        Dataset.from_list(table).with_format("torch").save_to_disk(str(self.folder / "dataset"))


@dataclass(frozen=True)
class Trained:
    """What one training left: a line for each step, one evaluation of the peer's own a pass, and the other figures."""

    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    figures: dict[str, Any]
    speculator: Path

    @classmethod
    def read(cls, record: Path, speculator: Path) -> Trained:
        """Read what `our_trainer.py` or `peer_trainer.py` recorded."""
        lines = [json.loads(text) for text in record.read_text(encoding="utf-8").splitlines()]
        rest = {key: value for line in lines if "epoch" not in line for key, value in line.items()}
        validations = [line for line in lines if "validation" in line]
        return cls([line for line in lines if "tokens" in line], validations, rest, speculator)

    def throughput(self, warmup: int) -> dict[str, float]:
        """Tokens per second after a warm-up, time to read rows and write checkpoints left out."""
        counted = self.steps[warmup:]
        if not counted:
            raise SystemExit(f"{len(self.steps)} steps leave none after a warm-up of {warmup}; give more --steps")
        tokens, seconds = (sum(step[key] for step in counted) for key in ("tokens", "seconds"))
        return {"steps": len(counted), "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}

    @property
    def memory(self) -> dict[str, int]:
        """Bytes: what the imports take, the most that the process had, and how much more that is."""
        imports, peak = self.figures["imports_bytes"], self.figures["run_peak_bytes"]
        return {"imports": imports, "peak": peak, "above_imports": peak - imports}


class Trainers:
    """Both trainers on one family's data; a training that has ended once is not repeated."""

    def __init__(self, arguments: argparse.Namespace, comparison: Comparison) -> None:
        self.arguments, self.comparison = arguments, comparison
        self.trained = extract_states("train", arguments.train, arguments)
        self.heldout = extract_states("heldout", arguments.heldout, arguments)
        self.peer_data = PeerData.written(self.trained, self.heldout, data_folder(arguments) / "peer")
        self.verifier = str(self.trained.verifier)
        store = HiddenStatesStore.open(self.trained.outputs.states)
        self.rows, self.tokens = len(store), store.num_tokens
        self.mask_token_id = self.trained.speculator_config.verifier_vocab_size - 1
        self.blocks_a_row = None
        if comparison.blocks:
            rows = PackedRows(store, ROW_LENGTH).plan(0).rows
            self.blocks_a_row = blocks_a_row(store, rows, comparison.objective)
        self.draft = {**comparison.draft, "draft_vocab_size": arguments.draft_vocab_size}
        self.draft["aux_layer_ids"] = list(AUX_LAYERS)

    def ours(self, folder: Path, *, epochs: int, max_steps: int | None) -> Trained:
        """Train this project's draft."""
        job = {
            "family": self.arguments.family,
            "verifier": self.verifier,
            "prepared": str(self.trained.outputs.prepared.resolve()),
            "states": str(self.trained.outputs.states.resolve()),
            "draft": self.draft,
            "objective": self.comparison.objective,
            "train": {**self.comparison.train, "epochs": epochs, "max_steps": max_steps, "row_length": ROW_LENGTH},
            "threads": self.arguments.threads,
            "out": str(folder.resolve()),
        }
        # One measurement and one checkpoint, at the end: the peer's last draft is compared with this trainer's last.
        job["train"] |= {"measure_every": 10**9, "checkpoint_every": 10**9}
        words = [sys.executable, str(HERE / "our_trainer.py"), "job.json", "steps.jsonl"]
        self._run(folder, words, {"PYTHONPATH": str(HERE.parent)}, {"job.json": json.dumps(job, indent=2)})
        return Trained.read(folder / "steps.jsonl", folder / "speculator")

    def peer(self, folder: Path, *, epochs: int, max_steps: int | None) -> Trained:
        """Train the peer's draft."""
        data = self.peer_data
        options: dict[str, Any] = {
            "speculator-type": self.arguments.family,
            "verifier-name-or-path": self.verifier,
            "data-path": data.folder.resolve() / "dataset",
            "hidden-states-path": data.folder.resolve() / "hidden_states",
            "d2t-path": data.folder.resolve() / "d2t.npy",
            "t2d-path": data.folder.resolve() / "t2d.npy",
            "train-data-ratio": data.train_share,
            "on-missing": "raise",
            "draft-vocab-size": self.arguments.draft_vocab_size,
            "total-seq-len": ROW_LENGTH,
            "loss-implementation": "eager",
            "num-workers": 0,
            "checkpoint-freq": 1,
            "epochs": epochs,
            "save-path": folder.resolve() / "checkpoints",
            **self.comparison.peer,
        }
        if self.comparison.blocks:
            # Of its own choice it would be a token of the text.
            options["mask-token-id"] = self.mask_token_id
        if max_steps is not None:
            options["max-steps"] = max_steps
        words = [str(self.arguments.peer_python.absolute()), str(HERE / "peer_trainer.py"), "steps.jsonl", "train"]
        layers = ["--target-layer-ids", *map(str, AUX_LAYERS)]
        self._run(folder, [*words, *peer_flags(options), *layers], {}, {})
        newest = max((folder / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
        return Trained.read(folder / "steps.jsonl", newest)

    def _run(self, folder: Path, words: list[str], variables: dict[str, str], files: dict[str, str]) -> None:
        """Run a command in a fresh folder, unless the same one has ended well there before."""
        asked = json.dumps({"words": words, "files": files, "threads": self.arguments.threads})
        if (folder / FINISHED).is_file() and (folder / FINISHED).read_text(encoding="utf-8") == asked:
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, text in files.items():
            write_text(folder / name, text)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"OMP_NUM_THREADS": str(self.arguments.threads), **variables}
        with (folder / "log.txt").open("w", encoding="utf-8") as log:
            done = subprocess.run(words, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"a training ended with exit code {done.returncode}; see {folder / 'log.txt'}")
        write_text(folder / FINISHED, asked)

    @torch.no_grad()
    def heldout_accuracy(self, directory: Path) -> dict[str, Any]:
        """How often a saved draft is right on the held-out rows, in float32, at every place that has supervision.

        `cumulative`: drafts 0..k all right, of the places that reach draft k; `conditional`: draft k, given those
        before it were; `each`: draft k whatever those before it were, of a block drafter. What a slot reads of tokens
        before it are the data's. Right is what the verifier finds likeliest, in the draft's vocabulary.
        """
        weights = load_verifier_weights(self.verifier)
        speculator = Speculator.from_pretrained(directory, dtype=torch.float32)
        if speculator.draft.missing_tensors():
            speculator.attach_verifier(weights)
        speculator.draft.eval()
        everywhere = {"max_anchors": ROW_LENGTH, "max_blocks": None} if self.comparison.blocks else {}
        knobs = {**self.comparison.objective, **everywhere}
        objective = FAMILIES[self.arguments.family].objective(**knobs)
        head = VerifierHead.from_weights(weights).to("cpu", torch.float32)
        store = HiddenStatesStore.open(self.heldout.outputs.states, aux_layer_ids=speculator.config.aux_layer_ids)
        rows, sums = PackedRows(store, ROW_LENGTH), MetricSums()
        for batches in rows.step_batches(0, rows.steps(0, 1, 1), torch.device("cpu"), prefetch=False):
            sums.add(objective.step(speculator.draft, batches[0], head).metrics)
        first = 0 if "position_0_acc" in sums.counts else 1
        names = {"cumulative": "full_acc_{}", "conditional": "cond_acc_{}"}
        found: dict[str, Any] = {
            kind: [sums.rate(name.format(k)) for k in range(self.comparison.positions)] for kind, name in names.items()
        }
        if self.comparison.blocks:
            slots = range(first, first + self.comparison.positions)
            found["each"] = [sums.rate(f"position_{slot}_acc") for slot in slots]
        return {**found, "expected_acceptance_length": objective.acceptance_length(sums.counts)}
