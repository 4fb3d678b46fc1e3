"""Files and their names: writing one so that a reader finds the old content or the new, never a part of it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target` for what `target` is going to hold, removed at the end unless it was renamed.

    It is locked while its writer lives, and those that writers of the same `target` left when they died are removed
    first. Makes missing folders above; OSError as it comes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    folder, descriptor = _locked_folder(target)
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _locked_folder(target: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        descriptor = os.open(folder, os.O_RDONLY)
        # Where a file system has no locks, nobody else gets one either, and what is left there stays.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            return folder, descriptor
        # Another writer took it for abandoned between the two calls.
        os.close(descriptor)


def _remove_abandoned(target: Path) -> None:
    """Remove staging folders of `target` that no living process holds."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]{{8}}\.partial")
    found: list[Path] = []
    with suppress(OSError):
        found = [entry for entry in target.parent.iterdir() if ours.fullmatch(entry.name)]
    for folder in found:
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


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
