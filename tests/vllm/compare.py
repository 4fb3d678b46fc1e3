"""Referee: real vLLM and our runtime decode the same prompts with the same drafts, greedy, in float32.

Passes when vLLM's outputs with drafts equal its own without, ours equal vLLM's, and its counts of steps, of drafted and
of accepted tokens equal ours, the last position by position. Both get the same token ids, so that no tokenizer stands
between them, and the same speculator directory or `speculative_config`, unmodified.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speculators import LLM, SamplingParams
from speculators.runtime.evaluate import first_differences

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Run:
    """What both engines are given: a speculator's directory, or a verifier and how to draft for it."""

    name: str
    model: str
    speculative_config: dict[str, Any] | None = None


def read_prompts(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines]


def ask_vllm(python: Path, request: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        question.write_text(json.dumps(request), encoding="utf-8")
        # Without what pytest or a shell set for us: the other environment finds its own packages and threads.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OMP_"))}
        script = HERE / "generate_with_vllm.py"
        subprocess.run([python, script, question, answer], check=True, env=environment, cwd=folder)
        return json.loads(answer.read_text(encoding="utf-8"))


def ask_ours(llm: LLM, request: dict) -> dict:
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"])
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], sampling)
    stats = [output.outputs[0].spec_decode_metrics.stats for output in outputs]
    return {
        "num_drafts": sum(one.num_drafts for one in stats),
        "num_draft_tokens": sum(one.num_draft_tokens for one in stats),
        "accepted_per_position": [
            sum(counts) for counts in zip(*(one.accepted_per_position for one in stats), strict=True)
        ],
        "token_ids": [output.outputs[0].token_ids for output in outputs],
    }


def compare(runs: list[Run], vllm_python: Path, prompts: list[list[int]], max_tokens: int, length: int) -> list[dict]:
    """A report a run; all have one verifier. `length` is the longest sequence."""
    request: dict = {
        "runs": [asdict(run) for run in runs],
        "prompts": prompts,
        "max_tokens": max_tokens,
        "max_model_len": length,
    }
    ours = []
    for run in runs:
        llm = LLM(
            run.model,
            speculative_config=run.speculative_config,
            dtype="float32",
            max_num_seqs=1,
            max_model_len=length,
        )
        ours.append(ask_ours(llm, request))
    answer = ask_vllm(vllm_python, request)
    return [
        report(run, mine, answer["runs"][run.name], answer["without_drafts"], max_tokens)
        for run, mine in zip(runs, ours, strict=True)
    ]


def chat_ids(model: str, prompts: list[str]) -> list[list[int]]:
    """Each prompt as a conversation, ready to be answered, for a verifier or the verifier of a speculator."""
    llm = LLM(model)
    return [llm.chat_token_ids([{"role": "user", "content": prompt}]) for prompt in prompts]


def report(run: Run, ours: dict, answer: dict, plain: list[list[int]], max_tokens: int) -> dict:
    read, drafted = answer["read"], answer["with_drafts"]
    theirs = {
        "num_drafts": read["num_drafts"],
        "num_draft_tokens": read["num_draft_tokens"],
        "accepted_per_position": read["num_accepted_tokens_per_pos"],
    }
    mine = ours.pop("token_ids")
    differences = first_differences(drafted, plain)
    return {
        "speculator": run.name,
        "method": read["method"],
        "num_speculative_tokens": read["num_speculative_tokens"],
        "num_prompts": len(plain),
        "max_tokens": max_tokens,
        "identical": all(difference is None for difference in differences),
        "first_difference": differences,
        "ours_equal_vllm": mine == drafted,
        "counts_equal": ours == theirs,
        "ours": ours,
        "vllm": theirs,
    }


def faults(found: dict) -> list[str]:
    """What is wrong in a report: outputs changed by drafts or by the engine, other counts, or nothing drafted."""
    wrong = []
    if not found["identical"]:
        wrong.append(f"vLLM's outputs with drafts differ from its own without, at {found['first_difference']}")
    if not found["ours_equal_vllm"]:
        wrong.append("our outputs differ from vLLM's")
    if not found["counts_equal"]:
        wrong.append(f"this runtime counts {found['ours']}, vLLM {found['vllm']}")
    if not found["vllm"]["num_drafts"]:
        wrong.append("nothing was drafted")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument(
        "--speculator", type=Path, required=True, help="where this does not exist, a tiny one is trained"
    )
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts)[: args.limit]
    speculator = args.speculator
    if not (speculator / "config.json").is_file():
        sys.path.insert(0, str(HERE.parent.parent))
        from tests.vllm.tiny_speculator import train_tiny_speculator

        speculator = train_tiny_speculator(args.out.parent / "vllm_check", prompts, args.max_tokens)
    python, length = args.vllm_python.absolute(), args.max_model_len
    model = str(speculator.resolve())
    (found,) = compare([Run(model, model)], python, chat_ids(model, prompts), args.max_tokens, length)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))
    accepted = sum(found["vllm"]["accepted_per_position"])
    print(f"{accepted} drafts accepted in {found['vllm']['num_drafts']} steps; report in {args.out}")
    for wrong in faults(found):
        print(wrong, file=sys.stderr)
    return 1 if faults(found) else 0


if __name__ == "__main__":
    sys.exit(main())
