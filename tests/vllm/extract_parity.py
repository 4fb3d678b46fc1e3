"""Referee: hidden states that real vLLM writes through our connector, against those of transformers, in float32.

    extract_parity.py --vllm-python VLLM/bin/python --out out/extract_parity.json [--smollm2 DIR] [--model NAME]

Tiny random Qwen3, Llama and Qwen3-MoE verifiers, and SmolLM2 where its folder is given. Layers 0 and the middle one are
transformers' `hidden_states[i]`; the last one is the input of the final norm, taken by a hook, since transformers' own
last entry comes after it. Prompts are sent alone, in a shuffled batch of eight, again, in chunks, with prefix-cache
hits, with output tokens, up to `max_model_len`, with a path of their own, and by `extract --source vllm`. A path out of
the root has to be refused, and a request that is aborted has to leave nothing.

The report is a list of `{model, layer, case, max_abs_err, max_rel_err, files, cached_tokens, refused}`. What passes is
a `max_rel_err` of 1e-5: a row's error over the largest number in that row up to that layer, or over 1 where that is
less. In a real model such numbers reach 30,000, where one step of a float32 is 0.002.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from speculators.errors import StoreError
from speculators.extract.run import extract
from speculators.extract.vllm_engine import VllmOptions
from speculators.formats.hidden_states import cleanup_hidden_states, load_hidden_states, read_layer_ids

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from tests.extract.rows import EXACT, prepare_rows  # noqa: E402 - found by the path above
from tests.tiny_models import make_tokenizer, make_verifier  # noqa: E402 - found by the path above

TOLERANCE, WAIT_SECONDS, BLOCK, LENGTH = 1e-5, 60.0, 32, 256
CONNECTOR = "SpeculatorsHiddenStatesConnector"
ESCAPING = "a path outside the root"


@dataclass(frozen=True)
class Verifier:
    """A verifier's folder, and how many layers it has."""

    name: str
    folder: Path
    num_layers: int

    @property
    def layers(self) -> list[int]:
        return [0, self.num_layers // 2, self.num_layers]


def fill(model: PreTrainedModel, seed: int) -> None:
    """Random weights, and norms that are not ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.08 * noise)


def make_qwen3(folder: Path, *, experts: bool) -> Path:
    tokenizer = make_tokenizer()
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if experts:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**shared, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shared))
    fill(model, 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def requests_of(verifier: Verifier) -> list[dict]:
    """What is asked of vLLM, engine by engine; token ids stay below every vocabulary."""
    order = random.Random(3)

    def prompt(length: int) -> list[int]:
        return [order.randrange(2, 300) for _ in range(length)]

    batch = [prompt(length) for length in (5, 17, 31, 40, 9, 60, 33, 50)]
    shuffled = order.sample(batch, len(batch))
    long, stem = [prompt(length) for length in (100, 150, 129)], prompt(3 * BLOCK + 4)
    one = {"max_tokens": 1, "include_output_tokens": False, "together": True}
    several = {"max_tokens": 7, "include_output_tokens": True, "together": True}
    whole = [
        {"case": "alone", "prompts": batch[:4], **one, "together": False},
        {"case": "shuffled batch of 8", "prompts": shuffled, **one},
        {"case": "second call", "prompts": shuffled, **one},
        {"case": "prefix-cache hits", "prompts": [stem, [*stem, 7, 8], stem], **one, "together": False},
        {"case": "with output tokens", "prompts": batch, **several},
        {"case": "up to max_model_len", "prompts": [prompt(LENGTH - 2 - n) for n in range(8)], **several},
        {"case": "a path of its own", "prompts": [prompt(20)], **one, "path": "mine/own.safetensors"},
        {"case": ESCAPING, "prompts": [prompt(20)], **one, "path": "../outside.safetensors"},
    ]
    chunked = [
        {"case": "in chunks", "prompts": long, **one},
        {"case": "in chunks, with output tokens", "prompts": [prompt(90), prompt(130)], **several},
    ]
    # Layers in another order: vLLM keeps them ascending, and so must what the file says.
    asked = {"model": str(verifier.folder), "layers": verifier.layers[1:] + verifier.layers[:1]}
    engine = {"max_model_len": LENGTH, "block_size": BLOCK, "enable_prefix_caching": True}
    at_once = {**engine, "enable_chunked_prefill": False, "max_num_batched_tokens": 4 * LENGTH}
    in_chunks = {**engine, "enable_chunked_prefill": True, "max_num_batched_tokens": 48}
    return [{**asked, "engine": at_once, "cases": whole}, {**asked, "engine": in_chunks, "cases": chunked}]


def ask(python: Path, verifiers: list[Verifier], work: Path) -> Iterator[tuple[Verifier, dict]]:
    """Yield what vLLM answers to every prompt; the first verifier is served by the plugin's name alone."""
    plugin = work / "site"
    install_entry_point(plugin)
    requests, asked = [], []
    for verifier in verifiers:
        first = verifier is verifiers[0]
        for request in requests_of(verifier):
            folder = str(work / f"states-{len(requests)}")
            options = {"shared_storage_path": folder, "allow_custom_save_path": True}
            transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_producer", "kv_connector_extra_config": options}
            module = {} if first else {"kv_connector_module_path": "speculators.extract.vllm_connector"}
            requests.append({**request, "transfer": {**transfer, **module}})
            asked.append(verifier)
    question, answer = work / "request.json", work / "answer.json"
    question.write_text(json.dumps(requests), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OMP_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(plugin), str(ROOT)])
    script = HERE / "extract_with_vllm.py"
    subprocess.run([python, script, question, answer], check=True, env=environment, cwd=work)
    for verifier, rows in zip(asked, json.loads(answer.read_text(encoding="utf-8")), strict=True):
        for row in rows:
            yield verifier, row


