"""How many CPU threads a run computes with, and what they share."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
# Items a thread from which on it is seldom idle at the end.
_ITEMS_A_THREAD = 4


def cpu_threads(given: int | None, environment: Mapping[str, str], cores: int) -> int | None:
    """The number of threads to set, None for torch's own choice, which follows OMP_NUM_THREADS.

    `accelerate launch` sets OMP_NUM_THREADS to 1 where nobody chose a number. For a process that is alone, that leaves
    all `cores` but one idle, so it counts as not chosen; `given`, the recipe's own number, always counts.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in environment
    alone = environment.get("WORLD_SIZE", "1") == "1"
    if given is None and launched and alone and environment.get("OMP_NUM_THREADS") == "1":
        return cores
    return given


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_out(work: Callable[[Item], object], items: Sequence[Item]) -> None:
    """Do independent work on every item, beginning in their order; what one raises is raised when all have ended.

    Where there are enough items, each is one thread's, as many at a time as torch has threads: these need not wait for
    each other in the middle of small products. Otherwise all threads work on one item after another.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < _ITEMS_A_THREAD * threads:
        for item in items:
            work(item)
        return
    try:
        with ThreadPoolExecutor(threads, "share", torch.set_num_threads, (1,)) as pool:
            list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)  # what a worker sets holds for some libraries everywhere
