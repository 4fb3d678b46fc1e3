import random

import pytest

from speculators.train.packing import plan_rows, split_steps


def some_lengths(count: int, longest: int) -> list[int]:
    draw = random.Random(5)
    return [draw.randint(1, longest) for _ in range(count)]


@pytest.mark.parametrize("window", [7, 64, 1000])
def test_every_document_is_packed_once_and_rows_never_overflow(window: int) -> None:
    lengths = some_lengths(300, 90)
    plan = plan_rows(lengths, 64, seed=3, epoch=1, window=window)
    assert sorted(document for row in plan.rows for document in row) == list(range(300))
    assert plan.filled == [sum(min(lengths[document], 64) for document in row) for row in plan.rows]
    assert max(plan.filled) <= 64


def test_a_document_longer_than_a_row_has_a_row_of_its_own() -> None:
    plan = plan_rows([10, 500, 3], 64, seed=0, epoch=0, window=10)
    assert sorted(plan.rows) == [[0, 2], [1]]
    assert sorted(plan.filled) == [13, 64]
    assert plan.utilisation == pytest.approx(77 / 128)


def test_best_fit_chooses_the_row_with_the_least_room_that_holds_the_document() -> None:
    # Longest first: 7 and 6 open two rows (rooms 3 and 4), 4 fits only the second, 3 the first.
    plan = plan_rows([7, 6, 4, 3], 10, seed=0, epoch=0, window=4)
    assert sorted(plan.rows) == [[0, 3], [1, 2]]
    assert plan.utilisation == 1.0


def test_rows_are_nearly_full() -> None:
    # 160 rows of documents of up to a fifth of a row: first fit would already leave less than a tenth empty.
    plan = plan_rows(some_lengths(1600, 205), 1024, seed=0, epoch=0, window=512)
    assert plan.utilisation > 0.96


def test_a_plan_is_a_function_of_seed_and_epoch() -> None:
    lengths = some_lengths(100, 30)
    first = plan_rows(lengths, 64, seed=1, epoch=0, window=50)
    assert first == plan_rows(lengths, 64, seed=1, epoch=0, window=50)
    assert first.rows != plan_rows(lengths, 64, seed=1, epoch=1, window=50).rows
    assert first.rows != plan_rows(lengths, 64, seed=2, epoch=0, window=50).rows


def test_steps_hold_every_row_once_in_order() -> None:
    steps = split_steps(11, rows_per_step=2, accumulation=3)
    assert steps == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10]]]
    assert split_steps(3, rows_per_step=1, accumulation=2) == [[[0], [1]], [[2]]]
    assert split_steps(0, rows_per_step=1, accumulation=2) == []
