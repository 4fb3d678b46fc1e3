"""What unequal numbers of verified drafts bring: the time of passes, and tokens a second of a skewed batch.

Random verifiers (a tiny one, and one of the sizes of SmolLM2-135M; float32, one thread), 16 requests. Passes over 200
to 256 tokens a row are timed with every row as long as the longest and without padding, in turn; the least of several
is told. Then a batch is served with drafts of known quality: of every eight requests, one is drafted nearly always
right, the others seldom, and the draft knows it. Time is that of the process, so that others on the machine count less.

    python -m benchmarks.ragged_verification [--sizes 135M] [--out out/ragged.json]
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from speculators.models.attention_interface import ATTENTION_NAME
from speculators.models.cache import SlotWrite
from speculators.models.draft_model import Proposal
from speculators.runtime.adaptive import AdaptiveVerification
from speculators.runtime.depth import DepthPolicy, StaticDepth
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.request import Request
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.step_costs import CostTable, StepCosts
from speculators.runtime.verifier import Verifier

ROWS, MOST, STEPS = 16, 7, 6
EASY, HARD = 0.95, 0.3
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
    "135M": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
}
HEADS = {"tiny": (4, 2), "135M": (9, 3)}
SPREADS = {
    "all": [MOST] * ROWS,
    "three of four": [0 if row % 4 == 0 else MOST for row in range(ROWS)],
    "every other": [0 if row % 2 else MOST for row in range(ROWS)],
    "one of eight": [0 if row % 8 else MOST for row in range(ROWS)],
    "one": [MOST] + [0] * (ROWS - 1),
}


class PaddedVerifier(Verifier):
    """Computes every row as long as the longest."""

    @property
    def packs(self) -> bool:
        """Never."""
        return False


def verifiers(size: str) -> dict[str, Verifier]:
    """The same random model, with and without padding."""
    torch.manual_seed(0)
    heads, kv_heads = HEADS[size]
    config = LlamaConfig(
        **SIZES[size],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=ATTENTION_NAME,
    )
    model = LlamaForCausalLM(config)
    return {"padded": PaddedVerifier(model, None), "packed": Verifier(model, None)}


def milliseconds(both: dict[str, Verifier], drafts: Sequence[int], repeats: int) -> dict[str, float]:
    """The least time of a pass over rows of so many drafts each."""
    starts, width = [256 - 7 * row % 56 for row in range(ROWS)], 1 + max(drafts)
    ids_BT = torch.zeros(ROWS, width, dtype=torch.int64)
    caches = {name: verifier.make_cache(ROWS) for name, verifier in both.items()}
    least = dict.fromkeys(both, float("inf"))
    for _ in range(repeats):
        for name, verifier in both.items():
            lengths = [1 + count for count in drafts]
            write = SlotWrite.at(slice(0, ROWS), starts, width, verifier.device, lengths=lengths)
            began = time.process_time()
            verifier.forward(ids_BT, caches[name], write)
            least[name] = min(least[name], 1000 * (time.process_time() - began))
    return least


class KnownDrafts:
    """Drafts each request's own greedy continuation, tokens of it wrong as its quality says, and tells the quality."""

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self.num_tokens, self.keeps_top_probs = MOST, False
        self.aux_layer_ids: Sequence[int] = ()
        self.verifier_ids_D: Tensor | None = None
        self._answers, self._coins = answers, random.Random(0)

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        """The next tokens of each answer."""
        rows, told = [], []
        for request in new.requests:
            quality = EASY if int(request.request_id) % 8 == 0 else HARD
            known = self._answers[request.request_id][len(request.output_token_ids) :][:num_tokens]
            known += [0] * (num_tokens - len(known))
            rows.append([token if self._coins.random() < quality else token ^ 1 for token in known])
            told.append([quality] * num_tokens)
        lengths_B = torch.full((len(rows),), num_tokens)
        return Proposal(torch.tensor(rows), lengths_B, confidence_BK=torch.tensor(told))

    def observe(self, new: NewTokens) -> None:
        """Nothing is kept."""

    def move(self, source: int, target: int, length: int) -> None:
        """Nothing is kept."""

    def forget(self, request: Request) -> None:
        """Nothing is kept."""


def engine_of(verifier: Verifier, proposer: KnownDrafts | None, depth: DepthPolicy | None) -> Engine:
    """An engine whose batch is full, with the first token of every answer there."""
    generator = random.Random(1)
    engine = Engine(verifier, proposer, limits=EngineLimits(ROWS, 512), depth=depth)
    params = SamplingParams(temperature=0, max_tokens=(STEPS + 1) * (1 + MOST) + 2, ignore_eos=True)
    for row in range(ROWS):
        engine.add_request(str(row), [generator.randrange(verifier.vocab_size) for _ in range(40 + 3 * row)], params)
    engine.step()
    return engine


def continuations(verifier: Verifier) -> dict[str, list[int]]:
    """What each request is answered."""
    engine, answers = engine_of(verifier, None, None), dict[str, list[int]]()
    while engine.has_unfinished:
        answers |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    return answers


def served(verifier: Verifier, answers: dict[str, list[int]], depth: DepthPolicy) -> dict[str, float]:
    """Tokens a second of a full batch, and what was verified."""
    engine = engine_of(verifier, KnownDrafts(answers), depth)
    assert engine.stats is not None
    engine.step()  # Until a draft has been seen, everything is verified.
    tokens, drafts, began = engine.num_generated_tokens, engine.stats.num_draft_tokens, time.process_time()
    for _ in range(STEPS):
        engine.step()
    seconds = time.process_time() - began
    for request in engine.running:
        assert request.output_token_ids == answers[request.request_id][: len(request.output_token_ids)]
    return {
        "tokens_per_second": (engine.num_generated_tokens - tokens) / seconds,
        "tokens_per_step": (engine.num_generated_tokens - tokens) / STEPS,
        "drafts_per_request": (engine.stats.num_draft_tokens - drafts) / (STEPS * ROWS),
    }


def measured(size: str) -> dict[str, Any]:
    """All figures of one verifier."""
    both, repeats = verifiers(size), 40 if size == "tiny" else 4
    passes = {name: milliseconds(both, drafts, repeats) for name, drafts in SPREADS.items()}
    points = {ROWS * width: milliseconds(both, [width - 1] * ROWS, repeats)["padded"] for width in (1, 2, 4, 8)}
    answers = continuations(both["padded"])
    found: dict[str, Any] = {"passes_ms": passes, "cost_table_ms": points, "served": {}}
    for depth in (1, 3, MOST):
        found["served"][f"K={depth}"] = served(both["padded"], answers, StaticDepth(depth))
    for name, verifier in (("one length", both["padded"]), ("a length each", both["packed"])):
        costs = StepCosts({ROWS: CostTable(points)}, {ROWS: CostTable({0: 0.0})}, padded=not verifier.packs)
        found["served"][name] = served(verifier, answers, AdaptiveVerification(MOST, costs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--out", type=Path, default=Path("out/ragged.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {size: measured(size) for size in options.sizes}
    for size, figures in found.items():
        print(size)
        for kind in ("passes_ms", "served"):
            for name, values in figures[kind].items():
                print(f"  {name}: " + ", ".join(f"{key} {value:.2f}" for key, value in values.items()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
