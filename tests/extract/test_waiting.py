"""Work in threads that nobody waits for."""

import threading
import time
from contextlib import closing

import pytest

from speculators.errors import DataError, EngineError
from speculators.extract.waiting import work_in_threads


def threads_end() -> None:
    deadline = time.monotonic() + 30
    while any(thread.name.startswith("waiting-") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_item_is_worked_on_once_and_errors_are_outcomes() -> None:
    error = DataError("not this one")

    def double(item: int) -> int:
        if item == 5:
            raise error
        return 2 * item

    for num_threads in (1, 3, 50):
        found = dict(work_in_threads(double, range(20), num_threads))
        assert found == {item: error if item == 5 else 2 * item for item in range(20)}
    assert list(work_in_threads(double, [], 3)) == []


def test_as_many_as_there_are_threads_are_under_way() -> None:
    together = threading.Barrier(4)
    taken = []

    def items():
        for item in range(8):
            taken.append(item)
            yield item

    def meet(_: int) -> None:
        together.wait(timeout=30)

    with closing(work_in_threads(meet, items(), 4)) as working:
        next(working)
        assert len(taken) == 4
        assert len(list(working)) == 7
    assert len(taken) == 8


def test_a_caller_that_stops_is_not_waited_for() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def wait(item: int) -> None:
        if item:
            begun.set()
            may_end.wait(timeout=60)

    with closing(work_in_threads(wait, range(10), 2)) as working:
        assert next(working)[0] == 0
        begun.wait(timeout=30)
    assert not may_end.is_set()
    may_end.set()
    threads_end()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_is_not_waited_for_in_vain() -> None:
    with pytest.raises(EngineError, match="a thread that asks servers died"):
        list(work_in_threads(lambda item: 1 // item, [0], 1))
    threads_end()
