"""Who is writing a per-request file: the lock its readers sleep on, and what is left of writers that died.

`{file}.lock` is held with an exclusive `flock` from before anybody is told the file's name until the file is there, and
the kernel lets go of it when its writer dies. That it exists says nothing: it stays until the file is cleaned up. Where
a file system has no flock (ENOLCK), `{file}.writing` exists instead for as long as the file is being written. A writer
that fails leaves its reason in `{file}.lock`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from speculators.errors import RequestError, StoreError

Flock = Callable[[int, int], None]

LOCK, MARKER, PARTIAL, FINISHED = ".lock", ".writing", ".partial", ".safetensors"
# Opens every lock of ours, so that a sweep tells it from those of other programs.
_SIGNATURE = b"speculators\n"
_MAX_REASON_BYTES = 4096
_NO_FLOCK = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_BUSY = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 1.0


class HiddenStatesTimeoutError(StoreError, TimeoutError):
    """A file of hidden states was not there in the time that its reader was ready to wait."""


def flock_unsupported(descriptor: int, operation: int) -> None:
    """An `flock` that fails as it does where a file system has none: what tests give for `flock`."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


class WriteLock:
    """A writer's claim on a path, from `acquire` until one of `finish`, `fail` and `withdraw`."""

    def __init__(self, path: Path, descriptor: int | None, flock: Flock) -> None:
        self._path = path
        self._descriptor = descriptor
        self._marked = descriptor is None
        self._flock = flock

    @classmethod
    def acquire(cls, path: Path, flock: Flock = fcntl.flock) -> WriteLock:
        """Lock a path that nobody else is writing or reading; RequestError where somebody is, OSError as it comes."""
        lock = _beside(path, LOCK)
        give_up = time.monotonic() + _PATIENCE_SECONDS
        while True:
            # No link is followed: in a folder that all may write to, somebody could point the name anywhere.
            descriptor = os.open(lock, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o644)
            try:
                flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if error.errno in _NO_FLOCK:
                    lock.unlink(missing_ok=True)
                    return cls._mark(path, flock)
                if error.errno not in _BUSY:
                    raise
                if time.monotonic() > give_up:
                    raise RequestError(
                        f"{path} is being written or read by another request; give another hidden_states_path"
                    ) from error
                time.sleep(_POLL_SECONDS)
                continue
            if _is_at(descriptor, lock):
                break
            # A sweep took the name away between the two calls: what was locked is not what a reader will find.
            os.close(descriptor)
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _SIGNATURE)
        return cls(path, descriptor, flock)

    @classmethod
    def _mark(cls, path: Path, flock: Flock) -> WriteLock:
        marker = _beside(path, MARKER)
        if marker.exists() and writer_lives(marker):
            raise RequestError(f"{path} is being written by another request; give another hidden_states_path")
        marker.unlink(missing_ok=True)
        content = {"host": socket.gethostname(), "pid": os.getpid(), "started": _start_time(os.getpid())}
        descriptor = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o644)
        try:
            os.write(descriptor, json.dumps(content).encode())
        finally:
            os.close(descriptor)
        return cls(path, None, flock)

    @property
    def is_marker(self) -> bool:
        """Whether a marker file stands in for the lock."""
        return self._marked

    def finish(self) -> None:
        """Let readers have the file, which is there by now."""
        self._let_go()

    def fail(self, reason: str) -> None:
        """Let readers know why there will be no file."""
        leave_reason(self._path, reason)
        self._let_go()

    def withdraw(self) -> None:
        """Leave neither lock nor marker: nobody wants the file any more."""
        with suppress(OSError):
            _beside(self._path, LOCK).unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._marked:
            _beside(self._path, MARKER).unlink(missing_ok=True)
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        # Said aloud, because a process forked in the meantime holds a copy of the descriptor.
        with suppress(OSError):
            self._flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def leave_reason(path: Path, reason: str) -> None:
    """Write into the lock of a path why its file will not come; where not even that can be written, nothing happens."""
    text = _SIGNATURE + reason.encode()[:_MAX_REASON_BYTES]
    with suppress(OSError):
        descriptor = os.open(_beside(path, LOCK), os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o644)
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, text)
        finally:
            os.close(descriptor)


def remove_lock(path: Path) -> None:
    """Remove what stands beside a file about its writing."""
    _beside(path, LOCK).unlink(missing_ok=True)
    _beside(path, MARKER).unlink(missing_ok=True)


