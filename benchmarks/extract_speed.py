"""Local extraction beside the bare forward: same rows, same process, same threads, turn by turn.

Three ratios, each above 1 where this project is faster:

* `local_over_bare`: states of the layers computed by the verifier in process, against transformers' own forward without
  a head over padded batches of like size and length (SDPA, no cache, nothing kept);
* `written_over_computed`: the whole extraction, checks and files included, against the same states thrown away;
* `local_over_vllm`, with `--vllm-python`: the whole extraction against vLLM's engine with this project's connector, on
  the same rows, from the engine's first row to the last one read here; its start and a warm-up are not counted.

    python benchmarks/extract_speed.py --verifier DIR --data rows.jsonl --layers 2,15,27,30 \\
        --vllm-python .venv-vllm/bin/python --json benchmarks/results/extract.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from speculators.extract.filling import fill_store
from speculators.extract.local import LocalSource
from speculators.extract.prepared import PreparedData
from speculators.extract.run import PrepareOptions, prepare
from speculators.extract.store import StoreIdentity, StoreWriter
from speculators.extract.vllm_engine import VllmOptions, VllmSource
from speculators.formats.files import write_text
from speculators.runtime.verifier import Verifier


class BareForward:
    """Transformers' decoder without its head, over right-padded batches."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device) -> None:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="sdpa")
        self._decoder = model.get_decoder().to(device).eval()
        self._device = device

    @torch.inference_mode()
    def run(self, rows: list[Tensor], batch: list[int]) -> None:
        width = max(len(rows[i]) for i in batch)
        ids, mask = (torch.zeros(len(batch), width, dtype=torch.int64) for _ in range(2))
        for place, i in enumerate(batch):
            ids[place, : len(rows[i])] = rows[i]
            mask[place, : len(rows[i])] = 1
        options = {"attention_mask": mask.to(self._device)} if int(mask.sum()) < mask.numel() else {}
        self._decoder(input_ids=ids.to(self._device), use_cache=False, **options)


MAX_PADDING = 0.1
# Wall time, or the processor's, which other processes disturb less.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = CLOCKS["wall"]


def seconds(work: Callable[[], object]) -> float:
    """Time of a call, with the device's work done."""
    start = clock()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


def in_turn(calls: Sequence[Callable[[], object]], turn: int) -> list[float]:
    """Seconds of each call; every other turn they run in the opposite order."""
    order = range(len(calls))[:: -1 if turn % 2 else 1]
    spent = {place: seconds(calls[place]) for place in order}
    return [spent[place] for place in range(len(calls))]


def padded_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Row numbers, longest first, in batches that padding fills to at most `batch_tokens`, a tenth of it at most."""
    batches: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = (len(batches[-1]) + 1) * lengths[batches[-1][0]] if batches else 0
        if not batches or size > batch_tokens or size - tokens - lengths[row] > MAX_PADDING * size:
            batches.append([])
            tokens = 0
        batches[-1].append(row)
        tokens += lengths[row]
    return batches


@dataclass(frozen=True)
class Work:
    """The rows, as each of those that are compared takes them."""

    rows: list[Tensor]
    batches: list[list[int]]
    data: PreparedData
    identity: StoreIdentity

    @property
    def padded_tokens(self) -> int:
        """Tokens of the bare forward's batches, with their padding."""
        return sum(len(batch) * max(len(self.rows[i]) for i in batch) for batch in self.batches)

    def compare(self, bare: BareForward, source: LocalSource, folder: Path, shard_mib: int, turn: int) -> list[float]:
        """Seconds of the bare forward, of the states, and of the states computed, checked and written."""
        with StoreWriter(folder, self.identity, self.data.lengths, shard_bytes=shard_mib * 2**20) as writer:
            shards = [self.rows[shard.first : shard.last] for shard in writer.missing]
            return in_turn(
                (
                    lambda: [bare.run(self.rows, batch) for batch in self.batches],
                    lambda: [begun.result() for begun in [source.begin(some, lambda *_: None) for some in shards]],
                    lambda: fill_store(source, self.data, writer, progress=False),
                ),
                turn,
            )