def install_entry_point(folder: Path) -> None:
    """What an installation of this package leaves for vLLM to find: its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"speculators-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: speculators\nVersion: {project['version']}\n")
    lines = [f"{name} = {target}" for name, target in project["entry-points"]["vllm.general_plugins"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))


class Reference:
    """transformers' own states of a sequence of ids."""

    def __init__(self, verifier: Verifier) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(verifier.folder, dtype=torch.float32).eval()
        self._layers = verifier.layers
        self._last: list[Tensor] = []
        self._model.model.norm.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._last = [inputs[0][0]]

    @torch.no_grad()
    def states(self, token_ids: list[int]) -> list[tuple[Tensor, Tensor]]:
        """For each layer the states [T, H], and the largest number [T] in a row's stream until there, at least 1."""
        found = [one[0] for one in self._model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states]
        found[-1] = self._last[0]
        sizes = torch.stack([one.abs().amax(dim=-1) for one in found]).cummax(dim=0).values.clamp_min(1)
        return [(found[layer], sizes[layer]) for layer in self._layers]


class Report:
    """Lines of one verifier, one for each layer of each case."""

    def __init__(self, verifier: Verifier) -> None:
        self.lines: dict[tuple[str, int], dict] = {}
        self._verifier = verifier
        self._reference = Reference(verifier)

    def add(self, case: str, token_ids: list[int], found: Tensor | str, num_cached: int = 0) -> None:
        """Compare the states [T, A, H] of some ids, or note why there are none."""
        expected = self._reference.states(token_ids)
        for place, (layer, (right, sizes)) in enumerate(zip(self._verifier.layers, expected, strict=True)):
            line = self.lines.setdefault(
                (case, layer),
                {
                    "model": self._verifier.name,
                    "layer": layer,
                    "case": case,
                    "max_abs_err": 0.0,
                    "max_rel_err": 0.0,
                    "files": 0,
                    "cached_tokens": 0,
                    "refused": [],
                },
            )
            line["cached_tokens"] += num_cached
            if isinstance(found, str):
                line["refused"].append(found)
                continue
            line["files"] += 1
            errors = (found[:, place] - right).abs().amax(dim=-1)
            line["max_abs_err"] = max(line["max_abs_err"], float(errors.max()))
            line["max_rel_err"] = max(line["max_rel_err"], float((errors / sizes).max()))


