"""Work that waits for others, in threads that nobody waits for: an interruption must not sit out a server's silence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TypeVar

from speculators.errors import EngineError, SpeculatorsError

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
_WAIT_SECONDS = 0.5


def work_in_threads(
    work: Callable[[Item], Outcome], items: Iterable[Item], num_threads: int
) -> Generator[tuple[Item, Outcome | SpeculatorsError], None, None]:
    """Yield each item and what `work` makes of it, or the error that it raises, in the order in which they end.

    Items are taken when a thread is free for them. Threads end after what they are at when it is closed.
    EngineError when `work` raises anything else.
    """
    asked: SimpleQueue[tuple[Item] | None] = SimpleQueue()
    answered: SimpleQueue[tuple[Item, Outcome | SpeculatorsError] | None] = SimpleQueue()

    def serve() -> None:
        died = True
        try:
            while (given := asked.get()) is not None:
                (item,) = given
                try:
                    outcome: Outcome | SpeculatorsError = work(item)
                except SpeculatorsError as error:
                    outcome = error
                answered.put((item, outcome))
            died = False
        finally:
            if died:
                answered.put(None)

    waiting = iter(items)
    under_way = started = 0
    try:
        while True:
            for item in islice(waiting, num_threads - under_way):
                if under_way == started:
                    threading.Thread(target=serve, name=f"waiting-{started}", daemon=True).start()
                    started += 1
                asked.put((item,))
                under_way += 1
            if not under_way:
                return
            found = _next(answered)
            if found is None:
                raise EngineError("a thread that asks servers died; its traceback stands above")
            under_way -= 1
            yield found
    finally:
        for _ in range(started):
            asked.put(None)


def _next(queue: SimpleQueue[Outcome]) -> Outcome:
    """The next one; a wait is short, since a signal that comes just before one does not end it."""
    while True:
        with suppress(Empty):
            return queue.get(timeout=_WAIT_SECONDS)
