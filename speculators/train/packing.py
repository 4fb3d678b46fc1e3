"""Which documents share a row: best fit, decreasing, inside a shuffled window.

A document is never split over rows; one longer than a row is cut. The plan of an epoch is a function of the lengths,
the seed and the epoch alone, so that a position in it (epoch, step) says everything a resumed run needs to know.
"""

import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PackingPlan:
    """The rows of one epoch; `rows[r]` lists the documents of row r in their order, `filled[r]` counts its tokens."""

    rows: list[list[int]]
    filled: list[int]
    row_length: int

    @property
    def utilisation(self) -> float:
        """Share of the rows' positions that hold a token."""
        return sum(self.filled) / (self.row_length * len(self.rows)) if self.rows else 0.0


def plan_rows(lengths: Sequence[int], row_length: int, *, seed: int, epoch: int, window: int) -> PackingPlan:
    """Packs every document once.

    Documents are shuffled over the whole set, taken `window` at a time, longest first, each put into the row of that
    window with the least room that still holds it; then the rows of all windows are shuffled.
    """
    shuffler = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    shuffler.shuffle(order)
    rows: list[list[int]] = []
    for first in range(0, len(order), window):
        rows.extend(_best_fit(order[first : first + window], lengths, row_length))
    shuffler.shuffle(rows)
    filled = [sum(min(lengths[document], row_length) for document in row) for row in rows]
    return PackingPlan(rows, filled, row_length)


def _best_fit(documents: list[int], lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Rows of one window; ties between documents go by their shuffled order, ties between rows to the older row."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for document in sorted(documents, key=lambda index: -min(lengths[index], row_length)):
        length = min(lengths[document], row_length)
        slot = bisect_left(room, (length, -1))
        if slot == len(room):
            rows.append([document])
            insort(room, (row_length - length, len(rows) - 1))
        else:
            left, row = room.pop(slot)
            rows[row].append(document)
            insort(room, (left - length, row))
    return rows


def split_steps(num_rows: int, rows_per_step: int, accumulation: int) -> list[list[list[int]]]:
    """Row numbers of every forward pass of every optimizer step, `[step][pass][row]`; the last step may be short."""
    passes = [list(range(first, min(first + rows_per_step, num_rows))) for first in range(0, num_rows, rows_per_step)]
    return [passes[first : first + accumulation] for first in range(0, len(passes), accumulation)]


def deal(
    steps: Sequence[Sequence[list[int]]], documents: Sequence[int], rank: int, world_size: int
) -> list[tuple[list[list[int]], int]]:
    """One process's forward passes of each step of an epoch, and how many of them count.

    Of a step's passes every process gets as many as another, or one more; those with the most documents (`documents[r]`
    of row r) go to whoever had the fewest in the epoch so far, so that in the end all have had about the same number.
    Every process makes as many passes in a step: where they do not go round, the last one is repeated, and must not
    count.
    """
    had = [0] * world_size
    return [_dealt(passes, documents, had, rank) for passes in steps]


def _dealt(
    passes: Sequence[list[int]], documents: Sequence[int], had: list[int], rank: int
) -> tuple[list[list[int]], int]:
    """A process's passes of a step; adds to what each of them `had`."""
    sizes = [sum(documents[row] for row in rows) for rows in passes]
    given: list[list[int]] = [[] for _ in had]
    for number in sorted(range(len(passes)), key=lambda number: -sizes[number]):
        to = min(range(len(had)), key=lambda process: (len(given[process]), had[process]))
        given[to].append(number)
        had[to] += sizes[number]
    mine = [passes[number] for number in sorted(given[rank])]
    most = max(map(len, given))
    return [*mine, *[passes[-1]] * (most - len(mine))], len(mine)


def pass_seed(seed: int, part: object, rows: Sequence[int]) -> int:
    """What a forward pass draws its random numbers from: the same wherever and whenever these rows are passed.

    `part` tells an epoch from another, or from the rows held back.
    """
    return random.Random(f"{seed}/{part}/{list(rows)}").getrandbits(63)
