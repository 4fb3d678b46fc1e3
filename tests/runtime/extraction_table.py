"""Hidden states of this runtime beside transformers' own, case by case; a table of the largest differences.

Layer 0 and the middle one are transformers' `hidden_states[i]`; the last one is what enters the final norm, taken by a
hook. float32. As a program it adds verifiers given by their folders and appends its lines to a report:

    python -m tests.runtime.extraction_table --verifier NAME=DIR --out out/extract_parity.json
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from speculators import LLM, SamplingParams
from speculators.formats.hidden_states import load_hidden_states
from tests.tiny_models import make_tokenizer, make_verifier

LENGTHS = (5, 17, 31, 40, 9, 60, 33, 50)
CHUNK = 48


@dataclass
class Line:
    """The largest difference of one layer in one case, and the largest state beside it."""

    model: str
    layer: int
    case: str
    max_abs_err: float = 0.0
    max_abs_state: float = 0.0
    files: int = 0
    runtime: str = "speculators"

    @property
    def passes(self) -> bool:
        """Within 1e-5 of the largest state, or of 1 where that is larger."""
        return self.files > 0 and self.max_abs_err <= 1e-5 * max(1.0, self.max_abs_state)


def make_tiny(folder: Path) -> dict[str, Path]:
    """Folders of tiny random verifiers: Llama, Qwen3 and Qwen3-MoE."""
    tokenizer = make_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    models = {
        "tiny qwen3": Qwen3ForCausalLM(Qwen3Config(**shape)),
        "tiny qwen3-moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)),
    }
    found = {"tiny llama": make_verifier(folder / "llama", num_layers=4)}
    for name, model in models.items():
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.2 * noise if key.endswith("norm.weight") else 0.08 * noise)
        found[name] = folder / name.replace(" ", "-")
        model.save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


class Reference:
    """Transformers' states [T, 3, H] of a sequence: layers 0, middle and last."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        last = self.model.config.num_hidden_layers
        self.layers = (0, last // 2, last)

    @torch.no_grad()
    def states(self, ids: list[int]) -> Tensor:
        """States of every token."""
        caught: list[Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0][0]))
        found = self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        hook.remove()
        return torch.stack([*(found[layer][0] for layer in self.layers[:2]), caught[0]], 1)


def table(name: str, verifier: Path, folder: Path) -> list[Line]:
    """Lines of a verifier; its files go below `folder`."""
    reference = Reference(verifier)
    lines: dict[tuple[str, int], Line] = {}
    for case, ids, states in _answers(verifier, reference.layers, folder):
        expected = reference.states(ids)
        for place, layer in enumerate(reference.layers):
            line = lines.setdefault((case, layer), Line(name, layer, case))
            line.files += 1
            line.max_abs_err = max(line.max_abs_err, float((states[:, place] - expected[:, place]).abs().max()))
            line.max_abs_state = max(line.max_abs_state, float(expected[:, place].abs().max()))
    return list(lines.values())


def _answers(verifier: Path, layers: tuple[int, ...], folder: Path) -> Iterator[tuple[str, list[int], Tensor]]:
    order = random.Random(3)
    batch = [[order.randrange(2, 300) for _ in range(length)] for length in LENGTHS]
    shuffled = order.sample(batch, len(batch))
    long = [[order.randrange(2, 300) for _ in range(length)] for length in (100, 150, 129)]
    for chunk in (2048, CHUNK):
        llm = _extracting(verifier, layers, folder / str(chunk), chunk)
        if chunk == CHUNK:
            yield from _case(llm, "in chunks", [long])
            yield from _case(llm, "in chunks, with output tokens", [long], max_tokens=4, outputs=True)
        else:
            yield from _case(llm, "alone", [[ids] for ids in batch[:4]])
            yield from _case(llm, "shuffled batch of 8", [shuffled])
            yield from _case(llm, "second call", [shuffled])
            yield from _case(llm, "with output tokens", [batch], max_tokens=7, outputs=True)
            yield from _case(llm, "prompt only, several tokens", [batch], max_tokens=7)
        llm.close()


def _case(
    llm: LLM, case: str, calls: list[list[list[int]]], *, max_tokens: int = 1, outputs: bool = False
) -> Iterator[tuple[str, list[int], Tensor]]:
    wishes = {"kv_transfer_params": {"include_output_tokens": True}} if outputs else None
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=wishes)
    for prompts in calls:
        for output in llm.generate(prompts, params, use_tqdm=False):
            assert output.kv_transfer_params is not None
            found = load_hidden_states(output.kv_transfer_params["hidden_states_path"], timeout=10)
            kept = output.outputs[0].token_ids[:-1] if outputs else []
            ids = output.prompt_token_ids + kept
            assert found["token_ids"].tolist() == ids
            yield case, ids, found["hidden_states"]


def _extracting(verifier: Path, layers: tuple[int, ...], folder: Path, chunk: int) -> LLM:
    hf_config = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    return LLM(
        str(verifier),
        dtype="float32",
        max_num_batched_tokens=chunk,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": hf_config},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    )


def main() -> None:
    """Print the table, and append its lines to a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = make_tiny(Path(scratch))
        folders |= {name: Path(path) for name, _, path in (one.partition("=") for one in arguments.verifier)}
        lines = [line for name, path in folders.items() for line in table(name, path, Path(scratch, name))]
    report = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.is_file() else []
    kept = [one for one in report if one.get("runtime") != "speculators"]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps([*kept, *map(asdict, lines)], indent=2) + "\n", encoding="utf-8")
    for line in lines:
        print(f"{line.model:22} layer {line.layer:2} {line.case:30} {line.max_abs_err:.1e} {line.files} files")
    if not all(line.passes for line in lines):
        raise SystemExit("some lines are wrong")


if __name__ == "__main__":
    main()
