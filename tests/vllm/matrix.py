"""Every kind of draft that vLLM serves on a CPU, in vLLM and in our runtime.

    matrix.py --vllm-python VLLM/bin/python --out out/vllm_matrix.json [--work DIR] [--case PART]

Speculators have learnt their lesson by heart; their directories go to vLLM unmodified and auto-detected. Beside them
both engines are given the verifier and one `speculative_config`: n-grams, with prompts that repeat themselves, and
language models that draft, from the verifier itself to a stranger. Greedy float32 outputs must be those without drafts
and ours, and the steps, the drafted tokens and the tokens accepted at each position as many as in our runtime. The
report is a list of `{case, identical, ours_equal_vllm, counts_equal, method, ours, vllm}`, the last two with
`num_drafts`, `num_draft_tokens` and `accepted_per_position`.

No answer reaches the engine's length: before it, vLLM 0.32 rejects drafts that are what it then writes.

On a CPU, vLLM 0.32 norms the context keys of all DFlash layers with the gain of the first: its CPU `rms_norm` reads one
row of the stacked gains, where its GPU kernel reads one a layer. So that both engines compute one function, the layers
of a DFlash draft are given one gain here after training; everything else about them differs.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from speculators.models.speculator import Speculator

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from tests.vllm.compare import Run, chat_ids, compare, faults, read_prompts  # noqa: E402 - found by the path above
from tests.vllm.tiny_speculator import (  # noqa: E402 - found by the path above
    Choice,
    disturbed,
    learn,
    make_lesson,
    make_stranger,
)

REDUCED, MASK = 256, 383
_BLOCKS = {"num_layers": 2, "block_size": 4, "mask_token_id": MASK}
CASES: dict[str, Choice] = {
    "eagle3 llama, 3 aux layers, reduced vocabulary": Choice("eagle3", {"draft_vocab_size": REDUCED}),
    "eagle3 llama, 4 aux layers, full vocabulary": Choice(
        "eagle3", {"draft_vocab_size": None, "aux_layer_ids": [1, 3, 5, 8]}
    ),
    "eagle3 qwen3, 3 aux layers, full vocabulary": Choice(
        "eagle3", {"layer_type": "qwen3", "draft_vocab_size": None, "norm_before_fc": False, "fc_norm": True}
    ),
    "eagle3 qwen3, 4 aux layers, reduced vocabulary": Choice(
        "eagle3",
        {"layer_type": "qwen3", "draft_vocab_size": REDUCED, "aux_layer_ids": [1, 3, 5, 8], "norm_output": False},
    ),
    "peagle": Choice(
        "peagle", {"num_layers": 2, "draft_vocab_size": REDUCED, "mask_token_id": MASK, "num_speculative_tokens": 4}
    ),
    "dflash non-causal, full vocabulary": Choice(
        "dflash", {**_BLOCKS, "draft_vocab_size": None, "sliding_window_non_causal": True}
    ),
    "dflash causal, full vocabulary": Choice(
        "dflash", {**_BLOCKS, "draft_vocab_size": None, "sliding_window_non_causal": False}
    ),
    "dflash non-causal, reduced vocabulary": Choice(
        "dflash", {**_BLOCKS, "draft_vocab_size": REDUCED, "sliding_window_non_causal": True}
    ),
}
# Without a speculator. What the keys about lengths leave out, one mirrors from the other, or both are 5.
LOOKUPS: dict[str, dict[str, Any]] = {
    "ngram, 2 to 4 tokens": {"num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "ngram, 1 token": {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 1},
    "ngram, 3 tokens by max alone": {"num_speculative_tokens": 7, "prompt_lookup_max": 3},
    "ngram, 5 tokens by default": {"num_speculative_tokens": 4},
}
# A draft model, and how much noise its weights have beside the verifier's; None for one of other sizes and weights.
MODELS: dict[str, float | None] = {
    "draft_model, the verifier itself": 0.0,
    "draft_model, near the verifier": 0.003,
    "draft_model, a stranger": None,
}
STRANGER = "draft_model, a stranger"
REPETITIVE = (
    "one two three one two three one two three one two three one two",
    "Say it again: the old oak tree, the old oak tree, the old oak tree, the old",
    "a a a a a a a a b a a a a b a a a",
)


def share_key_norms(directory: Path) -> None:
    """Give all layers of a saved draft the key norm of the first."""
    speculator = Speculator.from_pretrained(directory)
    norms = [tensor for name, tensor in speculator.draft.named_parameters() if name.endswith("k_norm.weight")]
    with torch.no_grad():
        for norm in norms[1:]:
            norm.copy_(norms[0])
    speculator.save_pretrained(directory)


def compare_speculators(names: Sequence[str], work: Path, python: Path, args: argparse.Namespace) -> list[dict]:
    """Reports of `CASES`, whose drafts are trained first."""
    if not names:
        return []
    texts = read_prompts(args.prompts)[: args.limit]
    verifier, rows = make_lesson(work, texts, args.max_tokens)
    runs = []
    for name in names:
        folder = learn(work / f"case-{list(CASES).index(name)}", verifier, rows, CASES[name])
        if CASES[name].family == "dflash":
            share_key_norms(folder)
        runs.append(Run(name, str(folder.resolve())))
    return compare(runs, python, chat_ids(str(verifier), texts), args.max_tokens, args.max_model_len)


def compare_configured(names: Sequence[str], work: Path, python: Path, args: argparse.Namespace) -> list[dict]:
    """Reports of `LOOKUPS` and `MODELS`."""
    if not names:
        return []
    texts = read_prompts(args.prompts)[: args.limit]
    verifier, _ = make_lesson(work, texts, args.max_tokens)
    prompts = chat_ids(str(verifier), [*texts[:2], *REPETITIVE])
    runs = []
    for name in names:
        if name in LOOKUPS:
            config = {"method": "ngram", **LOOKUPS[name]}
        else:
            folder, noise = work / f"draft-{list(MODELS).index(name)}", MODELS[name]
            draft = make_stranger(folder) if noise is None else disturbed(folder, verifier, noise)
            config = {"method": "draft_model", "model": str(draft.resolve()), "num_speculative_tokens": 3}
        runs.append(Run(name, str(verifier.resolve()), config))
    return compare(runs, python, prompts, args.max_tokens, args.max_model_len)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--work", type=Path, help="where the drafts are trained; kept, and continued by a rerun")
    parser.add_argument("--case", action="append", help="only the cases whose name holds this")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    def chosen(cases: dict) -> list[str]:
        return [case for case in cases if not args.case or any(part in case for part in args.case)]

    python = args.vllm_python.absolute()
    with tempfile.TemporaryDirectory() as fresh:
        work = args.work or Path(fresh)
        found = compare_configured(chosen({**LOOKUPS, **MODELS}), work, python, args)
        found += compare_speculators(chosen(CASES), work, python, args)
    shown = ("identical", "ours_equal_vllm", "counts_equal", "method", "ours", "vllm")
    matrix = [{"case": entry["speculator"], **{key: entry[key] for key in shown}} for entry in found]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(matrix, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(matrix, indent=2))
    wrong = [f"{entry['speculator']}: {fault}" for entry in found for fault in case_faults(entry)]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def case_faults(found: dict) -> list[str]:
    """What is wrong in a report; of all drafts but a stranger's some must be accepted."""
    wrong, accepted = faults(found), sum(found["vllm"]["accepted_per_position"])
    if found["speculator"] != STRANGER and not accepted:
        wrong.append("vLLM accepted nothing")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
