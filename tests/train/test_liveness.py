"""A process that dies or hangs takes the others with it within a minute, and they say why."""

import signal
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from speculators.errors import TrainingError
from speculators.train.liveness import Watch
from speculators.train.signals import Stopped
from tests.train.dying import start, wait_for_steps


@pytest.mark.parametrize(
    ("how", "dying", "reason"),
    [
        ("raise", 1, "error: process 1 has ended: OSError: the moon is gone"),
        pytest.param("raise", 0, "error: process 0 has ended: OSError: the moon is gone", marks=pytest.mark.full),
        ("kill", 1, "error: process 1 has ended; no reason was given; it was killed"),
        pytest.param("kill", 0, "error: process 0 has ended, or its machine is gone: its", marks=pytest.mark.full),
        pytest.param("stop", 1, "error: process 1 has been silent for 30 seconds", marks=pytest.mark.full),
    ],
)
def test_the_others_end_within_a_minute_with_the_reason(
    how: str, dying: int, reason: str, tiny_verifier: Path, tmp_path: Path
) -> None:
    processes = start(tiny_verifier, tmp_path / "out", how, dying)
    try:
        begun = wait_for_steps(tmp_path / "out" / "metrics.jsonl", processes)
        _, errors = processes[1 - dying].communicate(timeout=60)
        assert time.monotonic() - begun < 60
        assert reason in errors
        assert processes[1 - dying].returncode == 1
        if how == "raise":
            _, errors = processes[dying].communicate(timeout=30)
            assert "OSError: the moon is gone" in errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert not list((tmp_path / "out" / "checkpoints").glob("step-*"))


def test_who_raises_an_error_of_its_own_is_believed() -> None:
    store = HashStore()
    with pytest.raises(ValueError, match="mine"), Watch(store, 0, 2):
        raise ValueError("mine")
    assert store.get("reason") == b"process 0 has ended: ValueError: mine"
    # The first reason stays.
    with pytest.raises(KeyError), Watch(store, 1, 2):
        raise KeyError("later")
    assert store.get("reason") == b"process 0 has ended: ValueError: mine"


def test_an_error_of_the_backend_has_the_others_reason() -> None:
    store = HashStore()
    store.set("reason", "process 1 has ended: OSError: gone")
    with pytest.raises(TrainingError, match=r"^process 1 has ended: OSError: gone$"), Watch(store, 0, 2):
        raise RuntimeError("Connection closed by peer")


def test_what_was_heard_before_the_store_ended_is_the_reason() -> None:
    class Ending(HashStore):
        """A store that answers once, like one whose process ends then."""

        def add(self, key: str, value: int) -> int:
            if heard:
                raise RuntimeError("Connection was likely closed")
            return 1

        def check(self, keys: list[str]) -> bool:
            return True

        def get(self, key: str) -> bytes:
            heard.append(key)
            return b"process 0 has ended: OSError: gone"

    def lose_the_connection() -> None:
        while not heard:
            time.sleep(0.05)
        time.sleep(0.05)
        raise RuntimeError("Connection closed by peer")

    heard: list[str] = []
    with pytest.raises(TrainingError, match=r"^process 0 has ended: OSError: gone$"), Watch(Ending(), 1, 2):
        lose_the_connection()


def test_a_run_that_ends_in_order_is_left_together() -> None:
    store = HashStore()
    store.set("left/1", "")
    with Watch(store, 0, 2):
        pass
    with pytest.raises(Stopped), Watch(store, 0, 2):
        raise Stopped(signal.SIGTERM)
    assert not store.check(["reason"])