def compare(verifier: Verifier, rows: list[dict]) -> list[dict]:
    """A line for each layer of each case that vLLM was asked for directly."""
    report = Report(verifier)
    for row in rows:
        report.add(row["case"], row["token_ids"], read(row, verifier), row["num_cached"] or 0)
    return list(report.lines.values())


def compare_source(verifier: Verifier, python: Path, work: Path) -> list[dict]:
    """A line for each layer of rows that `speculators extract --source vllm` has stored."""
    engine = VllmOptions(python=python, folder=work, keywords={"enforce_eager": True})
    options = replace(EXACT, source="vllm", vllm=engine)
    prepared = prepare_rows(verifier.folder, work)
    store = extract(verifier.folder, prepared.directory, work / "store", verifier.layers[:-1], options)
    report = Report(verifier)
    for sample in (store[number] for number in range(len(prepared))):
        found = torch.cat([sample.aux_hidden_states, sample.last_hidden_states[:, None]], dim=1)
        report.add("stored by the vllm source", sample.input_ids.tolist(), found)
    return list(report.lines.values())


def read(row: dict, verifier: Verifier) -> Tensor | str:
    """The states [T, A, H] of a request, or why there are none; then nothing of it is left."""
    if row["error"] is not None:
        return row["error"]
    try:
        found = load_hidden_states(row["path"], timeout=WAIT_SECONDS)
        assert found["token_ids"].tolist() == row["token_ids"], f"{row['case']}: other tokens"
        assert row["stock_shape"] == list(found["hidden_states"].shape), f"{row['case']}: vLLM reads it otherwise"
        assert read_layer_ids(row["path"]) == tuple(verifier.layers)
    except StoreError as error:
        assert row["stock_shape"] is None, f"{row['case']}: vLLM reads what is refused here"
        return str(error)
    finally:
        cleanup_hidden_states(row["path"])
    return found["hidden_states"]


def passes(line: dict) -> bool:
    if line["case"] == ESCAPING:
        return line["files"] == 0 and all("expected a file below" in reason for reason in line["refused"])
    right = line["max_rel_err"] <= TOLERANCE
    return right and not line["refused"] and (line["case"] != "prefix-cache hits" or line["cached_tokens"] > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--smollm2", type=Path, help="SmolLM2's folder, where it is to be compared too")
    parser.add_argument("--model", action="append", default=[], help="only these models")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        verifiers = [
            Verifier("tiny qwen3", make_qwen3(work / "qwen3", experts=False), 4),
            Verifier("tiny llama", make_verifier(work / "llama", num_layers=4), 4),
            Verifier("tiny qwen3-moe", make_qwen3(work / "qwen3-moe", experts=True), 4),
        ]
        if args.smollm2 is not None:
            verifiers.append(Verifier("smollm2-135m-instruct", args.smollm2.absolute(), 30))
        verifiers = [one for one in verifiers if not args.model or one.name in args.model]
        answers = list(ask(args.vllm_python.absolute(), verifiers, work))
        report = [
            line
            for verifier in verifiers
            for line in compare(verifier, [row for asked, row in answers if asked is verifier])
        ]
        report += compare_source(verifiers[0], args.vllm_python, work)
        left = [file.name for states in work.glob("states-*") for file in states.rglob("*.*")]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for line in report:
        print(
            f"{line['model']:22} layer {line['layer']:2} {line['case']:30} {line['max_abs_err']:.1e} "
            f"(relative {line['max_rel_err']:.1e}), "
            f"{line['files']} files, {len(line['refused'])} refused, {line['cached_tokens']} cached tokens"
        )
    wrong = [line for line in report if not passes(line)]
    print(f"{len(report)} lines, {len(wrong)} wrong, left behind: {left}; report in {args.out}")
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
