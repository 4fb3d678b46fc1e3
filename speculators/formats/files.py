"""Files and their names: writing one so that a reader finds the old content or the new, never a part of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

READABLE = 0o644


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 text atomically, making missing folders: temporary sibling, flush, rename; OSError as it comes."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        flush(Path(name))
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    flush_folder(target.parent)


def flush(file: Path) -> None:
    """Make a finished file readable by everyone and its bytes durable."""
    file.chmod(READABLE)
    flush_folder(file)


def flush_folder(folder: Path) -> None:
    """Make renames inside a folder durable (of a file: its bytes)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def looks_like_path(name: str) -> bool:
    """Whether a model's name can only be a path: absolute, starting with `.` or `~`, or with more than one `/`."""
    return name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name
