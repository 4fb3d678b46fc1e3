"""The hidden states of one request as a file: its writer, its reader, and nothing in between that a reader could see.

A safetensors file with `hidden_states` [T, A, H] and `token_ids` int64 [T]; layers ascend, layer i being the residual
stream that enters decoder layer i, and the last one possible the stream before the final norm. Its metadata says so:
`format`, `version`, `layer_ids` (JSON), `dtype`, `prenorm`. Names, options and locks are those of vLLM's hidden-states
connector, so that either side's reader takes the other's files. Only functions that handle tensors import torch.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from speculators.errors import FormatError, RequestError, SpeculatorsError, StoreError
from speculators.formats.hidden_states_file import Content, check_content, read_layer_ids, require_tensors, write_file
from speculators.formats.hidden_states_lock import (
    PARTIAL,
    Flock,
    HiddenStatesTimeoutError,
    Swept,
    WriteLock,
    finished_file,
    flock_unsupported,
    leave_reason,
    remove_lock,
    sweep,
)
from speculators.formats.hidden_states_options import HiddenStatesOptions, parse_transfer_config, safe_name

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "HiddenStatesOptions",
    "HiddenStatesTimeoutError",
    "HiddenStatesWriter",
    "Swept",
    "WriteFuture",
    "cleanup_hidden_states",
    "flock_unsupported",
    "load_hidden_states",
    "parse_transfer_config",
    "read_layer_ids",
    "safe_name",
    "sweep",
]

logger = logging.getLogger(__name__)

# A pass's worth of files waiting for each thread; beyond that `submit` waits, so that memory stays bounded.
_WAITING_PER_THREAD = 2


class WriteFuture(Future[Path]):
    """The future of a file being written: its path, or the StoreError that says why it is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def result(self, timeout: float | None = None) -> Path:
        """The file's path, once it is there."""
        self.seen = self.seen or self.done()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong, or None once the file is there."""
        error = super().exception(timeout)
        self.seen = True
        return error


@dataclass
class _Claim:
    """A path that a request has, its lock where there are locks, and whether its content was submitted."""

    lock: WriteLock | None
    submitted: bool = False
    withdrawn: bool = False


@dataclass
class _State:
    """What threads share, under `mutex`."""

    mutex: threading.Lock = field(default_factory=threading.Lock)
    claims: dict[Path, _Claim] = field(default_factory=dict)
    failures: list[WriteFuture] = field(default_factory=list)
    warned: bool = False


class HiddenStatesWriter:
    """Writes per-request files in threads, each under a temporary name, flushed, renamed, and only then unlocked.

    The options are those of HiddenStatesOptions, which see. Methods may be called from any thread. As a context manager
    it is closed at the end.
    """

    def __init__(
        self,
        shared_storage_path: str | os.PathLike[str] = "/tmp",
        allow_custom_save_path: bool = False,
        allowed_save_roots: Sequence[str | os.PathLike[str]] | None = None,
        num_writer_threads: int = 8,
        use_synchronization_lock: bool = True,
        *,
        flock: Flock = fcntl.flock,
    ) -> None:
        self.options = HiddenStatesOptions.from_mapping(
            {
                "shared_storage_path": shared_storage_path,
                "allow_custom_save_path": allow_custom_save_path,
                "allowed_save_roots": allowed_save_roots,
                "num_writer_threads": num_writer_threads,
                "use_synchronization_lock": use_synchronization_lock,
            }
        )
        self._flock = flock
        self._state = _State()
        self._room = threading.BoundedSemaphore((1 + _WAITING_PER_THREAD) * num_writer_threads)
        self._pool = ThreadPoolExecutor(num_writer_threads, thread_name_prefix="hidden-states")

    @classmethod
    def from_options(cls, options: HiddenStatesOptions) -> Self:
        """A writer with the options of a `kv_transfer_config`."""
        return cls(**{name: getattr(options, name) for name in options.__dataclass_fields__})

    def require_writable(self) -> None:
        """Make the shared folder and write a file into it; StoreError where that cannot be done."""
        folder = Path(self.options.shared_storage_path)
        probe = folder / f".{secrets.token_hex(8)}.safetensors.{secrets.token_hex(4)}{PARTIAL}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"\0")
            probe.unlink()
        except OSError as error:
            raise StoreError(
                f"shared_storage_path {folder} cannot be written to: {error.strerror or error}; give another folder"
            ) from error

    def reserve(self, request_id: str, hidden_states_path: str | None = None) -> Path:
        """Choose a request's file and lock it, before anybody is told its name; what was there is removed.

        RequestError for a path that the options do not allow or that another request has, StoreError where the lock
        cannot be made.
        """
        path = self.options.path_for(request_id, hidden_states_path)
        self.claim(path)
        return path

    def claim(self, path: Path) -> None:
        """Lock a path that was chosen already; errors as for `reserve`."""
        claim = _Claim(None)
        with self._state.mutex:
            if path in self._state.claims:
                raise RequestError(f"{path} is being written by another request; give another hidden_states_path")
            self._state.claims[path] = claim
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.options.use_synchronization_lock:
                claim.lock = WriteLock.acquire(path, self._flock)
            else:
                remove_lock(path)
            path.unlink(missing_ok=True)
        except (OSError, SpeculatorsError) as error:
            self._drop(path)
            if claim.lock is not None:
                claim.lock.withdraw()
            if isinstance(error, SpeculatorsError):
                raise
            raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
        if claim.lock is not None and claim.lock.is_marker and not self._state.warned:
            self._state.warned = True
            logger.warning("%s has no file locks (flock: ENOLCK); marker files stand in for them", path.parent)

    def submit(
        self,
        path: Path,
        hidden_states: Tensor,
        token_ids: Tensor,
        layer_ids: Sequence[int],
        ready: Callable[[], None] | None = None,
    ) -> WriteFuture:
        """Queue a reserved file's content: states [T, A, H] (float32, float16 or bfloat16, on the CPU), ids int64 [T].

        Waits while the queue is full. The tensors must not change until the future is done; `ready` is called by the
        writing thread before it reads them. Raises StoreError for a path that is not reserved or shapes that disagree.
        """
        content = Content(hidden_states, token_ids, tuple(layer_ids), ready)
        check_content(path, content)
        with self._state.mutex:
            claim = self._state.claims.get(path)
            if claim is None or claim.submitted:
                what = "submitted already" if claim is not None else "not reserved"
                raise StoreError(f"{path} is {what}; reserve it for every request")
            claim.submitted = True
        self._room.acquire()
        future = WriteFuture()
        try:
            running = self._pool.submit(self._write, path, claim, content)
        except RuntimeError as error:
            self._room.release()
            self._end(path, claim, future, StoreError(f"{path} is not written: the writer is closed ({error})"))
            return future
        running.add_done_callback(lambda done: self._done(path, claim, future, done))
        return future

    def fail(self, path: Path, error: SpeculatorsError) -> None:
        """Give up a reserved file for a reason that its readers and `close` will hear; unknown paths are ignored."""
        with self._state.mutex:
            claim = self._state.claims.get(path)
            if claim is None or claim.submitted:
                return
            claim.submitted = True
        self._end(path, claim, WriteFuture(), error)

    def release(self, path: Path) -> None:
        """Give up a reserved file that nobody wants: lock and reservation go, no file stays; others are ignored.

        Where its content was submitted, the file goes as soon as it is written.
        """
        with self._state.mutex:
            claim = self._state.claims.get(path)
            if claim is None:
                return
            if claim.submitted:
                claim.withdrawn = True
                return
            claim.submitted = True
        if claim.lock is not None:
            claim.lock.withdraw()
        self._drop(path)

    def close(self) -> None:
        """Write what is queued, release the rest, end the threads, and raise the first failure nobody looked at."""
        with self._state.mutex:
            waiting = [path for path, claim in self._state.claims.items() if not claim.submitted]
        for path in waiting:
            self.release(path)
        self._pool.shutdown(wait=True)
        with self._state.mutex:
            failures, self._state.failures = self._state.failures, []
        for future in failures:
            if not future.seen:
                future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _drop(self, path: Path) -> None:
        with self._state.mutex:
            self._state.claims.pop(path, None)

    def _write(self, path: Path, claim: _Claim, content: Content) -> None:
        if claim.withdrawn:
            return
        if content.ready is not None:
            content.ready()
        write_file(path, content, self._flock)

    def _done(self, path: Path, claim: _Claim, future: WriteFuture, done: Future[None]) -> None:
        self._room.release()
        self._end(path, claim, future, done.exception())

    def _end(self, path: Path, claim: _Claim, future: WriteFuture, error: BaseException | None) -> None:
        """Unlock a file that is there, or say why it is not; the future comes last, so that what it says is true."""
        with self._state.mutex:
            if claim.withdrawn:
                path.unlink(missing_ok=True)
                if claim.lock is not None:
                    claim.lock.withdraw()
            elif error is not None:
                self._state.failures.append(future)
                if claim.lock is not None:
                    claim.lock.fail(str(error))
                else:
                    leave_reason(path, str(error))
            elif claim.lock is not None:
                claim.lock.finish()
            self._state.claims.pop(path, None)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(path)


def load_hidden_states(
    path: str | os.PathLike[str], timeout: float | None = None, *, flock: Flock = fcntl.flock
) -> dict[str, Tensor]:
    """Read one request's `hidden_states` [T, A, H] and `token_ids` int64 [T], as soon as its writer is done.

    Sleeps on the writer's lock for at most `timeout` seconds, or as long as somebody is writing. Without a lock, a file
    that exists is whole, and one that does not is waited for only with a timeout. Raises HiddenStatesTimeoutError, and
    StoreError where the writer failed or the file is not what it should be.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    try:
        with finished_file(file, timeout, flock):
            require_tensors(file)
            with safe_open(file, framework="pt") as stream:
                names = stream.keys()
                tensors: dict[str, Tensor] = {name: stream.get_tensor(name) for name in names}
    except (OSError, SafetensorError, FormatError, RuntimeError) as error:
        # RuntimeError is how torch says that it cannot map a file.
        if isinstance(error, SpeculatorsError) and not isinstance(error, FormatError):
            raise
        if "No such file" in str(error):
            raise StoreError(f"{file} was removed while it was read: whoever wrote it began anew") from error
        raise StoreError(f"{file} cannot be read: {error}") from error
    return tensors


def cleanup_hidden_states(path: str | os.PathLike[str], keep_hidden_states: bool = False) -> None:
    """Remove a file's lock and, unless it is to be kept, the file; nothing happens where they are gone already."""
    file = Path(path)
    remove_lock(file)
    if not keep_hidden_states:
        file.unlink(missing_ok=True)
