"""Local extraction beside the bare forward it cannot do without: same rows, same batches, same process, turn by turn.

Three ratios, each above 1 where this project is faster:

* `local_over_bare`: states of the layers computed by the verifier in process, against transformers' own forward of the
  same padded batches without a head (SDPA, no cache, nothing kept);
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from speculators.extract.filling import fill_store
from speculators.extract.local import LocalSource, batches_by_length
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


def compare_forwards(
    bare: BareForward, verifier: Verifier, rows: list[Tensor], batches: list[list[int]], layers: tuple[int, ...]
) -> tuple[float, float]:
    """Seconds of the bare forward and of the capture over all batches, alternating within each batch."""
    spent = [0.0, 0.0]
    for number, batch in enumerate(batches):
        tokens = [rows[i].tolist() for i in batch]
        calls: list[Callable[[], object]] = [
            lambda batch=batch: bare.run(rows, batch),  # type: ignore[misc]
            lambda tokens=tokens: verifier.capture(tokens, layers),  # type: ignore[misc]
        ]
        for place in (0, 1) if number % 2 else (1, 0):
            spent[place] += seconds(calls[place])
    return spent[0], spent[1]


def compare_writing(
    source: LocalSource, data: PreparedData, identity: StoreIdentity, folder: Path, shard_bytes: int
) -> tuple[float, float]:
    """Seconds to compute all states shard by shard, and to compute, check and write them."""
    with StoreWriter(folder, identity, data.lengths, shard_bytes=shard_bytes) as writer:
        shards = [[data[row][0] for row in range(shard.first, shard.last)] for shard in writer.missing]
        written = seconds(lambda: fill_store(source, data, writer, progress=False))
    computed = seconds(lambda: [source.states(rows, lambda *_: None) for rows in shards])
    return computed, written


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
    """All figures of a run: medians over the rounds."""
    global clock
    clock = CLOCKS[arguments.clock]
    verifier = Verifier.from_pretrained(arguments.verifier, dtype=arguments.dtype)
    bare = BareForward(arguments.verifier, verifier.dtype, verifier.device)
    layers = tuple(int(one) for one in arguments.layers.split(","))
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        options = PrepareOptions(limit=arguments.rows, max_length=arguments.max_length)
        data = prepare(arguments.verifier, arguments.data, Path(scratch) / "prepared", options, progress=False)
        rows = [data[row][0] for row in range(len(data))]
        batches = list(batches_by_length(data.lengths, arguments.batch_tokens))
        padded = sum(len(batch) * max(data.lengths[i] for i in batch) for batch in batches)
        identity = StoreIdentity(
            arguments.verifier, "0" * 64, tuple(one for one in layers if one < verifier.num_layers),
            verifier.num_layers, verifier.hidden_size, arguments.store_dtype, data.template_hash, data.rows_hash,
        )  # fmt: skip
        source = LocalSource(verifier, identity, batch_tokens=arguments.batch_tokens)
        compare_forwards(bare, verifier, rows, batches[-2:], identity.layer_ids)
        forwards, writings, by_vllm = [], [], []
        for turn in range(arguments.rounds):
            forwards.append(compare_forwards(bare, verifier, rows, batches, identity.layer_ids))
            store = Path(scratch) / f"store{turn}"
            writings.append(compare_writing(source, data, identity, store, arguments.shard_mib * 2**20))
            if arguments.vllm_python is not None:
                by_vllm.append(measure_vllm(arguments, rows, identity.layer_ids))
    tokens = data.num_tokens
    bare_seconds, local_seconds = (statistics.median(one[place] for one in forwards) for place in (0, 1))
    computed, written = (statistics.median(one[place] for one in writings) for place in (0, 1))
    report: dict[str, Any] = {
        "verifier": Path(arguments.verifier).name,
        "rows": len(data),
        "tokens": tokens,
        "layers": list(identity.layer_ids),
        "dtype": str(verifier.dtype).removeprefix("torch."),
        "store_dtype": arguments.store_dtype,
        "clock": arguments.clock,
        "threads": torch.get_num_threads(),
        "batch_tokens": arguments.batch_tokens,
        "batches": len(batches),
        "padding": round(1 - tokens / padded, 4),
        "bare_tokens_per_second": round(tokens / bare_seconds, 1),
        "local_tokens_per_second": round(tokens / local_seconds, 1),
        "written_tokens_per_second": round(tokens / written, 1),
        "local_over_bare": round(bare_seconds / local_seconds, 3),
        "written_over_computed": round(computed / written, 3),
        "local_over_bare_by_round": [round(one / other, 3) for one, other in forwards],
        "written_over_computed_by_round": [round(one / other, 3) for one, other in writings],
    }
    if by_vllm:
        report["vllm_tokens_per_second"] = round(tokens / statistics.median(by_vllm), 1)
        report["local_over_vllm"] = round(statistics.median(by_vllm) / written, 3)
        report["local_over_vllm_by_round"] = [
            round(one / other[1], 3) for one, other in zip(by_vllm, writings, strict=True)
        ]
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
    parser.add_argument("--shard-mib", type=int, default=32)
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
