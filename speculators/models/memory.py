"""The process's memory: how much there is, and how the C library treats what tensors give back."""

import ctypes
import math
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 1 << 30


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


def free_bytes() -> int:
    """Memory of the machine that nothing has taken, 0 where the system does not tell."""
    names = ("SC_PAGE_SIZE", "SC_AVPHYS_PAGES")
    return math.prod(map(os.sysconf, names)) if all(name in os.sysconf_names for name in names) else 0
