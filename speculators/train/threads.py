"""How many CPU threads a run computes with."""

import os
from collections.abc import Mapping


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
