"""Lossless rules are lossless: exactly, by summing their probabilities, and by chi-square, which wrong rules fail.

Pitfalls 55 to 57: one noise for drafting and drawing, residuals of another rule, cumulative products without block
verification's thresholds, q left out, and q of another row.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from speculators.runtime import rejection
from speculators.runtime.rejection import Verification, draw, emit, verify_block, verify_standard
from tests.runtime.laws import DRAFTS, P0, Q0, P, Q, Verify, codes, compared, completed, drawn, markov_law, of_function

DRAWS = 200_000
RULES: dict[str, Verify] = {"standard": verify_standard, "block": verify_block}
each_rule = pytest.mark.parametrize("rule", RULES)


@each_rule
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_first_four_tokens_follow_the_verifier(rule: str, draft: str) -> None:
    line = of_function(rule, RULES[rule], draft, DRAWS)
    assert line.dof == 80
    assert line.p > 1e-3


def block_with_the_token_rules_residual(*rows: Tensor) -> Verification:
    """Rows 56: max(p - q, 0) where max(share p - q, 0) is due."""
    result = verify_block(*rows)
    target, ids, lengths, draft, _, noise = rows
    weights = rejection.next_weights(target, ids, lengths, draft, result.num_accepted_B)
    return emit(ids, result.num_accepted_B, draw(weights, noise))


def block_by_cumulative_product(*rows: Tensor) -> Verification:
    """Row 56: the longest prefix whose coin lies below the product of ratios."""
    target, ids, lengths, draft, coins, noise = rows
    share = rejection.shares(target, ids, draft)
    ends = torch.arange(1, ids.shape[1] + 1)
    accepted = torch.where((coins < share[:, 1:]) & (ends <= lengths[:, None]), ends, 0).amax(1)
    kept_share = share.gather(1, accepted[:, None])[:, 0]
    weights = rejection.next_weights(target, ids, lengths, draft, accepted, kept_share)
    return emit(ids, accepted, draw(weights, noise))


def standard_that_assumes_a_q_of_one(*rows: Tensor) -> Verification:
    """Rows 56 and 57: the ratio is p(x), the residual is max(p - q, 0)."""
    target, ids, lengths, draft, coins, noise = rows
    accepted = verify_standard(target, ids, lengths, None, coins, noise).num_accepted_B
    return emit(ids, accepted, draw(rejection.next_weights(target, ids, lengths, draft, accepted), noise))


def standard_that_draws_again_from_all_of_p(*rows: Tensor) -> Verification:
    """Row 57: a rejected one-hot draft may come again."""
    target, ids, *_, noise = rows
    accepted = verify_standard(*rows).num_accepted_B
    return emit(ids, accepted, draw(target[torch.arange(len(ids)), accepted], noise))


@pytest.mark.parametrize(
    ("wrong", "draft"),
    [
        (block_with_the_token_rules_residual, "probabilistic"),
        (block_by_cumulative_product, "probabilistic"),
        (block_by_cumulative_product, "one-hot, drawn"),
        (standard_that_assumes_a_q_of_one, "probabilistic"),
        (standard_that_draws_again_from_all_of_p, "one-hot, drawn"),
    ],
)
def test_wrong_rules_are_found_out(wrong: Verify, draft: str) -> None:
    assert of_function("wrong", wrong, draft, DRAWS).p < 1e-9


@each_rule
def test_shared_noise_and_mistaken_rows_are_found_out(rule: str) -> None:
    """Rows 55 and 57: the draft's noise draws again, one coin decides all slots, q is that of the row before."""
    right = drawn("probabilistic", DRAWS, 0)
    assert right.draft_probs_NKV is not None
    wrongs = {
        "draft noise": replace(right, noise_NV=right.draft_noise_KNV[0]),
        "one coin": replace(right, coins_NK=right.coins_NK[:, :1].expand(-1, 3)),
        "another row": replace(right, draft_probs_NKV=right.draft_probs_NKV.roll(1, 0)),
    }
    for name, rows in {"right": right, **wrongs}.items():
        result = RULES[rule](
            rows.target_probs_NSV, rows.draft_ids_NK, rows.lengths_N, rows.draft_probs_NKV, rows.coins_NK, rows.noise_NV
        )
        _, _, p = compared(codes(completed(result.output_ids_BS, 1), 3), markov_law())
        assert p > 1e-3 if name == "right" else p < 1e-9, name


