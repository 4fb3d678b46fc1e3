import platform
import subprocess
import sys

from speculators.models.memory import keep_freed_memory

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
