import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from speculators.models.memory import free_bytes, keep_freed_memory

COUNT_FAULTS = """
import resource, torch
from speculators.models.memory import keep_freed_memory
if {keep}: keep_freed_memory()
torch.set_num_threads(1)
torch.ones(8 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): torch.ones(8 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(keep: bool) -> int:
    code = COUNT_FAULTS.format(keep=keep)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def test_large_blocks_are_reused_without_new_pages() -> None:
    # 32 MB are 8192 pages of 4 KB each time they are mapped anew (fewer where the system hands out huge pages).
    assert page_faults(keep=True) <= max(page_faults(keep=False) // 2, 100)


def test_only_glibc_is_told() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


@pytest.mark.parametrize(
    ("limit", "taken"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
)
def test_a_container_has_no_more_room_than_its_limit(limit: str, taken: str, tmp_path: Path) -> None:
    def free(most: str, now: str) -> int:
        for name, text in ((limit, most), (taken, now)):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text + "\n", encoding="utf-8")
        return free_bytes(tmp_path)

    assert free("1000000", "400000") == 600_000
    assert free("1000000", "1000001") == 0
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for none in ("max", str(2**63 - 4096)):
        assert 1_000_000 < free(none, "400000") <= physical