@contextmanager
def finished_file(path: Path, timeout: float | None = None, flock: Flock = fcntl.flock) -> Iterator[None]:
    """Wait until a path's writer is done and keep other writers off it; with a lock, a marker, or neither.

    `timeout` is in seconds; None waits as long as somebody is writing. Raises HiddenStatesTimeoutError, and StoreError
    where the writer failed, died, or nothing says that there ever was one.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        descriptor = _open_shared(path, deadline, flock)
        if descriptor is not None:
            try:
                reason = os.read(descriptor, _MAX_REASON_BYTES + len(_SIGNATURE)).removeprefix(_SIGNATURE)
                if reason:
                    raise StoreError(f"{path} was not written: {reason.decode(errors='replace')}")
                if path.exists():
                    yield
                    return
                replaced = _beside(path, LOCK).exists() and not _is_at(descriptor, _beside(path, LOCK))
            finally:
                os.close(descriptor)
            if not replaced:
                raise StoreError(f"{path} was not written: its request was aborted or its writer died; ask again")
        elif not _beside(path, MARKER).exists() and path.exists():
            yield
            return
        else:
            _wait_without_lock(path, deadline)


def _open_shared(path: Path, deadline: float | None, flock: Flock) -> int | None:
    """The descriptor of a path's lock, shared; None where there is none, or where it cannot be locked here."""
    try:
        descriptor = os.open(_beside(path, LOCK), os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        while True:
            try:
                flock(descriptor, fcntl.LOCK_SH | (0 if deadline is None else fcntl.LOCK_NB))
            except OSError as error:
                if error.errno not in _BUSY:
                    raise
                _nap(path, deadline)
                continue
            return descriptor
    except OSError as error:
        reason = os.read(descriptor, _MAX_REASON_BYTES + len(_SIGNATURE)).removeprefix(_SIGNATURE)
        os.close(descriptor)
        if error.errno not in _NO_FLOCK:
            raise
        if reason:
            raise StoreError(f"{path} was not written: {reason.decode(errors='replace')}") from error
        return None


def _wait_without_lock(path: Path, deadline: float | None) -> None:
    marker = _beside(path, MARKER)
    if marker.exists():
        if writer_lives(marker) is False:
            raise StoreError(f"{path} was not written: its writer died; ask again")
    elif deadline is None and not _beside(path, LOCK).exists() and not path.exists():
        raise StoreError(
            f"{path} does not exist, and no lock says that it is being written; where the writer uses no locks, give "
            "the seconds to wait for it as timeout"
        )
    _nap(path, deadline)


def _nap(path: Path, deadline: float | None) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        _expired(path)
    time.sleep(_POLL_SECONDS)


def _expired(path: Path) -> NoReturn:
    raise HiddenStatesTimeoutError(
        f"{path} was not finished in time; wait longer, or see whether its writer still works"
    )


@dataclass(frozen=True)
class Swept:
    """How many files a sweep removed, by kind."""

    locks: int = 0
    partial_files: int = 0
    files: int = 0


def sweep(folder: str | os.PathLike[str], ttl: float, *, files_too: bool = False, flock: Flock = fcntl.flock) -> Swept:
    """Remove from a folder what is older than `ttl` seconds and nobody is working on.

    These are locks that nobody holds, markers and temporary files of writers that died and, with `files_too`, finished
    files that were never collected. Subfolders are not entered. OSError where the folder cannot be read.
    """
    before = time.time() - ttl
    counts = dict.fromkeys((LOCK, MARKER, PARTIAL, FINISHED), 0)
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        # Somebody else's file, or one that went in the meantime, is no business of ours.
        with suppress(FileNotFoundError, PermissionError):
            found = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode) or found.st_mtime > before:
                continue
            kind = _kind(path, files_too)
            if kind is not None and _remove_if_stale(path, kind, flock):
                counts[kind] += 1
    return Swept(counts[LOCK] + counts[MARKER], counts[PARTIAL], counts[FINISHED])


def lock_partial(descriptor: int, path: Path, flock: Flock) -> bool:
    """Hold a temporary file, so that no sweep takes it; False where one already has."""
    try:
        flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
    return _is_at(descriptor, path)


def writer_lives(marker: Path) -> bool | None:
    """Whether the process that made a marker still runs; None where it ran on another machine."""
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
        host, pid, started = content["host"], content["pid"], content["started"]
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        # Being written just now, or by a writer that died at that moment: its age decides.
        return None
    if host != socket.gethostname():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return bool(_start_time(pid) == started)


def _start_time(pid: int) -> str:
    """What tells a process from a later one of the same number; empty where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _is_lock_of_ours(lock: Path) -> bool:
    if lock.name.endswith(".safetensors" + LOCK):
        return True
    with lock.open("rb") as stream:
        return stream.read(len(_SIGNATURE)) == _SIGNATURE


def _kind(path: Path, files_too: bool) -> str | None:
    """Which of the suffixes a file has that a sweep looks at; None where it is none of ours."""
    if path.name.endswith(LOCK):
        return LOCK if _is_lock_of_ours(path) else None
    if path.name.endswith(PARTIAL):
        return PARTIAL if path.name.startswith(".") and FINISHED in path.name else None
    if path.name.endswith(FINISHED):
        return FINISHED if files_too else None
    return MARKER if path.name.endswith(MARKER) else None


def _remove_if_stale(path: Path, kind: str, flock: Flock) -> bool:
    if kind == MARKER:
        if writer_lives(path):
            return False
        path.unlink()
        return True
    if kind == FINISHED:
        lock = _beside(path, LOCK)
        held = lock.exists() and not _take(lock, flock, remove=False)
        if held or _beside(path, MARKER).exists():
            return False
        path.unlink()
        return True
    if kind == PARTIAL and _beside(path.with_name(path.name[1:].rsplit(".", 2)[0]), MARKER).exists():
        return False
    return _take(path, flock, remove=True)


def _take(path: Path, flock: Flock, *, remove: bool) -> bool:
    """Whether nobody holds a file, removing it while that is sure; where there is no flock, its age has to do."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        try:
            flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            if error.errno not in _NO_FLOCK:
                raise
        if remove:
            path.unlink()
    finally:
        os.close(descriptor)
    return True
