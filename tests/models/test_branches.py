"""Sequences that share a row and their beginning, against each of them alone with its softmax written out."""

from typing import Any

import pytest
import torch

from speculators.models.attention_interface import attention, branching
from speculators.models.branches import Branches
from tests.models.test_attention_interface import EXTRAS, MODULE, causal, tensors, written_out

ROWS = [
    [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8, 9, 10]],
    [[1, 2, 3]],
    [[4], [4, 5]],
    [[3, 3, 3], [3, 3, 3]],
    [[1, 2], [2, 1, 3]],
    [[0, *range(300)], [0, *range(150), 7], [0, 2, 9]],
]


def test_what_all_begin_with_stands_once() -> None:
    expected = [(2, (2, 1, 4)), (0, (3,)), (0, (1, 2)), (2, (1, 1)), (0, (2, 3)), (1, (300, 151, 2))]
    for rows, (shared, lengths) in zip(ROWS, expected, strict=True):
        branches, tokens = Branches.of(rows)
        assert (branches.shared, branches.lengths) == (shared, lengths)
        assert len(tokens) == shared + sum(lengths)
        assert [part.tolist() for part in branches.whole(torch.tensor(tokens))] == rows
        positions = branches.whole(branches.positions(torch.device("cpu"))[0])
        assert [part.tolist() for part in positions] == [list(range(len(row))) for row in rows]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("multiple", [1, 16])
def test_each_sequence_attends_as_if_alone(rows: list[list[int]], extra: dict[str, Any], multiple: int) -> None:
    """In a row that is filled up too."""
    branches, tokens = Branches.of(rows, lambda length: -(-length // multiple) * multiple)
    assert len(tokens) % multiple == 0
    query, key, value = tensors(1, len(tokens))
    with branching(branches):
        out, _ = attention(MODULE, query, key, value, None, scaling=0.7, **extra)
    alone = zip(*(branches.whole(one[0].transpose(0, 1)) for one in (query, key, value)), strict=True)
    for found, parts in zip(branches.whole(out[0]), alone, strict=True):
        index = torch.arange(len(found))
        expected = written_out(*(part.transpose(0, 1) for part in parts), causal(index, index, extra), extra)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
