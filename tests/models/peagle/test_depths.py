"""COD sampling against its formula: sizes, nesting, and the law by which elements are kept."""

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from speculators.models.peagle.depths import kept_sizes, sample_anchors
from speculators.models.supervision import counted_positions

LENGTHS = [40, 7, 25, 1]
# Of the second document the middle is not supervised; the fourth holds a single position.
SUPERVISED = torch.tensor([True] * 40 + [True, True, False, False, True, True, True] + [True] * 25 + [True])


def sampled(seed: int, ratio: float = 0.7, smallest: float = 0.2, depths: int = 8) -> tuple[list[Tensor], Tensor]:
    counted = counted_positions(SUPERVISED, LENGTHS, depths)
    torch.manual_seed(seed)
    return sample_anchors(counted, LENGTHS, ratio, smallest), counted


def of_document(anchors: Tensor, number: int) -> list[int]:
    first = sum(LENGTHS[:number])
    return [anchor - first for anchor in anchors.tolist() if first <= anchor < first + LENGTHS[number]]


def test_sizes_by_hand() -> None:
    # 0.7^d is 0.7, 0.49, 0.343, 0.2401, 0.16807: from depth 5 on the least share, 0.2, holds.
    assert kept_sizes(40, 8, 0.7, 0.2) == [40, 27, 18, 12, 8, 7, 6, 6]
    assert kept_sizes(3, 6, 1.0, 0.0) == [3, 2, 1, 0, 0, 0]
    assert kept_sizes(0, 3, 0.7, 0.2) == [0, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_every_document_keeps_what_the_formula_says_of_it(seed: int) -> None:
    """A document's share does not depend on the row that it lies in (pitfall 18)."""
    anchors, _ = sampled(seed)
    for number, valid in ((0, 40), (2, 25)):
        before = list(range(valid))
        for depth, places in enumerate(anchors):
            candidates = [anchor for anchor in before if anchor + depth < valid]
            before = of_document(places, number)
            assert len(before) == min(int((valid - depth) * max(0.7**depth, 0.2)), len(candidates))
            assert set(before) <= set(candidates)
    # Five valid positions; at depth 1 three have a supervised successor, at depth 2 one has two of them.
    assert [len(of_document(places, 1)) for places in anchors][:2] == [5, int(4 * 0.7)]
    assert [len(of_document(places, 3)) for places in anchors] == [1, *[0] * 7]


@pytest.mark.parametrize("seed", range(5))
def test_kept_elements_have_all_their_ancestors_and_something_to_learn(seed: int) -> None:
    anchors, counted = sampled(seed)
    ends = torch.tensor(LENGTHS).cumsum(0)
    for depth, places in enumerate(anchors):
        assert torch.equal(places, places.unique())
        assert counted[depth][places].all()
        if depth:
            assert set(places.tolist()) <= set(anchors[depth - 1].tolist())
        same = torch.searchsorted(ends, places, right=True) == torch.searchsorted(ends, places + depth, right=True)
        assert same.all()


def test_without_dropping_all_that_can_be_learnt_is_kept() -> None:
    anchors, counted = sampled(0, ratio=1.0)
    kept = torch.ones_like(SUPERVISED)
    for places, mask in zip(anchors, counted, strict=True):
        kept = kept & mask
        assert torch.equal(places, kept.nonzero().squeeze(1))


def test_the_draw_is_uniform_among_those_with_ancestors() -> None:
    """Of 40 elements 38 can have descendants of depth 2 and 18 are kept; wherever they lie, their chances are alike."""
    draws = 800
    counted = counted_positions(torch.ones(40, dtype=torch.bool), [40], 3)
    torch.manual_seed(0)
    counts = torch.zeros(38)
    for _ in range(draws):
        counts[sample_anchors(counted, [40], 0.7, 0.2)[2]] += 1
    share = 18 / 38
    # The counts of one draw have a fixed sum: of this statistic's 38 terms 37 are free.
    statistic = ((counts - draws * share) ** 2).sum() / (draws * share * (1 - share)) * (37 / 38)
    assert chi2.ppf(1e-6, 37) < statistic < chi2.ppf(1 - 1e-6, 37)


def test_the_global_generator_decides_and_documents_draw_one_after_another() -> None:
    together, _ = sampled(3)
    assert all(torch.equal(one, other) for one, other in zip(together, sampled(3)[0], strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(together, sampled(4)[0], strict=True))
    torch.manual_seed(3)
    for number, length in enumerate(LENGTHS):
        first = sum(LENGTHS[:number])
        counted = counted_positions(SUPERVISED[first : first + length], [length], 8)
        alone = sample_anchors(counted, [length], 0.7, 0.2)
        assert [places.tolist() for places in alone] == [of_document(places, number) for places in together]
