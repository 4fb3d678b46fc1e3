"""Adaptive verification beside every static depth, in simulation: expected tokens a second.

A workload says how likely each draft is to be accepted once those before it were, what the draft says about that, how
many requests there are, and what passes cost. Expected tokens are 1 and the survivals of what was verified; costs are
those of the same passes. As a program it writes a report:

    python -m tests.runtime.adaptive --out out/adaptive.json
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from speculators.models.draft_model import Proposal
from speculators.runtime.adaptive import AdaptiveVerification
from speculators.runtime.request import Request
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.step_costs import CostTable, StepCosts

MOST = 7


@dataclass(frozen=True)
class Workload:
    """What is simulated.

    `conditional(rows, step, generator)` gives how likely each draft is to be accepted, [B, K]; `batch(step)` the number
    of requests; `verify(tokens)` and `draft(drafts)` milliseconds. With `head` the draft knows these probabilities;
    without, it has a feature x of which they are sigmoid(0.8 x - 0.15 (1 + position)).
    """

    name: str
    conditional: Callable[[int, int, torch.Generator], Tensor]
    batch: Callable[[int], int]
    verify: Callable[[int], float]
    draft: Callable[[int], float]
    head: bool = True


@dataclass(frozen=True)
class Line:
    """One workload: expected tokens a second of adaptive verification and of the best static depth."""

    workload: str
    padded: bool
    steps: int
    adaptive: float
    best_static: float
    best_k: int
    ratio: float
    drafted: float
    verified: float


def near(centre_K: list[float], spread: float) -> Callable[[int, int, torch.Generator], Tensor]:
    """Every row near these probabilities, by noise on their logits."""
    logits_K = torch.tensor(centre_K, dtype=torch.float64).logit()

    def drawn(rows: int, step: int, generator: torch.Generator) -> Tensor:
        noise = torch.randn(rows, len(centre_K), generator=generator, dtype=torch.float64)
        return torch.sigmoid(logits_K + spread * noise)

    return drawn


def easy_and_hard(rows: int, step: int, generator: torch.Generator) -> Tensor:
    """Every other row is code, which is drafted well; the rest is not."""
    easy, hard = near([0.95] * MOST, 0.5), near([0.45] * MOST, 0.5)
    chosen = torch.arange(rows)[:, None] % 2 == 0
    return torch.where(chosen, easy(rows, step, generator), hard(rows, step, generator))


def one_of_eight(rows: int, step: int, generator: torch.Generator) -> Tensor:
    """One row of eight is drafted nearly always right, the others seldom."""
    easy, hard = near([0.97] * MOST, 0.3), near([0.3] * MOST, 0.5)
    chosen = torch.arange(rows)[:, None] % 8 == 0
    return torch.where(chosen, easy(rows, step, generator), hard(rows, step, generator))


def changing(rows: int, step: int, generator: torch.Generator) -> Tensor:
    """Easy and hard text take turns, some hundred steps each."""
    return near([0.9] * MOST if step // 300 % 2 == 0 else [0.5] * MOST, 0.8)(rows, step, generator)


def from_features(rows: int, step: int, generator: torch.Generator) -> Tensor:
    """Probabilities that the estimator can learn, of features that are spread widely."""
    features = 1.0 + 1.5 * torch.randn(rows, MOST, generator=generator, dtype=torch.float64)
    return torch.sigmoid(0.8 * features - 0.15 * (1 + torch.arange(MOST)))


def stairs(tokens: int) -> float:
    """Passes are padded to multiples of 16 tokens, each of which costs the same again."""
    return 4.0 + 3.0 * -(-tokens // 16)


WORKLOADS = [
    Workload(
        "chat, four requests, memory-bound",
        near([0.75, 0.65, 0.6, 0.55, 0.5, 0.5, 0.45], 1.0),
        lambda step: 4,
        lambda tokens: 10 + 0.02 * tokens,
        lambda drafts: 1.0 + 0.5 * drafts,
    ),
    Workload(
        "easy and hard, 32 requests, compute-bound",
        easy_and_hard,
        lambda step: 32,
        lambda tokens: 6 + 0.15 * tokens,
        lambda drafts: 2.0,
    ),
    Workload(
        "chat, batch up and down",
        near([0.8, 0.7, 0.65, 0.6, 0.55, 0.5, 0.5], 1.0),
        lambda step: 1 + abs(47 - step % 95),
        lambda tokens: max(8.0, 0.1 * tokens),
        lambda drafts: 1.0,
    ),
    Workload(
        "without a head, 12 requests, stairs",
        from_features,
        lambda step: 12,
        stairs,
        lambda drafts: 0.3 * drafts,
        head=False,
    ),
    Workload(
        "one request, changing text, costly drafts",
        changing,
        lambda step: 1,
        lambda tokens: 10 + 0.3 * tokens,
        lambda drafts: 0.5 + 1.2 * drafts,
    ),
]
SKEWED = [
    WORKLOADS[1],
    Workload(
        "one of eight easy, 16 requests, a small verifier on a core",
        one_of_eight,
        lambda step: 16,
        lambda tokens: 170 + 3.4 * tokens,
        lambda drafts: 10.0 + 5.0 * drafts,
    ),
]


def costs_of(workload: Workload, padded: bool) -> StepCosts:
    """Tables that hold every size."""
    counts = range(1, 49)
    tokens = range(1, 48 * (MOST + 1) + 1)
    verify = CostTable({size: workload.verify(size) for size in tokens})
    draft = CostTable({size: workload.draft(size) for size in range(MOST + 1)})
    return StepCosts(dict.fromkeys(counts, verify), dict.fromkeys(counts, draft), padded)


def simulate(workload: Workload, steps: int, *, padded: bool) -> Line:
    """Run adaptive verification on a workload, and every static depth on the same drafts."""
    generator = torch.Generator().manual_seed(0)
    policy = AdaptiveVerification(MOST, costs_of(workload, padded))
    params = SamplingParams(temperature=0)
    requests = [
        Request(str(row), [1], params, eos_token_ids=frozenset(), max_length=10**6, stats=None) for row in range(48)
    ]
    tokens, spent = 0.0, 0.0
    static = torch.zeros(2, MOST + 1, dtype=torch.float64)
    drafted = verified = proposals = 0
    for step in range(steps):
        count = workload.batch(step)
        truth = workload.conditional(count, step, generator)
        survival = truth.cumprod(1)
        depth = policy.tokens_to_draft(count)
        lengths = [0] * count
        if depth:
            lengths = policy.verification_lengths(told(workload, truth[:, :depth]), requests[:count])
        accepted = (torch.rand(truth.shape, generator=generator) < truth).long().cumprod(1)
        for row, length in enumerate(lengths):
            policy.learn(requests[row], int(accepted[row, :length].sum()))
        tokens += count + sum(float(survival[row, :length].sum()) for row, length in enumerate(lengths))
        computed = count * (1 + max(lengths)) if padded else count + sum(lengths)
        spent += workload.draft(depth) + workload.verify(computed)
        drafted, verified, proposals = drafted + depth * count, verified + sum(lengths), proposals + count
        gains = torch.cat([torch.zeros(1, dtype=torch.float64), survival.sum(0).cumsum(0)])
        for k in range(MOST + 1):
            static[0, k] += count + gains[k]
            static[1, k] += workload.draft(k) + workload.verify(count * (1 + k))
    rates = 1000 * static[0] / static[1]
    adaptive, best = 1000 * tokens / spent, float(rates.max())
    means = (round(drafted / proposals, 3), round(verified / proposals, 3))
    return Line(
        workload.name, padded, steps, round(adaptive, 2), round(best, 2), int(rates.argmax()), adaptive / best, *means
    )


def told(workload: Workload, truth_BK: Tensor) -> Proposal:
    """What the draft says of its drafts, which are of no account here."""
    rows, depth = truth_BK.shape
    ids, lengths = torch.zeros(rows, depth, dtype=torch.int64), torch.full((rows,), depth)
    if workload.head:
        return Proposal(ids, lengths, None, truth_BK.float())
    features = (truth_BK.logit() + 0.15 * (1 + torch.arange(depth))) / 0.8
    return Proposal(ids, lengths, None, None, torch.sigmoid(features))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path("out/adaptive.json"))
    options = parser.parse_args()
    workloads = [*WORKLOADS, *SKEWED[1:]]
    lines = [simulate(one, options.steps, padded=padded) for one in workloads for padded in (False, True)]
    for line in lines:
        print(
            f"{line.workload}, padded {line.padded}: {line.adaptive:.1f} tokens/s, static K={line.best_k} "
            f"{line.best_static:.1f}, ratio {line.ratio:.3f}, {line.drafted} drafted and {line.verified} verified"
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