def measure_vllm(arguments: argparse.Namespace, rows: list[Tensor], layers: tuple[int, ...]) -> float:
    """Seconds until the states of all rows are here; the engine ends before others use the processor again."""
    options = VllmOptions(python=arguments.vllm_python, keywords={"dtype": arguments.dtype})
    with VllmSource(arguments.verifier, layers, max(map(len, rows)), options) as source:
        source.states(rows[-2:], lambda *_: None)
        started = time.perf_counter()
        found = source.states(rows, lambda *_: None)
        spent = time.perf_counter() - started
    assert all(isinstance(one, Tensor) for one in found), found
    return spent


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of a run: medians over the rounds, ratios within each."""
    global clock
    clock = CLOCKS[arguments.clock]
    verifier = Verifier.from_pretrained(arguments.verifier, dtype=arguments.dtype)
    bare = BareForward(arguments.verifier, verifier.dtype, verifier.device)
    layers = tuple(int(one) for one in arguments.layers.split(","))
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        options = PrepareOptions(limit=arguments.rows, max_length=arguments.max_length)
        data = prepare(arguments.verifier, arguments.data, Path(scratch) / "prepared", options, progress=False)
        identity = StoreIdentity(
            arguments.verifier, "0" * 64, tuple(one for one in layers if one < verifier.num_layers),
            verifier.num_layers, verifier.hidden_size, arguments.store_dtype, data.template_hash, data.rows_hash,
        )  # fmt: skip
        rows = [data[row][0] for row in range(len(data))]
        work = Work(rows, padded_batches(data.lengths, arguments.batch_tokens), data, identity)
        source = LocalSource(verifier, identity, batch_tokens=arguments.batch_tokens)
        work.compare(bare, source, Path(scratch) / "warm", arguments.shard_mib, 0)
        rounds, by_vllm = [], []
        for turn in range(arguments.rounds):
            rounds.append(work.compare(bare, source, Path(scratch) / f"store{turn}", arguments.shard_mib, turn))
            if arguments.vllm_python is not None:
                by_vllm.append(measure_vllm(arguments, rows, identity.layer_ids))
    report: dict[str, Any] = {
        "verifier": Path(arguments.verifier).name,
        "rows": len(data),
        "tokens": data.num_tokens,
        "layers": list(identity.layer_ids),
        "dtype": str(verifier.dtype).removeprefix("torch."),
        "store_dtype": arguments.store_dtype,
        "clock": arguments.clock,
        "threads": torch.get_num_threads(),
        "batch_tokens": arguments.batch_tokens,
        "bare_batches": len(work.batches),
        "bare_padding": round(1 - data.num_tokens / work.padded_tokens, 4),
    }
    for place, name in enumerate(("bare", "local", "written")):
        median = statistics.median(one[place] for one in rounds)
        report[f"{name}_tokens_per_second"] = round(data.num_tokens / median, 1)
    ratios = {
        "local_over_bare": [bare_seconds / local for bare_seconds, local, _ in rounds],
        "written_over_computed": [local / written for _, local, written in rounds],
    }
    if by_vllm:
        report["vllm_tokens_per_second"] = round(data.num_tokens / statistics.median(by_vllm), 1)
        ratios["local_over_vllm"] = [theirs / ours[2] for theirs, ours in zip(by_vllm, rounds, strict=True)]
    for name, found in ratios.items():
        report[name] = round(statistics.median(found), 3)
        report[f"{name}_by_round"] = [round(one, 3) for one in found]
    return report


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Speed of local extraction beside the bare forward.")
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--data", required=True, help="conversations")
    parser.add_argument("--layers", default="2,15,27,30")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--shard-mib", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--store-dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--scratch", default=None)
    parser.add_argument("--vllm-python", type=Path, default=None, help="the Python that has vLLM")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write what was measured."""
    arguments = parse()
    report = measure(arguments)
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.json is not None:
        write_text(arguments.json, text + "\n")


if __name__ == "__main__":
    main()
