"""A speculator on GSM8K's questions: `LLM(directory)` beside plain decoding, in float32 and in bfloat16.

    python -m tests.runtime.gsm8k --speculator DIR [--out out/gsm8k.json] [--prompts 50] [--max-tokens 192]
                                  [--parts PART ..]

Nothing but the directory is named: verifier, tokenizer, draft, method and depth follow from it. The first questions of
the test set are answered greedily, in parts; a part that was made before from the same speculator and settings is kept
(`OUT.parts/`), so that a run goes on where it ended, and `--parts` makes some of them. With all parts the report is
written, and the exit code is 1 where one of these fails:

- in float32, answers with drafts are those without, token for token. Where they differ, the report has the gap between
  the verifier's two likeliest logits there; a gap never excuses a difference;
- in bfloat16, where the width of a pass changes rounding, at least 66 % of the prompts have the same first tokens
  (10, as vLLM's own test of its methods counts them) with drafts and without, at one batch size;
- in bfloat16, the final numbers of answers with drafts agree with those without as often as those of two plain runs at
  different batch sizes agree: not less often at the 5 % level of Fisher's exact test, one-sided.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import fisher_exact

from speculators import LLM, SamplingParams
from speculators.formats.checkpoint import WEIGHTS, read_config
from speculators.runtime.evaluate import first_differences, top2_gap
from speculators.runtime.verifier import Verifier

ROWS = Path(__file__).with_suffix(".jsonl")
NUM_PROMPTS, MAX_TOKENS, MAX_LENGTH = 50, 192, 512
FIRST_TOKENS, LEAST_SAME, LEVEL = 10, 0.66, 0.05
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Part:
    """One run over all prompts."""

    dtype: str
    batch: int
    drafted: bool


PARTS: dict[str, Part] = {
    "float32": Part("float32", 16, drafted=False),
    "float32 drafted": Part("float32", 16, drafted=True),
    "bfloat16": Part("bfloat16", 16, drafted=False),
    "bfloat16 drafted": Part("bfloat16", 16, drafted=True),
    "bfloat16 by four": Part("bfloat16", 4, drafted=False),
}


def read_questions(count: int) -> list[str]:
    """The first `count` questions."""
    with ROWS.open(encoding="utf-8") as lines:
        return [json.loads(line)["turns"][0] for line in lines][:count]


def final_number(text: str) -> str | None:
    """The number that an answer ends with: in its last box, else the last one written; None where there is none."""
    boxed = _BOXED.findall(text)
    found = _NUMBER.findall(boxed[-1]) if boxed else []
    found = found or _NUMBER.findall(text)
    return f"{float(found[-1].replace(',', '')):g}" if found else None


def agreements(one: Sequence[object], other: Sequence[object]) -> int:
    """In how many places two runs have the same."""
    return sum(a == b for a, b in zip(one, other, strict=True))


def run(part: Part, speculator: Path, questions: Sequence[str], max_tokens: int, *, show: bool) -> dict[str, Any]:
    """Answer the questions; what is told of speculation is what `LLM` found by itself."""
    model = str(speculator) if part.drafted else verifier_of(speculator)
    llm = LLM(model, dtype=part.dtype, max_num_seqs=part.batch, max_model_len=MAX_LENGTH)
    conversations = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=show)
    stats = llm.stats
    return {
        "verifier": llm.verifier.name_or_path,
        "method": llm.method,
        "num_speculative_tokens": llm.num_speculative_tokens,
        "acceptance_length": None if stats is None else stats.acceptance_length,
        "prompts": [output.prompt_token_ids for output in outputs],
        "token_ids": [output.outputs[0].token_ids for output in outputs],
        "numbers": [final_number(output.outputs[0].text) for output in outputs],
    }


def verifier_of(speculator: Path) -> str:
    """The verifier that a speculator's directory names."""
    return str(read_config(speculator)["speculators_config"]["verifier"]["name_or_path"])