Chains = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def random_chains(seed: int, vocab: int = 3) -> Chains:
    """Laws p and q of a first token and of those after each, some probabilities being zero."""
    generator = np.random.default_rng(seed)
    made = []
    for shape in ((vocab,), (vocab, vocab), (vocab,), (vocab, vocab)):
        law = generator.dirichlet(np.full(vocab, 0.7), size=shape[:-1] or None)
        law = np.where(law < 0.08, 0, law)
        made.append(law / law.sum(-1, keepdims=True))
    return tuple(made)


def every_draft(chains: Chains, num_drafts: int) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
    """All V^K drafts of the chain q: ids, p and q at their positions in float64, and how likely each is."""
    start_p, p, start_q, q = chains
    ids = np.array(list(product(range(len(start_p)), repeat=num_drafts)))
    targets = np.stack([np.broadcast_to(start_p, (len(ids), len(start_p))), *(p[ids[:, i]] for i in range(num_drafts))])
    laws = np.stack([np.broadcast_to(start_q, (len(ids), len(start_q))), *(q[ids[:, i]] for i in range(num_drafts))])
    laws = laws[:-1]
    likely = np.prod([np.take_along_axis(laws[i], ids[:, i, None], 1)[:, 0] for i in range(num_drafts)], axis=0)
    return torch.tensor(ids), torch.tensor(targets).transpose(0, 1), torch.tensor(laws).transpose(0, 1), likely


def thresholds(verify: Verify, rows: tuple[Tensor, Tensor, Tensor, Tensor | None], *, whole: bool) -> np.ndarray:
    """Below which coin each slot passes [N, K], found by halving: of `whole` blocks on its own, else after all before.

    A coin of 1, which chance never gives, passes nowhere but where p(x) > q(x) in the token rule.
    """
    batch, slots = rows[1].shape
    noise = torch.ones(batch, rows[0].shape[2])
    found = np.zeros((batch, slots))
    for slot in range(slots):
        low, high = torch.zeros(batch, dtype=torch.float64), torch.ones(batch, dtype=torch.float64)
        coins = torch.ones(batch, slots, dtype=torch.float64)
        if not whole:
            coins[:, :slot] = 0
        for _ in range(50):
            coins[:, slot] = (low + high) / 2
            passes = verify(*rows, coins, noise).num_accepted_B > slot
            low, high = torch.where(passes, coins[:, slot], low), torch.where(passes, high, coins[:, slot])
        found[:, slot] = high.numpy()
    return found


