"""Rows of hidden states in a paged cache, against a plain list of each request's rows."""

import random

import pytest
import torch

from speculators.errors import StoreError
from speculators.extract.paged_states import PagedStates, Rows

BLOCKS, LAYERS, SLOTS, HIDDEN = 12, 3, 4, 8


def make_cache() -> torch.Tensor:
    return torch.zeros(BLOCKS, LAYERS, SLOTS, HIDDEN)


def capture(cache: torch.Tensor, block_ids: list[int], first: int, rows: torch.Tensor) -> None:
    """What the engine does with a pass's rows, one at a time."""
    for number, row in enumerate(rows, start=first):
        cache[block_ids[number // SLOTS], :, number % SLOTS] = row


@pytest.mark.parametrize("num_rows", [0, 1, 4, 5, 11, 12])
def test_rows_come_out_in_their_order_from_scattered_blocks(num_rows) -> None:
    cache, block_ids = make_cache(), [7, 2, 9]
    rows = torch.randn(12, LAYERS, HIDDEN)
    capture(cache, block_ids, 0, rows)
    copied = PagedStates(cache, SLOTS).copy(block_ids, num_rows)
    copied.wait()
    assert copied.done
    assert torch.equal(copied.states_TAH, rows[:num_rows])
    capture(cache, block_ids, 0, torch.full((12, LAYERS, HIDDEN), 5.0))
    assert torch.equal(copied.states_TAH, rows[:num_rows])


def test_passes_of_any_size_over_two_requests_lose_no_row() -> None:
    order = random.Random(0)
    cache = make_cache()
    states = PagedStates(cache, SLOTS)
    blocks = {"a": [3, 1, 8], "b": [0, 11, 5]}
    rows = {name: torch.randn(12, LAYERS, HIDDEN) for name in blocks}
    reached = dict.fromkeys(blocks, 0)
    while min(reached.values()) < 12:
        counts = {name: min(order.randrange(4), 12 - start) for name, start in reached.items()}
        states.mark(
            [
                Rows(blocks[name][reached[name] // SLOTS :], reached[name] % SLOTS, count)
                for name, count in counts.items()
                if count
            ]
        )
        for name, count in counts.items():
            capture(cache, blocks[name], reached[name], rows[name][reached[name] : reached[name] + count])
            reached[name] += count
    for name, block_ids in blocks.items():
        copied = states.copy(block_ids, 12)
        copied.wait()
        assert torch.equal(copied.states_TAH, rows[name])


def test_a_row_that_was_announced_and_never_captured_is_an_error() -> None:
    cache, block_ids = make_cache(), [6, 4]
    states = PagedStates(cache, SLOTS)
    states.mark([Rows(block_ids, 0, 7)])
    capture(cache, block_ids, 0, torch.randn(5, LAYERS, HIDDEN))
    states.copy(block_ids, 5).wait()
    with pytest.raises(StoreError, match=r"2 of 7 rows were never captured.*the first is row 5"):
        states.copy(block_ids, 7).wait()


def test_what_a_block_held_for_an_earlier_request_is_never_taken_for_its_new_one() -> None:
    cache, block_ids = make_cache(), [6, 4]
    states = PagedStates(cache, SLOTS)
    capture(cache, block_ids, 0, torch.randn(8, LAYERS, HIDDEN))
    states.mark([Rows([4], 1, 2)])
    with pytest.raises(StoreError, match="2 of 3 rows"):
        states.copy([4], 3).wait()
    states.copy([6], 4).wait()


def test_more_rows_than_blocks_hold_is_an_error() -> None:
    with pytest.raises(StoreError, match="9 tokens, but only 2 blocks of 4 rows were computed"):
        PagedStates(make_cache(), SLOTS).copy([6, 4], 9)


def test_a_cache_laid_out_otherwise_is_refused() -> None:
    with pytest.raises(StoreError, match=r"\[blocks, layers, 4, hidden size\]"):
        PagedStates(make_cache().transpose(1, 2), SLOTS)