def report(speculator: Path, found: dict[str, dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    """What the parts say together."""
    drafted, numbers = found["float32 drafted"], {name: one["numbers"] for name, one in found.items()}
    ids = {name: one["token_ids"] for name, one in found.items()}
    places = first_differences(ids["float32"], ids["float32 drafted"])
    gaps = {}
    if any(place is not None for place in places):
        verifier = Verifier.from_pretrained(drafted["verifier"], dtype="float32")
        for row, place in enumerate(places):
            if place is not None:
                gaps[row] = top2_gap(verifier, [*drafted["prompts"][row], *ids["float32"][row][:place]])
    plain, four, with_drafts = ids["bfloat16"], ids["bfloat16 by four"], ids["bfloat16 drafted"]
    agree = agreements(numbers["bfloat16"], numbers["bfloat16 drafted"])
    agree_plain, count = agreements(numbers["bfloat16"], numbers["bfloat16 by four"]), len(plain)
    table = [[agree, count - agree], [agree_plain, count - agree_plain]]
    return {
        "speculator": str(speculator),
        "verifier": drafted["verifier"],
        "method": drafted["method"],
        "num_speculative_tokens": drafted["num_speculative_tokens"],
        "num_prompts": count,
        "max_tokens": max_tokens,
        "float32": {
            "identical": not gaps,
            "acceptance_length": drafted["acceptance_length"],
            "top2_gaps": gaps,
        },
        "bfloat16": {
            "acceptance_length": found["bfloat16 drafted"]["acceptance_length"],
            "same_first_tokens": agreements(_starts(plain), _starts(with_drafts)) / count,
            "same_first_tokens_of_plain_runs": agreements(_starts(plain), _starts(four)) / count,
            "same_answers": agreements(plain, with_drafts) / count,
            "same_answers_of_plain_runs": agreements(plain, four) / count,
            "same_numbers": agree / count,
            "same_numbers_of_plain_runs": agree_plain / count,
            "p": float(fisher_exact(table, alternative="less").pvalue),
        },
    }


def _starts(answers: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(ids[:FIRST_TOKENS]) for ids in answers]


def faults(told: dict[str, Any]) -> list[str]:
    """What of a report is not as it has to be."""
    exact, rounded, wrong = told["float32"], told["bfloat16"], []
    if not exact["identical"]:
        wrong.append(f"float32: answers differ, at gaps of {exact['top2_gaps']}")
    if rounded["same_first_tokens"] < LEAST_SAME:
        wrong.append(f"bfloat16: {rounded['same_first_tokens']:.0%} of the prompts match, expected {LEAST_SAME:.0%}")
    if rounded["p"] < LEVEL:
        wrong.append(
            f"bfloat16: {rounded['same_numbers']:.0%} of the final numbers agree, and those of two plain runs in "
            f"{rounded['same_numbers_of_plain_runs']:.0%} (p={rounded['p']:.3f})"
        )
    return wrong


def fingerprint(speculator: Path, *settings: object) -> str:
    """Of a speculator and how it is run."""
    digest = hashlib.sha256(repr(settings).encode())
    for name in ("config.json", WEIGHTS):
        digest.update((speculator / name).read_bytes())
    return digest.hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculator", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("out/gsm8k.json"))
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    args = parser.parse_args(arguments)
    folder, questions = args.out.with_suffix(".parts"), read_questions(args.prompts)
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, part in PARTS.items():
        path = folder / f"{name.replace(' ', '-')}.json"
        mark = fingerprint(args.speculator, part, questions, args.max_tokens)
        kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if kept.get("mark") != mark:
            if name not in args.parts:
                continue
            print(f"{name}: {len(questions)} prompts, {part.batch} at once", flush=True)
            kept = {"mark": mark, **run(part, args.speculator, questions, args.max_tokens, show=True)}
            path.write_text(json.dumps(kept), encoding="utf-8")
        found[name] = kept
    if len(found) < len(PARTS):
        print(f"still to be run: {', '.join(name for name in PARTS if name not in found)}")
        return 0
    told = report(args.speculator, found, args.max_tokens)
    args.out.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=2))
    for line in faults(told):
        print(line, file=sys.stderr)
    return 1 if faults(told) else 0


if __name__ == "__main__":
    sys.exit(main())
