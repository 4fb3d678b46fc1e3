"""Verification lengths from confidence: the allocation, the rules of `dynamic_spec_config`, and what is sampled."""

import itertools
from collections.abc import Callable
from math import ceil

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from speculators.errors import EngineError
from speculators.models.draft_model import Proposal
from speculators.runtime.confidence import ConfidenceBudget, allocate, survival
from speculators.runtime.proposers.top_probs import TopProbs
from speculators.runtime.rejection import verify_standard
from speculators.runtime.request import Request
from speculators.runtime.sampling import SamplingParams


def request(max_length: int = 1000, temperature: float = 0.0) -> Request:
    params = SamplingParams(temperature=temperature)
    return Request("r", [1, 2], params, eos_token_ids=frozenset(), max_length=max_length, stats=None)


def proposal(confidence: Tensor, *, head: bool = False, lengths: list[int] | None = None) -> Proposal:
    rows, width = confidence.shape
    lengths_B = torch.tensor(lengths or [width] * rows)
    ids_BK = torch.zeros(rows, width, dtype=torch.int64)
    return Proposal(ids_BK, lengths_B, None, confidence if head else None, None if head else confidence)


def test_survival_is_the_running_product() -> None:
    confidence = torch.tensor([[0.9, 0.5, 0.0], [1.0, 2.0, 0.3]])
    expected = [[0.9, 0.45, 0.45e-6], [1.0, 1.0, 0.3]]
    torch.testing.assert_close(survival(confidence), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("least", [0, 1, 2])
def test_a_budget_goes_to_the_likeliest_drafts(least: int) -> None:
    """Of all lengths that keep within the budget, those allocated have the largest sum of survivals."""
    generator = torch.Generator().manual_seed(least)
    for budget in range(12):
        survivals = survival(torch.rand(3, 4, generator=generator))
        limits = torch.randint(0, 5, (3,), generator=generator)
        lengths = allocate(survivals, limits, budget, least)
        kept = [min(least, limit) for limit in limits.tolist()]
        choices = itertools.product(*(range(low, high + 1) for low, high in zip(kept, limits.tolist(), strict=True)))

        def worth(choice: tuple[int, ...], survivals: Tensor = survivals) -> float:
            return sum(float(survivals[row, :length].sum()) for row, length in enumerate(choice))

        allowed = [choice for choice in choices if sum(choice) - sum(kept) <= budget]
        assert tuple(lengths) in allowed
        assert worth(tuple(lengths)) == pytest.approx(max(map(worth, allowed)))


def test_of_equals_the_earlier_position_then_the_earlier_row_comes_first() -> None:
    ones, limits = torch.ones(3, 3, dtype=torch.float64), torch.tensor([3, 3, 3])
    lengths = [allocate(ones, limits, budget) for budget in range(10)]
    assert lengths[:5] == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1]]
    assert lengths[9] == [3, 3, 3]
    assert allocate(ones, torch.tensor([0, 1, 3]), 99) == [0, 1, 3]


def test_a_request_with_sure_drafts_takes_what_another_leaves() -> None:
    """The fifth draft of a sure row comes before the first of an unsure one."""
    confidence = torch.tensor([[0.95] * 5, [0.2] * 5])
    assert allocate(survival(confidence), torch.tensor([5, 5]), 5) == [5, 0]
    assert allocate(survival(confidence), torch.tensor([5, 5]), 4, least=1) == [5, 1]


