"""Verification rules against exact laws: pitfall 55 and pitfall 57."""

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from speculators.runtime.rejection import draw, verify_greedy, verify_standard

P = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1]])
Q = P[:, ::-1].copy()
DRAWS = 200_000


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def joint_counts(outputs: torch.Tensor, length: int, vocab: int) -> np.ndarray:
    """Counts over the first `length` tokens; rows that emitted fewer are completed by the caller."""
    code = torch.zeros(len(outputs), dtype=torch.int64)
    for place in range(length):
        code = code * vocab + outputs[:, place]
    return torch.bincount(code, minlength=vocab**length).numpy()


@pytest.mark.parametrize("probabilistic", [True, False])
def test_first_two_tokens_follow_the_verifier(probabilistic: bool) -> None:
    """Position laws are independent here, so the joint law of two tokens is a product (rows 55, 57)."""
    generator = torch.Generator().manual_seed(11)
    p_BSV = torch.tensor(P, dtype=torch.float32).expand(DRAWS, 3, 4)
    q_BKV = torch.tensor(Q[:2], dtype=torch.float32).expand(DRAWS, 2, 4)
    drafts = torch.stack([torch.multinomial(q_BKV[0, k], DRAWS, True, generator=generator) for k in range(2)], 1)
    accept = torch.rand(DRAWS, 2, dtype=torch.float64, generator=generator)
    noise = torch.empty(DRAWS, 4).exponential_(generator=generator)
    result = verify_standard(p_BSV, drafts, torch.full((DRAWS,), 2), q_BKV if probabilistic else None, accept, noise)
    outputs = result.output_ids_BS
    # A row that stopped after one token draws its second from the law of position 1.
    second = torch.multinomial(p_BSV[0, 1], DRAWS, True, generator=generator)
    outputs[:, 1] = torch.where(outputs[:, 1] < 0, second, outputs[:, 1])
    statistic = chi_square(joint_counts(outputs, 2, 4), np.outer(P[0], P[1]).ravel() * DRAWS)
    assert statistic < chi2.ppf(1 - 1e-6, 15)


def test_acceptance_rate_is_the_overlap() -> None:
    """With drafts from q, position 1 is accepted with probability sum min(p, q) (Leviathan et al.)."""
    generator = torch.Generator().manual_seed(3)
    p = torch.tensor(P[0], dtype=torch.float32).expand(DRAWS, 2, 4)
    q = torch.tensor(Q[0], dtype=torch.float32).expand(DRAWS, 1, 4)
    drafts = torch.multinomial(q[0, 0], DRAWS, True, generator=generator)[:, None]
    accept = torch.rand(DRAWS, 1, dtype=torch.float64, generator=generator)
    noise = torch.empty(DRAWS, 4).exponential_(generator=generator)
    rate = verify_standard(p, drafts, torch.ones(DRAWS, dtype=torch.long), q, accept, noise).num_accepted_B.double()
    overlap = np.minimum(P[0], Q[0]).sum()
    assert abs(float(rate.mean()) - overlap) < 5 * np.sqrt(overlap * (1 - overlap) / DRAWS)


def test_one_hot_residual_excludes_the_draft() -> None:
    """A rejected one-hot draft is never drawn again: p without it is what remains (row 57)."""
    p = torch.tensor(P[0], dtype=torch.float32).expand(1000, 2, 4)
    drafts = torch.zeros(1000, 1, dtype=torch.int64)
    noise = torch.empty(1000, 4).exponential_(generator=torch.Generator().manual_seed(0))
    never = torch.ones(1000, 1, dtype=torch.float64)
    result = verify_standard(p, drafts, torch.ones(1000, dtype=torch.long), None, never, noise)
    assert result.num_accepted_B.sum() == 0
    assert (result.output_ids_BS[:, 0] != 0).all()
    assert (result.output_ids_BS[:, 1] == -1).all()


def test_residual_is_exact() -> None:
    """At a rejection the law of the emitted token is max(p - q, 0) normalised."""
    p = torch.tensor(P[0], dtype=torch.float32).expand(DRAWS, 2, 4)
    q = torch.tensor(Q[0], dtype=torch.float32).expand(DRAWS, 1, 4)
    noise = torch.empty(DRAWS, 4).exponential_(generator=torch.Generator().manual_seed(5))
    drafts = torch.full((DRAWS, 1), 3)
    never = torch.full((DRAWS, 1), 0.999, dtype=torch.float64)
    result = verify_standard(p, drafts, torch.ones(DRAWS, dtype=torch.long), q, never, noise)
    residual = np.maximum(P[0] - Q[0], 0)
    residual /= residual.sum()
    counts = torch.bincount(result.output_ids_BS[:, 0], minlength=4).numpy()
    assert counts[residual == 0].sum() == 0
    kept = residual > 0
    assert chi_square(counts[kept], residual[kept] * DRAWS) < chi2.ppf(1 - 1e-6, kept.sum() - 1)


def test_rows_without_drafts_draw_from_the_verifier() -> None:
    """Length 0 rows in a batch of longer ones are plain sampling, whatever their padding holds."""
    p = torch.tensor(P, dtype=torch.float32).expand(DRAWS, 3, 4)
    noise = torch.empty(DRAWS, 4).exponential_(generator=torch.Generator().manual_seed(8))
    result = verify_standard(
        p,
        torch.zeros(DRAWS, 2, dtype=torch.int64),
        torch.zeros(DRAWS, dtype=torch.long),
        None,
        torch.zeros(DRAWS, 2, dtype=torch.float64),
        noise,
    )
    counts = torch.bincount(result.output_ids_BS[:, 0], minlength=4).numpy()
    assert chi_square(counts, P[0] * DRAWS) < chi2.ppf(1 - 1e-6, 3)
    assert (result.output_ids_BS[:, 1:] == -1).all()


def test_greedy_keeps_the_matching_prefix() -> None:
    targets = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]])
    drafts = torch.tensor([[5, 6], [5, 9], [9, 6], [5, 6]])
    result = verify_greedy(targets, drafts, torch.tensor([2, 2, 2, 1]))
    assert result.num_accepted_B.tolist() == [2, 1, 0, 1]
    assert result.output_ids_BS.tolist() == [[5, 6, 7], [5, 6, -1], [5, -1, -1], [5, 6, -1]]


def test_draw_follows_the_weights() -> None:
    weights = torch.tensor([0.5, 0.25, 0.25, 0.0]).expand(DRAWS, 4)
    noise = torch.empty(DRAWS, 4).exponential_(generator=torch.Generator().manual_seed(2))
    counts = torch.bincount(draw(weights, noise), minlength=4).numpy()
    assert counts[3] == 0
    assert chi_square(counts[:3], np.array([0.5, 0.25, 0.25]) * DRAWS) < chi2.ppf(1 - 1e-6, 2)
