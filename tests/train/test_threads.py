"""Threads: the recipe's number, else the user's, and the launcher's default never."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from speculators.train.threads import cpu_threads, share_out

LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, {}, None),
        (None, {"OMP_NUM_THREADS": "1"}, None),
        (None, LAUNCHED, 8),
        (None, LAUNCHED | {"OMP_NUM_THREADS": "3"}, None),
        (None, LAUNCHED | {"WORLD_SIZE": "4"}, None),
        (1, LAUNCHED, 1),
        (5, {}, 5),
    ],
)
def test_threads(given: int | None, environment: dict[str, str], expected: int | None) -> None:
    assert cpu_threads(given, environment, cores=8) == expected


def test_the_launchers_marks_are_those_of_accelerate(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json, os; print(json.dumps(dict(os.environ)))", encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP", "MKL", "ACCELERATE"))}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", str(script)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
    inside = json.loads(done.stdout.splitlines()[-1])
    assert cpu_threads(None, inside, cores=8) == 8


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("items", "threads_of_each"), [(7, 2), (8, 1)])
@pytest.mark.usefixtures("two_threads")
def test_work_is_shared_out_where_there_is_enough_of_it(items: int, threads_of_each: int) -> None:
    done: dict[int, int] = {}
    share_out(lambda item: done.setdefault(item, torch.get_num_threads()), range(items))
    assert done == dict.fromkeys(range(items), threads_of_each)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_an_error_of_shared_work_is_raised_and_the_number_of_threads_is_as_before() -> None:
    with pytest.raises(ZeroDivisionError):
        share_out(lambda item: 1 // (item - 3), range(20))
    assert torch.get_num_threads() == 2
