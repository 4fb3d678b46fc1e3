"""Resident memory of this process, for programs of either environment: free of imports from both."""

from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Resident memory now."""
    return _kibibytes("VmRSS") * 1024


def peak_bytes() -> int:
    """The most resident memory this process has had."""
    return _kibibytes("VmHWM") * 1024


def _kibibytes(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise RuntimeError(f"{_STATUS} has no {field}; memory is measured on Linux alone")