@pytest.mark.parametrize("head", [True, False])
def test_lengths_follow_the_rules(head: bool) -> None:
    """Against a form of the rules in plain Python, over batches of changing size; a new budget holds from the next."""
    most, interval, threshold, least = 7, 3, 0.4, 1
    policy = ConfidenceBudget(
        most,
        from_head=head,
        initial_verify_budget_per_req=5,
        budget_update_interval=interval,
        budget_threshold=threshold,
        min_verify_tokens=least,
    )
    generator, budget, budgets = torch.Generator().manual_seed(1), 5, set()
    for turn in range(1, 31):
        rows = 1 + turn % 4
        confidence = torch.rand(rows, most, generator=generator) ** (0.1 if turn < 16 else 1.0)
        lengths = policy.verification_lengths(proposal(confidence, head=head), [request() for _ in range(rows)])
        products = np.cumprod(confidence.double().numpy(), 1)
        extra = sorted((-products[r, i], i, r) for r in range(rows) for i in range(least, most))
        taken = [r for _, _, r in extra[: rows * (budget - least)]]
        assert lengths == [least + taken.count(row) for row in range(rows)]
        if turn % interval == 0:
            mean = int((products >= threshold).sum()) / rows
            budget = ceil(mean) + (ceil(mean) % 2 == 0 and ceil(mean) < most)
            budget = max(least, min(budget, most))
            budgets.add(budget)
        assert policy.budget_per_request == budget
    assert {1, 3, 7} <= budgets
    assert policy.tokens_to_draft(3) == most


def test_every_request_keeps_its_least_but_never_more_than_fits() -> None:
    policy = ConfidenceBudget(4, from_head=False, initial_verify_budget_per_req=2, min_verify_tokens=2)
    confidence = torch.tensor([[1e-9] * 4, [1.0] * 4, [1.0] * 4, [1.0] * 4])
    # A row without drafts, and one whose request has room for a single draft.
    rows = [request(), request(), request(), request(max_length=4)]
    assert policy.verification_lengths(proposal(confidence, lengths=[4, 4, 0, 4]), rows) == [2, 2, 0, 1]


def test_defaults() -> None:
    policy = ConfidenceBudget(7, from_head=False)
    assert policy.budget_per_request == 5
    one = torch.full((1, 7), 0.3 ** (1 / 3) + 1e-6)
    for _ in range(15):
        assert policy.verification_lengths(proposal(one), [request()]) == [5]
    # Three survivals are at least 0.3, and the sixteenth proposal counts them.
    assert policy.verification_lengths(proposal(one), [request()]) == [5]
    assert policy.verification_lengths(proposal(one), [request()]) == [3]
    assert ConfidenceBudget(3, from_head=True).budget_per_request == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("initial_verify_budget_per_req", 0), "initial_verify_budget_per_req=0.*at least 1"),
        (("initial_verify_budget_per_req", 2.0), "initial_verify_budget_per_req=2.0"),
        (("budget_update_interval", 0), "budget_update_interval=0.*at least 1"),
        (("budget_update_interval", True), "budget_update_interval=True"),
        (("budget_threshold", 1.5), r"budget_threshold=1.5: expected a number in \[0, 1\]"),
        (("budget_threshold", "0.3"), "budget_threshold='0.3'"),
        (("min_verify_tokens", -1), r"min_verify_tokens=-1.*0 to 7"),
        (("min_verify_tokens", 8), r"min_verify_tokens=8.*0 to 7"),
    ],
)
def test_each_fault_is_named(given: tuple[str, object], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        ConfidenceBudget(7, from_head=True, **dict([given]))


def test_a_draft_that_tells_nothing_is_refused() -> None:
    policy = ConfidenceBudget(2, from_head=True)
    with pytest.raises(EngineError, match="does not give a confidence head"):
        policy.verification_lengths(proposal(torch.ones(1, 2)), [request()])


def test_top_probabilities_are_those_at_the_requests_temperature() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.5, 0.0, -1.0]])
    sampler = TopProbs(lambda logits_BD, step: (logits_BD.argmin(-1), None), [request(), request(temperature=0.5)])
    ids, probs = sampler(logits, 0)
    assert ids.tolist() == [0, 2]
    assert probs is None
    sampler(2 * logits, 1)
    told = sampler.told(Proposal(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([2, 2])))
    expected = [
        [float(np.exp(scale * row.max()) / np.exp(scale * row).sum()) for scale in scales]
        for row, scales in zip(logits.numpy(), ([1, 2], [2, 4]), strict=True)
    ]
    torch.testing.assert_close(told.top_probs_BK, torch.tensor(expected))
    certain = Proposal(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([2, 2]), None, torch.ones(2, 2))
    assert sampler.told(certain) is certain


