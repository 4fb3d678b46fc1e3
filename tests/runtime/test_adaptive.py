"""Adaptive verification: the plan against brute force, trimming by costs, what is learnt, and what is measured."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from speculators.errors import EngineError
from speculators.models.draft_model import Proposal
from speculators.runtime.acceptance import AcceptanceEstimator
from speculators.runtime.adaptive import AdaptiveVerification
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.request import Request
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.step_costs import CONTEXT_VARIABLE, CostTable, StepCosts, measure_costs, profile_context_length
from tests.runtime.adaptive import SKEWED, WORKLOADS, Workload, simulate
from tests.runtime.parts import random_speculator, random_verifier


def requests(count: int) -> list[Request]:
    params = SamplingParams(temperature=0)
    return [Request(str(i), [1], params, eos_token_ids=frozenset(), max_length=1000, stats=None) for i in range(count)]


def proposal(confidence: Tensor) -> Proposal:
    rows, width = confidence.shape
    return Proposal(torch.zeros(rows, width, dtype=torch.int64), torch.full((rows,), width), None, confidence)


def costs(verify: dict[int, float], draft: dict[int, float], *, padded: bool = False) -> StepCosts:
    return StepCosts(dict.fromkeys(range(1, 9), CostTable(verify)), {1: CostTable(draft), 8: CostTable(draft)}, padded)


FLAT, STEEP = {1: 10.0, 100: 10.0}, {1: 1.0, 100: 100.0}
FREE = {0: 0.0}


@pytest.mark.parametrize("padded", [False, True])
def test_flat_costs_verify_all_and_steep_costs_trim(padded: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    confidence = 0.1 + 0.4 * torch.rand(4, 5, generator=generator)
    kept = {}
    for name, verify in (("flat", FLAT), ("steep", STEEP)):
        policy = AdaptiveVerification(5, costs(verify, {0: 1.0, 5: 1.0}, padded=padded))
        for _ in range(3):
            depth = policy.tokens_to_draft(4)
            kept[name] = policy.verification_lengths(proposal(confidence[:, :depth]), requests(4))
    assert kept["flat"] == [5] * 4
    assert sum(kept["steep"]) < 4
    # Where each draft is sure, even steep costs are worth it.
    sure = AdaptiveVerification(5, costs({1: 10.0, 100: 40.0}, FREE, padded=padded))
    for _ in range(3):
        sure.tokens_to_draft(4)
        assert sure.verification_lengths(proposal(torch.full((4, 5), 0.999)), requests(4)) == [5] * 4


@dataclass
class Rates:
    """Tokens a millisecond of any depth and lengths, spelled out."""

    products: Tensor
    verify: dict[int, float]
    draft: dict[int, float]
    padded: bool

    def of(self, depth: int, lengths: Sequence[int]) -> float:
        rows = len(lengths)
        tokens = rows + sum(float(self.products[row, :length].sum()) for row, length in enumerate(lengths))
        computed = rows * (1 + max(lengths)) if self.padded else rows + sum(lengths)
        return tokens / (self.draft[depth] + self.verify[computed])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("trial", range(12))
def test_the_plan_is_the_best_of_all(trial: int, padded: bool) -> None:
    """Against every length of each row; costs are stairs, on which a greedy search gets stuck."""
    generator = torch.Generator().manual_seed(trial)
    rows, most = 1 + trial % 3, 3
    steps = torch.rand(4, generator=generator).cumsum(0).tolist()
    verify = {size: 1.0 + 4 * steps[(size - 1) // 4] for size in range(1, 13)}
    per_draft = 0.4 * float(torch.rand((), generator=generator))
    draft = {depth: 0.1 + depth * per_draft for depth in range(most + 1)}
    policy = AdaptiveVerification(most, costs(verify, draft, padded=padded))
    confidence = torch.rand(rows, most, generator=generator) ** 0.3
    policy.tokens_to_draft(rows)
    policy.verification_lengths(proposal(confidence), requests(rows))
    depth = policy.tokens_to_draft(rows)
    lengths = policy.verification_lengths(proposal(confidence[:, :depth]), requests(rows)) if depth else [0] * rows
    rates = Rates(confidence.double().cumprod(1), verify, draft, padded)
    best = max(rates.of(max(one), one) for one in itertools.product(range(most + 1), repeat=rows))
    assert rates.of(depth, lengths) == pytest.approx(best, rel=1e-6)


def test_stairs_do_not_stop_the_search() -> None:
    """The first draft alone costs more than it brings; four, for which the pass has room then, bring more."""
    verify = {size: 10.0 if size == 1 else 20.0 for size in range(1, 6)}
    policy = AdaptiveVerification(4, costs(verify, FREE))
    for _ in range(2):
        policy.tokens_to_draft(1)
        lengths = policy.verification_lengths(proposal(torch.full((1, 4), 0.9)), requests(1))
    rates = Rates(torch.full((1, 4), 0.9).cumprod(1), verify, dict.fromkeys(range(5), 0.0), False)
    assert rates.of(4, [1]) < rates.of(4, [0]) < rates.of(4, [4])
    assert lengths == [4]


def test_the_plan_never_reads_the_drafts_that_it_decides_on() -> None:
    """With equal pasts, the budget is the same whatever is drafted now."""
    generator = torch.Generator().manual_seed(1)
    past = torch.rand(3, 4, generator=generator)
    plans = []
    for now in (torch.full((3, 4), 0.01), torch.full((3, 4), 0.99)):
        policy = AdaptiveVerification(4, costs(STEEP, FREE))
        policy.tokens_to_draft(3)
        policy.verification_lengths(proposal(past), requests(3))
        policy.tokens_to_draft(3)
        policy.verification_lengths(proposal(now), requests(3))
        plans.append(policy.plan)
    assert plans[0] == plans[1]


def test_what_became_worth_drafting_is_found_out() -> None:
    """Costly drafts that were never accepted are not made, until a look in every 64 proposals finds better ones."""
    policy = AdaptiveVerification(3, costs({1: 1.0, 100: 10.0}, {0: 0.0, 3: 2.0}))
    depths = []
    for step in range(260):
        depth = policy.tokens_to_draft(2)
        depths.append(depth)
        if depth:
            certainty = 0.01 if step < 100 else 0.99
            policy.verification_lengths(proposal(torch.full((2, depth), certainty)), requests(2))
    assert depths[0] == 3
    assert depths[1:63] == [0] * 62
    assert depths[63] == 3
    assert depths[-1] == 3


def test_a_draft_that_tells_nothing_is_refused() -> None:
    policy = AdaptiveVerification(2, costs(FLAT, FREE))
    policy.tokens_to_draft(1)
    silent = Proposal(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]))
    with pytest.raises(EngineError, match="tells neither a confidence nor"):
        policy.verification_lengths(silent, requests(1))


def test_the_estimator_converges_to_known_rates() -> None:
    """Outcomes drawn from sigmoid(0.9 x + b_i); what is told before the first refit is the prior."""
    slope, biases = 0.9, torch.tensor([0.3, -0.4, -1.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    estimator = AcceptanceEstimator(3)
    probs = torch.tensor([[0.2, 0.6, 0.9]], dtype=torch.float64)
    prior = torch.sigmoid(0.5 * probs.logit() - 0.2)
    torch.testing.assert_close(estimator.predict(estimator.features(probs)), prior)
    for _ in range(3000):
        features = 0.5 + 1.5 * torch.randn(3, generator=generator, dtype=torch.float64)
        accepted = torch.rand(3, generator=generator) < torch.sigmoid(slope * features + biases)
        estimator.learn(features.tolist(), int(accepted.long().cumprod(0).sum()))
        estimator.step()
    for p in (0.1, 0.4, 0.7, 0.95):
        feature = torch.full((1, 3), p, dtype=torch.float64)
        told = estimator.predict(estimator.features(feature))[0]
        torch.testing.assert_close(told, torch.sigmoid(slope * feature[0].logit() + biases), atol=0.06, rtol=0.0)
    assert estimator.slope == pytest.approx(slope, abs=0.15)


def test_the_estimator_knows_a_rate_that_no_feature_explains() -> None:
    """A draft that is always sure and accepted seven times in ten; its slope never becomes negative."""
    estimator = AcceptanceEstimator(2, interval=10)
    features = estimator.features(torch.tensor([[1.0, 1.0]]))
    assert features.tolist() == [[40.0, 40.0]]
    for turn in range(1000):
        estimator.learn(features[0].tolist(), 2 if turn % 10 < 7 else 0)
        estimator.step()
    assert float(estimator.predict(features)[0, 0]) == pytest.approx(0.7, abs=0.03)
    worse = AcceptanceEstimator(1, interval=10)
    for turn in range(400):
        worse.learn([2.0 if turn % 2 else -2.0], 1 - turn % 2)
        worse.step()
    assert worse.slope == pytest.approx(0.0, abs=1e-9)
    assert float(worse.predict(torch.zeros(1, 1))[0, 0]) == pytest.approx(0.5, abs=0.02)


def test_costs_between_behind_and_before_measured_sizes() -> None:
    table = CostTable({4: 2.0, 8: 4.0, 16: 3.0, 32: 12.0})
    # 16 was measured faster than 8, which only noise can do.
    sizes = torch.tensor([0, 1, 4, 6, 8, 12, 16, 24, 32, 64])
    expected = [2.0, 2.0, 2.0, 3.0, 4.0, 4.0, 4.0, 8.0, 12.0, 28.0]
    torch.testing.assert_close(table.at(sizes), torch.tensor(expected, dtype=torch.float64))
    assert CostTable({3: 0.0}).at(torch.tensor([1, 9])).tolist() == [1e-6, 1e-6]
    with pytest.raises(EngineError, match="at least one measured size"):
        CostTable({})
    both = StepCosts({2: CostTable({2: 2.0, 4: 4.0}), 4: CostTable({4: 8.0, 8: 16.0})}, {2: CostTable({0: 1.0})})
    # Three requests of 1 and 2 tokens lie halfway; eight cost twice what four do.
    assert both.verify_ms(3, torch.tensor([3, 6])).tolist() == pytest.approx([5.0, 10.0])
    assert both.verify_ms(8, torch.tensor([8, 16])).tolist() == pytest.approx([16.0, 32.0])
    assert both.verify_ms(1, torch.tensor([1])).tolist() == pytest.approx([2.0])
    assert both.draft_ms(4, torch.tensor([0, 3])).tolist() == [2.0, 2.0]


def test_the_context_of_the_measurement_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONTEXT_VARIABLE, raising=False)
    assert profile_context_length(100_000) == 8192
    assert profile_context_length(500) == 500
    monkeypatch.setenv(CONTEXT_VARIABLE, "131072")
    assert profile_context_length(200_000) == 131072
    monkeypatch.setenv(CONTEXT_VARIABLE, "-5")
    with pytest.raises(EngineError, match=f"{CONTEXT_VARIABLE}='-5': expected a whole number of tokens"):
        profile_context_length(500)


def test_measured_costs_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of a real verifier and draft; answers stay the verifier's, and a proposer measured with can serve."""
    monkeypatch.setenv(CONTEXT_VARIABLE, "40")
    verifier = random_verifier(32)
    proposer = DraftHeadProposer(random_speculator(verifier).draft, 3, 5)
    measured = measure_costs(verifier, proposer, max_num_seqs=5, max_model_len=64)
    assert sorted(measured.verify) == sorted(measured.draft) == [1, 2, 4, 5]
    assert not measured.padded
    for count in range(1, 7):
        passes = measured.verify_ms(count, count * torch.arange(1, 5))
        assert (passes > 0).all()
        assert (passes.diff() >= 0).all()
        assert (measured.draft_ms(count, torch.arange(4)).diff() >= 0).all()
    params = SamplingParams(temperature=0, max_tokens=20)
    answers = {}
    for depth in (None, AdaptiveVerification(3, measured)):
        engine = Engine(verifier, proposer if depth else None, limits=EngineLimits(5, 64), depth=depth)
        for name in range(7):
            engine.add_request(str(name), [name + 1, 3], params)
        done = {}
        while engine.has_unfinished:
            done |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
        answers[depth is None] = done
    assert answers[True] == answers[False]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one.name)
def test_never_below_the_best_static_depth_by_more_than_three_percent(workload: Workload, padded: bool) -> None:
    line = simulate(workload, 400, padded=padded)
    assert line.ratio >= 0.97, line
    if "32 requests" in workload.name and not padded:
        assert line.ratio > 1.2, line


@pytest.mark.parametrize("workload", SKEWED, ids=lambda one: one.name)
def test_a_length_for_each_request_is_better_than_one_for_all_where_rows_differ(workload: Workload) -> None:
    """Costs of the same number of computed tokens are the same, in both."""
    each, one = (simulate(workload, 400, padded=padded) for padded in (False, True))
    assert each.adaptive > 1.15 * one.adaptive, (each, one)