def acceptance(rule: str, rows: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> np.ndarray:
    """How likely each number of drafts is kept, [N, K+1]."""
    passes = thresholds(RULES[rule], rows, whole=rule == "block")
    if rule == "block":
        # The last slot that passes counts.
        later = np.cumprod((1 - passes)[:, ::-1], 1)[:, ::-1]
        none, last = later[:, :1], np.concatenate([later[:, 1:], np.ones((len(passes), 1))], 1)
        return np.concatenate([none, passes * last], 1)
    reached = np.concatenate([np.ones((len(passes), 1)), np.cumprod(passes, 1)], 1)
    return reached * np.concatenate([1 - passes, np.ones((len(passes), 1))], 1)


def exact_law(rule: str, chains: Chains, depth: int, *, one_hot: bool) -> np.ndarray:
    """Probability of every four tokens, summed over drafts of three slots of which `depth` are used, and over stops."""
    start_p, p, *_ = chains
    vocab = len(start_p)
    ids, target, draft, likely = every_draft(chains, 3)
    rows = (target, ids, torch.full((len(ids),), depth), None if one_hot else draft)
    stops = acceptance(rule, rows)
    shares = rejection.shares(target, ids, rows[3])
    law = np.zeros((vocab,) * 4)
    for kept in range(depth + 1):
        accepted = torch.full((len(ids),), kept)
        share = shares[:, kept] if rule == "block" else None
        weights = rejection.next_weights(target, ids, rows[2], rows[3], accepted, share).numpy()
        following = weights / weights.sum(1, keepdims=True)
        for number, token in product(range(len(ids)), range(vocab)):
            first = (*ids[number, :kept].tolist(), token)
            tails = np.array(likely[number] * stops[number, kept] * following[number, token])
            for _ in range(4 - len(first)):
                tails = tails[..., None] * p[first[-1] if tails.ndim == 0 else np.arange(vocab)]
            law[first] += tails
    return law


@each_rule
@pytest.mark.parametrize("one_hot", [False, True], ids=["probabilistic", "one-hot"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_law_is_exact(rule: str, one_hot: bool, depth: int) -> None:
    """Three slots, of which a shorter row uses some: as in a batch of mixed K."""
    for chains in ((P0, P, Q0, Q), random_chains(1), random_chains(2), random_chains(3)):
        start_p, p, *_ = chains
        expected = start_p[:, None, None, None] * p[:, :, None, None] * p[None, :, :, None] * p[None, None]
        found = exact_law(rule, chains, depth, one_hot=one_hot)
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_block_keeps_at_least_as_many_drafts() -> None:
    """In the mean, and strictly more where a later draft makes up for an earlier one."""
    gains = []
    for chains in ((P0, P, Q0, Q), *(random_chains(seed) for seed in range(10, 30))):
        ids, target, draft, likely = every_draft(chains, 3)
        rows = (target, ids, torch.full((len(ids),), 3), draft)
        kept = {rule: likely @ acceptance(rule, rows) @ np.arange(4) for rule in RULES}
        gains.append(kept["block"] - kept["standard"])
    assert min(gains) > -1e-9
    assert gains[0] > 0.05


def test_expected_acceptance_of_the_token_rule_is_the_overlap() -> None:
    """sum min(p, q) at the first slot (Leviathan et al.)."""
    ids, target, draft, likely = every_draft((P0, P, Q0, Q), 3)
    stops = acceptance("standard", (target, ids, torch.full((len(ids),), 3), draft))
    assert 1 - likely @ stops[:, 0] == pytest.approx(np.minimum(P0, Q0).sum(), abs=1e-12)


@each_rule
def test_where_rounding_leaves_no_residual_the_verifiers_law_decides(rule: str) -> None:
    """p = q but for the last bit of the draft's own: a rejection leaves nothing of p - q."""
    q = torch.tensor([0.0, 0.5, 0.5])
    p = torch.tensor([0.0, 0.5, 0.49999997])
    rows = (p.expand(3, 2, 3), torch.tensor([[2], [2], [2]]), torch.ones(3, dtype=torch.int64), q.expand(3, 1, 3))
    never = torch.ones(3, 1, dtype=torch.float64)
    noise = torch.tensor([[1.0, 2, 1], [1, 1, 2], [1e-30, 1, 1]])
    result = RULES[rule](*rows, never, noise)
    assert result.output_ids_BS.tolist() == [[2, -1], [1, -1], [1, -1]]


ANY_RULE: dict[str, Callable[..., Verification]] = {
    **RULES,
    "synthetic": lambda *rows: rejection.verify_synthetic(*rows, torch.ones(3, dtype=torch.float64)),
}


@pytest.mark.parametrize("rule", ANY_RULE)
def test_a_negative_id_ends_the_drafts_of_its_row(rule: str) -> None:
    """Whatever follows it: as if the row were shorter there, so that the next token comes from p itself (row 57)."""
    rows = drawn("probabilistic", 2000, 3)
    ends = torch.arange(2000) % 4
    cut = torch.where(torch.arange(3) == ends[:, None], -1, rows.draft_ids_NK)
    others = (rows.draft_probs_NKV, rows.coins_NK, rows.noise_NV)
    found = ANY_RULE[rule](rows.target_probs_NSV, cut, rows.lengths_N, *others)
    shorter = ANY_RULE[rule](rows.target_probs_NSV, rows.draft_ids_NK, rows.lengths_N.minimum(ends), *others)
    assert torch.equal(found.output_ids_BS, shorter.output_ids_BS)
    assert int(found.num_accepted_B.max()) == 3
