import random

import pytest

from speculators.train.packing import deal, plan_rows, split_steps


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


def chat_lengths(count: int) -> list[int]:
    """Lengths of chats: log-normal with a median of 300 tokens, most between 40 and 2,500."""
    draw = random.Random(11)
    return [max(2, round(draw.lognormvariate(5.7, 1.0))) for _ in range(count)]


def two_kinds(count: int) -> list[int]:
    """One-liners beside books: a row has sixty documents, or one."""
    draw = random.Random(12)
    return [draw.randint(20, 50) if draw.random() < 0.7 else draw.randint(1500, 6000) for _ in range(count)]


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("lengths", [chat_lengths(6000), two_kinds(6000)], ids=["chats", "two kinds"])
@pytest.mark.parametrize(("rows_per_step", "accumulation"), [(1, 1), (2, 3)])
def test_processes_have_as_many_samples_and_none_twice(
    world_size: int, lengths: list[int], rows_per_step: int, accumulation: int
) -> None:
    plan = plan_rows(lengths, 2048, seed=0, epoch=0, window=512)
    documents = [len(row) for row in plan.rows]
    steps = split_steps(len(plan.rows), rows_per_step, accumulation * world_size)
    shares = [deal(steps, documents, rank, world_size) for rank in range(world_size)]
    samples = [
        [
            sample
            for passes, counting in share
            for rows in passes[:counting]
            for row in rows
            for sample in plan.rows[row]
        ]
        for share in shares
    ]
    assert sorted(sample for mine in samples for sample in mine) == list(range(6000))
    counts = [len(mine) for mine in samples]
    assert max(counts) <= 1.1 * min(counts)
    tokens = [sum(min(lengths[sample], 2048) for sample in mine) for mine in samples]
    assert max(tokens) <= 1.1 * min(tokens)
    for step, dealt in zip(steps, zip(*shares, strict=True), strict=True):
        # The step is the same, and every process makes as many passes of it.
        assert sorted(rows for passes, counting in dealt for rows in passes[:counting]) == step
        assert {len(passes) for passes, _ in dealt} == {-(-len(step) // world_size)}
        assert max(counting for _, counting in dealt) - min(counting for _, counting in dealt) <= 1


def test_one_process_has_all_passes_in_order() -> None:
    steps = [[[0, 1], [2], [3]], [[4]]]
    assert deal(steps, [5, 1, 9, 2, 3], 0, 1) == [(steps[0], 3), (steps[1], 1)]


def test_who_had_the_fewest_documents_gets_the_most() -> None:
    steps = [[[0], [1]], [[2], [3]], [[4]]]
    documents = [2, 7, 3, 4, 1]
    # 7 and 2, then 4 to the second, which had 2; of the last step the other has a pass that does not count.
    assert deal(steps, documents, 0, 2) == [([[1]], 1), ([[2]], 1), ([[4]], 0)]
    assert deal(steps, documents, 1, 2) == [([[0]], 1), ([[3]], 1), ([[4]], 1)]
