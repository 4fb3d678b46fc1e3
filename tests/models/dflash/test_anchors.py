"""Where training blocks may stand, and how their anchors are drawn."""

import pytest
import torch

from speculators.models.dflash.anchors import Positions, shared_evenly
from tests.models.drafts import pack


def anchors(masks: list[list[int]], block_size: int = 4, most: int = 512, **options: int) -> list[int]:
    batch = pack(masks, row=sum(map(len, masks)))
    return Positions.of(batch).anchors(block_size, most, **options).tolist()


def test_an_anchor_is_supervised_and_its_document_reaches_beyond_its_block() -> None:
    """The last of 10 tokens that can be one is 5: its block is 5..8, and token 9 is there for the last slot."""
    assert anchors([[1] * 10]) == [0, 1, 2, 3, 4, 5]
    assert anchors([[0, 0, 1, 0, 1, 1, 1, 1, 1, 1]]) == [2, 4, 5]


def test_no_block_crosses_into_the_next_document() -> None:
    """Pitfall 17; the second document starts supervised, the third is too short for a block."""
    assert anchors([[1] * 6, [1] * 7, [1] * 4]) == [0, 1, 6, 7, 8]


def test_the_token_before_an_answer_only_on_request() -> None:
    """Pitfall 21: a served anchor is a sampled token, and so the header's last token is none."""
    mask = [[0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1]]
    assert anchors(mask) == [2, 3, 6]
    assert anchors(mask, before_answers=True) == [1, 2, 3, 5, 6]


def test_the_token_before_an_answer_is_one_of_its_own_document() -> None:
    assert anchors([[0] * 9, [1] * 5], before_answers=True) == [9]


def test_anchors_are_counted_a_document() -> None:
    """Pitfall 18: packed beside a long document, a short one keeps its anchors."""
    short, long = [1] * 20, [1] * 200
    found = anchors([short, long, short], most=16)
    assert sum(index < 20 for index in found) == 16
    assert sum(20 <= index < 220 for index in found) == 16
    assert sum(index >= 220 for index in found) == 16
    assert len(anchors([short], most=16)) == 16
    assert len(anchors([[1] * 12, long], most=16)) == 8 + 16


def test_the_blocks_of_a_pass_are_shared_evenly() -> None:
    # Documents of 9, 7 and 5 places; 4 end without a place.
    masks = [[1] * 13, [1] * 11, [1] * 9]
    ends = (13, 24, 33)

    def by_document(**options: int) -> list[int]:
        found = torch.tensor(anchors(masks, **options))
        return [int(((found >= end - len(mask)) & (found < end)).sum()) for mask, end in zip(masks, ends, strict=True)]

    assert by_document(max_blocks=100) == [9, 7, 5]
    assert by_document(max_blocks=20) == [8, 7, 5]
    assert by_document(max_blocks=12) == [4, 4, 4]
    assert by_document(max_blocks=3, most=2) == [1, 1, 1]
    assert by_document(max_blocks=1) in ([1, 0, 0], [0, 1, 0], [0, 0, 1])


@pytest.mark.parametrize(
    ("wanted", "total", "given"),
    [
        ([3, 27, 50], 40, [3, 18, 19]),
        ([5, 5], 100, [5, 5]),
        ([], 3, []),
        ([4, 0, 4], 5, [2, 0, 3]),
    ],
)
def test_an_even_share(wanted: list[int], total: int, given: list[int]) -> None:
    assert shared_evenly(wanted, total) == given


def test_too_many_are_drawn_evenly_by_torchs_global_generator() -> None:
    torch.manual_seed(3)
    first = anchors([[1] * 104], most=10)
    again = anchors([[1] * 104], most=10)
    torch.manual_seed(3)
    assert anchors([[1] * 104], most=10) == first
    assert first != again
    assert first == sorted(set(first))
    counts = torch.zeros(100)
    for _ in range(400):
        counts[anchors([[1] * 104], most=10)] += 1
    # Each is drawn with probability 0.1: 40 times of 400, with a standard deviation of 6.
    assert counts.sum() == 4000
    assert counts.min() > 40 - 5 * 6
    assert counts.max() < 40 + 5 * 6


def test_padding_and_short_documents_are_left_out() -> None:
    batch = pack([[1] * 6, [0, 1, 1], [1, 0] * 4], row=10)
    found = Positions.of(batch, min_length=4)
    assert found.document_lengths == [6, 8]
    assert torch.equal(found.token_ids_C, torch.cat((batch.input_ids[0, :6], batch.input_ids[1, :8])))
    assert torch.equal(found.positions_C, torch.cat((torch.arange(6), torch.arange(8))))
    assert found.supervised_C.tolist() == [True] * 6 + [True, False] * 4
    assert torch.equal(found.features_CX[6:], batch.aux_hidden_states[1, :8])
    assert torch.equal(found.last_hidden_states_CH[:6], batch.last_hidden_states[0, :6])


@pytest.mark.parametrize("masks", [[], [[1] * 4]])
def test_nothing_is_left_of_padding_alone(masks: list[list[int]]) -> None:
    found = Positions.of(pack(masks, row=6), min_length=5)
    assert found.document_lengths == []
    assert found.anchors(4, 8).tolist() == []
