"""Resident memory of a process, for programs of either environment: free of imports from both."""

from pathlib import Path

_SELF = "self"


def resident_bytes() -> int:
    """Resident memory now."""
    return _kibibytes("VmRSS") * 1024


def peak_bytes() -> int:
    """The most resident memory this process has had."""
    return _kibibytes("VmHWM") * 1024


def anonymous_bytes(process: int | str = _SELF) -> int:
    """Memory of a process that no file on disk stands behind: what it has allocated and touched."""
    return _kibibytes("RssAnon", process) * 1024


def _kibibytes(field: str, process: int | str = _SELF) -> int:
    status = Path("/proc") / str(process) / "status"
    for line in status.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise RuntimeError(f"{status} has no {field}; memory is measured on Linux alone")
