"""Joint laws of the first four tokens under each lossless rule, against the verifier's own law, by chi-square.

    python -m tests.runtime.laws [--draws 400000] [--requests 20000] [--out out/rules.json]

Verification functions are given drafts of a Markov chain q for a Markov chain p; what a verification leaves open is
drawn from p. The whole engine serves a tiny random verifier, whose law stock transformers enumerate, to requests of
several prompts that end at different times. Prints and writes a line a rule and kind of drafts: rule, draft, through,
draws, chi2, dof, p. Exit code 1 where a p is below 1e-4.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from scipy.stats import chi2 as chi2_law
from torch import Tensor
from transformers import AutoModelForCausalLM

from speculators.models.draft_model import Proposal
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.rejection import Verification, draw, verify_block, verify_standard
from speculators.runtime.rules import Rule, make_rule
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.parts import random_speculator, random_verifier

Verify = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor], Verification]

LENGTH = 4
LEAST = 1e-4
# Verifier and draft as Markov chains over three tokens: the first token's law, then those after each token. Where block
# verification stops its share lies below 1, and two tokens have a residual whose proportion changes with the share.
P0 = np.array([0.4, 0.25, 0.35])
P = np.array([[0.55, 0.05, 0.4], [0.75, 0.2, 0.05], [0.25, 0.3, 0.45]])
Q0 = np.array([0.65, 0.3, 0.05])
Q = np.array([[0.35, 0.6, 0.05], [0.15, 0.55, 0.3], [0.2, 0.1, 0.7]])
DRAFTS = (
    "one-hot",
    "one-hot, drawn",
    "probabilistic",
    "probabilistic, mixed K",
    "one-hot beside probabilistic, mixed K",
)
PROMPTS = ([1, 2], [0, 2, 1, 1, 0], [2])
# Flattens the law of the random verifier, so that few of the 81 sequences are rare.
TEMPERATURE = 3.0


@dataclass(frozen=True)
class Line:
    """How far counts lie from a law: Pearson's statistic, its degrees of freedom, and how likely a larger one is."""

    rule: str
    draft: str
    through: str
    draws: int
    chi2: float
    dof: int
    p: float


def markov_law(length: int = LENGTH) -> np.ndarray:
    """The probability of every sequence of p, in lexicographic order."""
    law = P0
    for _ in range(length - 1):
        last = np.arange(len(law)) % 3
        law = (law[:, None] * P[last]).ravel()
    return law


def compared(counts: np.ndarray, law: np.ndarray) -> tuple[float, int, float]:
    """Chi-square of counts, degrees of freedom and p; cells of an expectation below 5 are one."""
    expected = law * counts.sum()
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic, dof = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
    return statistic, dof, float(chi2_law.sf(statistic, dof))


def codes(tokens_NL: Tensor, vocab: int) -> np.ndarray:
    """Counts of sequences, in lexicographic order."""
    code = torch.zeros(len(tokens_NL), dtype=torch.int64)
    for place in range(tokens_NL.shape[1]):
        code = code * vocab + tokens_NL[:, place]
    return torch.bincount(code, minlength=vocab ** tokens_NL.shape[1]).numpy()


@dataclass
class Drawn:
    """Drafts of N rows and the noise they are verified with; `draft_noise_KNV` is what they were drawn by."""

    target_probs_NSV: Tensor
    draft_ids_NK: Tensor
    lengths_N: Tensor
    draft_probs_NKV: Tensor | None
    coins_NK: Tensor
    noise_NV: Tensor
    draft_noise_KNV: Tensor


def drawn(draft: str, draws: int, seed: int, num_drafts: int = 3) -> Drawn:
    """Drafts of the chain q for N rows, of one kind of `DRAFTS`."""
    generator = torch.Generator().manual_seed(seed)
    start_q, q = torch.tensor(Q0).float(), torch.tensor(Q).float()
    start_p, p = torch.tensor(P0).float(), torch.tensor(P).float()
    noise_KNV = torch.empty(num_drafts, draws, 3).exponential_(generator=generator)
    law_NV, ids, laws, targets = start_q.expand(draws, 3), [], [], [start_p.expand(draws, 3)]
    for slot in range(num_drafts):
        ids.append(law_NV.argmax(-1) if draft == "one-hot" else draw(law_NV, noise_KNV[slot]))
        laws.append(law_NV)
        targets.append(p[ids[-1]])
        law_NV = q[ids[-1]]
    lengths = torch.full((draws,), num_drafts)
    if "mixed" in draft:
        lengths = torch.randint(0, num_drafts + 1, (draws,), generator=generator)
    probs_NKV = None if draft.startswith("one-hot") and "beside" not in draft else torch.stack(laws, 1)
    ids_NK = torch.stack(ids, 1)
    if "beside" in draft:
        # As in the engine's batches, a one-hot draft among others is a law of its own.
        one_hot = torch.nn.functional.one_hot(ids_NK, 3).float()
        probs_NKV = torch.where((torch.arange(draws) % 2 == 0)[:, None, None], one_hot, torch.stack(laws, 1))
    coins = torch.rand(draws, num_drafts, dtype=torch.float64, generator=generator)
    noise = torch.empty(draws, 3).exponential_(generator=generator)
    return Drawn(torch.stack(targets, 1), ids_NK, lengths, probs_NKV, coins, noise, noise_KNV)


