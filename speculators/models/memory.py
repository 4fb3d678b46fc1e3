"""The process's memory: how much there is, and how the C library treats what tensors give back."""

import ctypes
import math
import os
import platform
from contextlib import suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 1 << 30
# The limit of a control group and what is taken of it, by the second version of that interface and the first.
_GROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def keep_freed_memory() -> bool:
    """Let glibc reuse large freed blocks instead of returning each to the system; False with another C library.

    By default every tensor of a few megabytes is mapped anew and cleared by the kernel page by page: in training and
    extraction on a CPU, which make the same sizes over and over, that is a tenth of the time. Threads share what is
    kept, or each would keep as much for itself. Affects the whole process, for good.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    options = {_M_MMAP_THRESHOLD: _KEPT_BYTES, _M_TRIM_THRESHOLD: _KEPT_BYTES, _M_ARENA_MAX: 1}
    return all(mallopt(option, value) == 1 for option, value in options.items())


def free_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that nothing has taken, of the machine's and of a container's; 0 where the system does not tell.

    `groups` is where Linux shows the control group that a container is, with its limit.
    """
    names = ("SC_PAGE_SIZE", "SC_AVPHYS_PAGES")
    if not all(name in os.sysconf_names for name in names):
        return 0
    room = [math.prod(map(os.sysconf, names))]
    for limit, taken in _GROUP_FILES:
        # Either interface may be absent, and the limit may be a word: none.
        with suppress(OSError, ValueError):
            room.append(int((groups / limit).read_text()) - int((groups / taken).read_text()))
    return max(min(room), 0)