# Markov laws of verifier and draft over three tokens, far apart, and confidences that follow the token before.
P = np.array([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.3, 0.4, 0.3]])
Q = np.array([[0.2, 0.5, 0.3], [0.5, 0.4, 0.1], [0.1, 0.3, 0.6]])
OVERLAP = np.minimum(P, Q).sum(1)
DRAWS = 40_000


def two_rows(lengths_of: Callable[[Tensor], list[list[int]]]) -> tuple[float, int]:
    """Chi-square of the first two tokens of both of two requests together, and its degrees of freedom.

    Each has two drafts from Q after a token 0; `lengths_of` takes the drafts [N, 2, 2].
    """
    generator = torch.Generator().manual_seed(3)
    q_VV, p_VV = torch.tensor(Q), torch.tensor(P)
    first_NR = torch.multinomial(q_VV[0].expand(2 * DRAWS, 3), 1, generator=generator).view(DRAWS, 2)
    second_NR = torch.multinomial(q_VV[first_NR.flatten()], 1, generator=generator).view(DRAWS, 2)
    drafts_NRK = torch.stack([first_NR, second_NR], 2)
    lengths = torch.tensor(lengths_of(drafts_NRK)).flatten()
    before_BS = torch.cat([torch.zeros(2 * DRAWS, 1, dtype=torch.int64), drafts_NRK.flatten(0, 1)], 1)
    accept = torch.rand(2 * DRAWS, 2, dtype=torch.float64, generator=generator)
    noise = torch.empty(2 * DRAWS, 3).exponential_(generator=generator)
    result = verify_standard(p_VV[before_BS], before_BS[:, 1:], lengths, q_VV[before_BS[:, :2]], accept, noise)
    outputs = result.output_ids_BS[:, :2]
    later = torch.multinomial(p_VV[outputs[:, 0]], 1, generator=generator)[:, 0]
    outputs[:, 1] = torch.where(outputs[:, 1] < 0, later, outputs[:, 1])
    codes = (3 * outputs[:, 0] + outputs[:, 1]).view(DRAWS, 2)
    law = (P[0][:, None] * P).flatten()
    counts = torch.bincount(9 * codes[:, 0] + codes[:, 1], minlength=81).numpy()
    expected = DRAWS * np.outer(law, law).flatten()
    return float(((counts - expected) ** 2 / expected).sum()), 80


def shared_budget(drafts_NRK: Tensor) -> list[list[int]]:
    """A budget of three for both rows: what one drafted first decides whether the other's second is verified."""
    overlap = torch.tensor(OVERLAP)
    previous = torch.cat([torch.zeros(len(drafts_NRK), 2, 1, dtype=torch.int64), drafts_NRK[:, :, :1]], 2)
    limits = torch.tensor([2, 2])
    return [allocate(survival(one), limits, 3) for one in overlap[previous]]


def peeking(drafts_NRK: Tensor) -> list[list[int]]:
    """Wrong: verifies a draft when it is itself a likely one."""
    return (drafts_NRK == 1).long().cumprod(2).sum(2).tolist()


def test_trimming_by_confidence_leaves_the_joint_law_of_rows_that_compete_unchanged() -> None:
    statistic, freedom = two_rows(shared_budget)
    assert statistic < chi2.ppf(1 - 1e-5, freedom)


def test_trimming_by_the_draft_itself_would_be_seen() -> None:
    statistic, freedom = two_rows(peeking)
    assert statistic > 10 * chi2.ppf(1 - 1e-5, freedom)


def test_lengths_of_the_competing_rows_differ() -> None:
    """What the law is tested with: the row whose first draft leads to the larger overlap has both verified."""
    drafts = torch.tensor(list(itertools.product(range(3), repeat=4))).view(-1, 2, 2)
    for row, share in zip(drafts, shared_budget(drafts), strict=True):
        mine, other = OVERLAP[row[:, 0]]
        assert share == ([2, 1] if mine >= other else [1, 2])