def completed(outputs_NS: Tensor, seed: int) -> Tensor:
    """The first four tokens of each row: what was emitted, then draws from the chain p."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.tensor(P).float()
    tokens_NL = outputs_NS[:, :LENGTH].clone()
    for place in range(1, LENGTH):
        noise = torch.empty(len(tokens_NL), 3).exponential_(generator=generator)
        following = draw(p[tokens_NL[:, place - 1]], noise)
        tokens_NL[:, place] = torch.where(tokens_NL[:, place] < 0, following, tokens_NL[:, place])
    return tokens_NL


def of_function(rule: str, verify: Verify, draft: str, draws: int, seed: int = 0) -> Line:
    """The joint law that a verification function gives."""
    rows = drawn(draft, draws, seed)
    result = verify(
        rows.target_probs_NSV, rows.draft_ids_NK, rows.lengths_N, rows.draft_probs_NKV, rows.coins_NK, rows.noise_NV
    )
    tokens = completed(result.output_ids_BS, seed + 1)
    return Line(rule, draft, "function", draws, *compared(codes(tokens, 3), markov_law()))


class MixedDepths:
    """A proposer whose drafts are cut to 0 .. K of them, by how long a request is and which it is."""

    def __init__(self, proposer: DraftHeadProposer) -> None:
        self._proposer = proposer
        self.num_tokens, self.aux_layer_ids = proposer.num_tokens, proposer.aux_layer_ids
        self.verifier_ids_D = proposer.verifier_ids_D
        self.observe, self.move, self.forget = proposer.observe, proposer.move, proposer.forget

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        """Draft after the newly verified tokens."""
        proposal = self._proposer.propose(new, num_tokens)
        lengths = [(len(r.tokens) + int(r.request_id)) % (num_tokens + 1) for r in new.requests]
        proposal.lengths_B = proposal.lengths_B.minimum(torch.tensor(lengths))
        return proposal


@torch.no_grad()
def stock_law(verifier: Verifier, prompt: list[int]) -> np.ndarray:
    """The probability of every four tokens after a prompt, by transformers' own attention."""
    config = type(verifier.model.config).from_dict(verifier.model.config.to_dict())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(verifier.model.state_dict())
    vocab = verifier.vocab_size
    rows = torch.tensor([[*prompt, *tail] for tail in product(range(vocab), repeat=LENGTH)])
    laws = (model.eval()(rows).logits.double() / TEMPERATURE).softmax(-1)[:, len(prompt) - 1 : -1]
    chosen = laws.gather(2, rows[:, len(prompt) :, None])[:, :, 0]
    return chosen.prod(1).numpy()


def of_engine(rule: Rule, method: str, requests: int, *, mixed: bool = False, draft_vocab_size: int = 3) -> Line:
    """The joint law that the engine gives with drafts of an untrained head, of `requests` requests."""
    verifier = random_verifier(3, seed=3)
    speculator = random_speculator(verifier, draft_vocab_size=draft_vocab_size, seed=5)
    slots = 64
    proposer = DraftHeadProposer(speculator.draft, 3, slots, probabilistic=method == "probabilistic")
    engine = Engine(
        verifier,
        MixedDepths(proposer) if mixed else proposer,
        limits=EngineLimits(max_num_seqs=slots, max_model_len=32),
        rule=rule,
    )
    for number in range(requests):
        # Requests of three prompts that end after four to eight tokens: rows are moved in nearly every step.
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=LENGTH + number % 5, seed=number)
        engine.add_request(str(number), PROMPTS[number % 3], params)
    found: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                found[int(output.request_id) % 3].append(output.outputs[0].token_ids[:LENGTH])
    parts = [compared(codes(torch.tensor(found[i]), 3), stock_law(verifier, PROMPTS[i])) for i in range(3)]
    statistic, dof = sum(part[0] for part in parts), sum(part[1] for part in parts)
    draft = f"{method}{', mixed K' if mixed else ''}{', reduced vocabulary' if draft_vocab_size < 3 else ''}"
    return Line(rule.name, draft, "engine", requests, statistic, dof, float(chi2_law.sf(statistic, dof)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=400_000)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=Path("out/rules.json"))
    args = parser.parse_args()
    lines: list[Line] = []

    def add(line: Line) -> None:
        print(line, flush=True)
        lines.append(line)

    for rule, verify in (("standard", verify_standard), ("block", verify_block)):
        for draft in DRAFTS:
            add(of_function(rule, verify, draft, args.draws))
        for method in ("greedy", "probabilistic"):
            add(of_engine(make_rule(rule, 3), method, args.requests))
            add(of_engine(make_rule(rule, 3), method, args.requests, mixed=True, draft_vocab_size=2))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps([asdict(line) for line in lines], indent=2) + "\n", encoding="utf-8")
    return 0 if all(line.p >= LEAST for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
