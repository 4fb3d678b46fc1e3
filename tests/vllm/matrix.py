"""Every kind of draft that vLLM serves on a CPU, trained to know its lesson by heart, in vLLM and in our runtime.

    matrix.py --vllm-python VLLM/bin/python --out out/vllm_matrix.json [--work DIR]

For each case the directory goes to vLLM unmodified and auto-detected. Its greedy float32 output must be what it is
without drafts, and the drafts accepted at each position must be as many as in our runtime. The report is a list of
`{case, identical, ours, vllm}`, the last two with `num_drafts` and `accepted_per_position`.

On a CPU, vLLM 0.32 norms the context keys of all DFlash layers with the gain of the first: its CPU `rms_norm` reads one
row of the stacked gains, where its GPU kernel reads one a layer. So that both engines compute one function, the layers
of a DFlash draft are given one gain here after training; everything else about them differs.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

from speculators.models.speculator import Speculator

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from tests.vllm.compare import compare, passes, read_prompts  # noqa: E402 - found by the path above
from tests.vllm.tiny_speculator import Choice, learn, make_lesson  # noqa: E402 - found by the path above

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


def share_key_norms(directory: Path) -> None:
    """Give all layers of a saved draft the key norm of the first."""
    speculator = Speculator.from_pretrained(directory)
    norms = [tensor for name, tensor in speculator.draft.named_parameters() if name.endswith("k_norm.weight")]
    with torch.no_grad():
        for norm in norms[1:]:
            norm.copy_(norms[0])
    speculator.save_pretrained(directory)


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
    chosen = [case for case in CASES if not args.case or any(part in case for part in args.case)]
    with tempfile.TemporaryDirectory() as fresh:
        work = args.work or Path(fresh)
        prompts = read_prompts(args.prompts)[: args.limit]
        verifier, rows = make_lesson(work, prompts, args.max_tokens)
        folders = [learn(work / f"case-{number}", verifier, rows, CASES[case]) for number, case in enumerate(chosen)]
        for case, folder in zip(chosen, folders, strict=True):
            if CASES[case].family == "dflash":
                share_key_norms(folder)
        found = compare(
            [folder.resolve() for folder in folders],
            args.vllm_python.absolute(),
            prompts,
            args.max_tokens,
            args.max_model_len,
        )
    matrix = [
        {"case": case, **{key: entry[key] for key in ("identical", "counts_equal", "method", "ours", "vllm")}}
        for case, entry in zip(chosen, found, strict=True)
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(matrix, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(matrix, indent=2))
    good = all(passes(entry) and sum(entry["vllm"]["accepted_per_position"]) for entry in found)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
