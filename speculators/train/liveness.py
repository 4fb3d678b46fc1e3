"""Noticing that another process of a run has died or hangs, and ending with its reason instead of waiting for it.

Collectives of a backend may wait for hours for a process that is gone. Each process therefore counts up a number of its
own in the store through which the processes found each other, and looks at the numbers of the others.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Self

# Documented, but not exported in a way that mypy knows.
from torch.distributed import PrefixStore, Store, TCPStore, is_initialized  # type: ignore[attr-defined]

from speculators.errors import TrainingError
from speculators.train.signals import Stopped

# A minute in all: silence, then a while in which the process may end by itself.
BEAT_SECONDS, SILENCE_SECONDS, GRACE_SECONDS = 2.0, 30.0, 10.0
_LOOK_SECONDS = 0.05
_STORE_GONE = "process 0 has ended, or its machine is gone: its store does not answer"
_REASON, _UNKNOWN = "reason", "no reason was given; it was killed, or its machine is gone"
# Each watch of a process has keys of its own; all processes begin as many, in the same order.
_NUMBERS = itertools.count()


def open_store(environment: Mapping[str, str] = os.environ) -> Store:
    """A connection of its own to the store of this run's processes, as their launcher has told where it is."""
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    timeout = timedelta(seconds=SILENCE_SECONDS)
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"speculators/watch/{attempt}/{next(_NUMBERS)}"
    return PrefixStore(prefix, TCPStore(address, port, None, False, timeout))


def _skip_teardown() -> None:
    """Let this process end with exit code 1 as soon as its Python code has ended.

    A backend that has lost a peer may abort the process while it is taken down, with a code that names no reason.
    """
    if is_initialized():
        atexit.register(_end_now)


def _end_now() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@dataclass
class Watch:
    """Watches the others while a context lasts, and tells them why where it ends with an exception.

    A process that hears of another's end has GRACE_SECONDS to end by itself; then it is ended, with the other's reason
    on standard error and exit code 1. In time for that, a RuntimeError becomes a TrainingError with that reason:
    backends raise one where another process is gone.
    """

    store: Store
    rank: int
    world_size: int
    _over: threading.Event = field(default_factory=threading.Event)
    _lost: str | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # A signal ends a run in order, for all processes at the same step.
        if error is None or isinstance(error, Stopped):
            self._leave()
            return
        if isinstance(error, RuntimeError):
            reason = self._reason_of_others()
            if reason is not None:
                self._over.set()
                _skip_teardown()
                raise TrainingError(reason) from error
        self._tell(f"process {self.rank} has ended: {type(error).__name__}: {error}")
        self._over.set()
        if self.rank == 0:
            # The store may end with this process.
            time.sleep(2 * BEAT_SECONDS)

    def _look_on(self) -> None:
        """Count up and look at the others until the context is over, or another process is lost."""
        seen = dict.fromkeys(set(range(self.world_size)) - {self.rank}, (-1, 0))
        while self._lost is None and not self._over.wait(BEAT_SECONDS):
            try:
                self._lost = self._beat(seen)
            except RuntimeError as error:
                self._lost = f"{_STORE_GONE} ({error})"
        if self._lost is not None and not self._over.wait(GRACE_SECONDS):
            sys.stderr.write(f"error: {self._lost}\n")
            _end_now()

    def _beat(self, seen: dict[int, tuple[int, int]]) -> str | None:
        """Count up once; the reason where another process is lost.

        `seen`: the others' numbers and for how many beats they are the same. In beats, because all processes may have
        been suspended together.
        """
        self.store.add(f"beats/{self.rank}", 1)
        if self.store.check([_REASON]):
            return self.store.get(_REASON).decode()
        for rank, (number, beats) in list(seen.items()):
            found = self.store.add(f"beats/{rank}", 0)
            seen[rank] = (found, 0) if found != number else (number, beats + 1)
            if seen[rank][1] * BEAT_SECONDS > SILENCE_SECONDS and not self.store.check([f"left/{rank}"]):
                return f"process {rank} has been silent for {SILENCE_SECONDS:.0f} seconds; {_UNKNOWN}"
        return None

    def _leave(self) -> None:
        """Wait for the others, who need the store until they leave."""
        everybody = [f"left/{rank}" for rank in range(self.world_size)]
        self.store.set(everybody[self.rank], "")
        while self._lost is None and not self._all_there(everybody):
            time.sleep(_LOOK_SECONDS)
        self._over.set()
        self._thread.join()
        if self._lost is not None and not self._lost.startswith(_STORE_GONE):
            _skip_teardown()
            raise TrainingError(self._lost)

    def _all_there(self, keys: list[str]) -> bool:
        try:
            return self.store.check(keys)
        except RuntimeError:
            # The first process, which has the store, has seen all others leave.
            return True

    def _tell(self, reason: str) -> None:
        try:
            # The first reason stays.
            self.store.compare_set(_REASON, "", reason)
        except RuntimeError:
            sys.stderr.write("the other processes cannot be told: their store does not answer\n")

    def _reason_of_others(self) -> str | None:
        """Why another process has ended, in case that is what an error comes from; takes some beats to find out."""
        if self._lost is not None:
            # Heard of already; the store may have ended with the process that told it.
            return self._lost
        others = set(range(self.world_size)) - {self.rank}
        try:
            before = {rank: self.store.add(f"beats/{rank}", 0) for rank in others}
            for _ in range(3):
                if self.store.check([_REASON]):
                    return self.store.get(_REASON).decode()
                time.sleep(BEAT_SECONDS)
            silent = [
                rank
                for rank, number in sorted(before.items())
                if self.store.add(f"beats/{rank}", 0) == number and not self.store.check([f"left/{rank}"])
            ]
        except RuntimeError as error:
            return f"{_STORE_GONE} ({error})"
        return f"process {silent[0]} has ended; {_UNKNOWN}" if silent else None
