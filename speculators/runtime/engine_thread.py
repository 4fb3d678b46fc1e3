"""One thread steps the engine; coroutines hand it requests and read back what became of them.

Nothing but this thread touches the engine, so that requests of many clients are scheduled together without locks around
the model.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol

from speculators.errors import EngineError, RequestError
from speculators.runtime.engine import Engine
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.sampling import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineRequest:
    """One completion to generate: an id that no other request has, prompt ids, and parameters with n = 1."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None


class EngineWatcher(Protocol):
    """Learns what the engine did; called on the engine's thread."""

    def stepped(self, outputs: Sequence[RequestOutput]) -> None:
        """A step moved these requests."""
        ...

    def aborted(self, request_ids: Sequence[str]) -> None:
        """These requests were ended on their client's wish."""
        ...


class RequestStream:
    """What becomes of a group of requests, read by the one coroutine that submitted them.

    Iterating gives, for each request that moved since, its newest state; states that nobody read in time are skipped,
    since each holds all that came before. Ends when every request has finished; raises EngineError when the engine
    fails first.
    """

    def __init__(self, requests: Sequence[EngineRequest], abort: Callable[[Iterable[str]], None]) -> None:
        self.requests = list(requests)
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] = self._loop.create_future()
        self._unfinished = {request.request_id for request in requests}
        self._newest: dict[str, RequestOutput] = {}
        self._failure: EngineError | None = None
        self._woken = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[list[RequestOutput]]:
        while self._unfinished:
            await self._woken.wait()
            self._woken.clear()
            newest, self._newest = self._newest, {}
            self._unfinished.difference_update(name for name, output in newest.items() if output.finished)
            if newest:
                yield list(newest.values())
            if self._failure is not None and self._unfinished:
                raise self._failure

    async def accepted(self) -> None:
        """Wait until the engine took the requests; raises RequestError when it refuses one of them."""
        await self._accepted

    def close(self) -> None:
        """End whatever has not finished; nothing of it is delivered any more."""
        unfinished, self._unfinished = self._unfinished, set()
        if unfinished:
            self._abort(unfinished)

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand over new states; called on the engine's thread."""
        self._call(self._take, outputs)

    def answer(self, refusal: RequestError | None) -> None:
        """Say whether the requests were taken; called on the engine's thread."""
        self._call(self._settle, refusal)

    def fail(self, failure: EngineError) -> None:
        """Say that nothing more will come; called on any thread."""
        self._call(self._break, failure)

    def _call(self, function: Callable[..., None], *values: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *values)
        except RuntimeError:
            # The reader's loop is closed, and the reader with it.
            self._abort([request.request_id for request in self.requests])

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        self._newest.update((output.request_id, output) for output in outputs)
        self._woken.set()

    def _settle(self, problem: RequestError | EngineError | None) -> None:
        if self._accepted.done():
            return
        if problem is None:
            self._accepted.set_result(None)
        else:
            self._unfinished.clear()
            self._accepted.set_exception(problem)

    def _break(self, failure: EngineError) -> None:
        if not self._accepted.done():
            self._settle(failure)
        self._failure = failure
        self._woken.set()


class EngineThread:
    """The thread that owns an engine from `start` to `close`.

    An error inside the engine ends the thread: `failure` keeps it, every client gets it, and `on_failure` is called.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        watcher: EngineWatcher | None = None,
        on_failure: Callable[[EngineError], None] | None = None,
    ) -> None:
        self._engine, self._watcher, self._on_failure = engine, watcher, on_failure
        self.failure: EngineError | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._lock = threading.Lock()
        self._ended = self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    async def submit(self, requests: Sequence[EngineRequest]) -> RequestStream:
        """Queue requests, all or none, and return what they will be read from.

        Raises RequestError when the engine refuses one, EngineError when it has failed or is closing.
        """
        stream = RequestStream(requests, self.abort)
        with self._lock:
            if self._ended or self._closing:
                raise self.failure or EngineError("the engine is shutting down and takes no more requests")
            self._streams.update((request.request_id, stream) for request in requests)
            self._commands.put(partial(self._add, stream))
        try:
            await stream.accepted()
        except asyncio.CancelledError:
            stream.close()
            raise
        return stream

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; ids that have finished already are ignored."""
        self._commands.put(partial(self._end_requests, list(request_ids)))

    def close(self) -> None:
        """End the requests that are left and the thread; returns when it has ended."""
        self._closing = True
        self._commands.put(self._stop)
        self._thread.join()

    def _run(self) -> None:
        with _Reported(self._finish):
            while not self._ended:
                self._obey()
                if self._engine.has_unfinished:
                    self._deliver(self._engine.step())

    def _obey(self) -> None:
        """Carry out what is queued; waits for a command where there is nothing to step."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_unfinished and not self._ended)
            except queue.Empty:
                return
            command()
            if self._ended:
                return

    def _add(self, stream: RequestStream) -> None:
        names = [request.request_id for request in stream.requests]
        try:
            for request in stream.requests:
                self._engine.add_request(
                    request.request_id, request.prompt_token_ids, request.params, prompt=request.prompt
                )
        except RequestError as error:
            for name in names:
                self._engine.abort(name)
            self._forget(names)
            stream.answer(error)
        else:
            stream.answer(None)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        if self._watcher is not None:
            self._watcher.stepped(outputs)
        groups: dict[RequestStream, list[RequestOutput]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                groups.setdefault(stream, []).append(output)
        for stream, group in groups.items():
            stream.deliver(group)
        self._forget([output.request_id for output in outputs if output.finished])

    def _end_requests(self, request_ids: Sequence[str]) -> None:
        known = self._forget(request_ids)
        for name in known:
            self._engine.abort(name)
        if known and self._watcher is not None:
            self._watcher.aborted(known)

    def _forget(self, request_ids: Iterable[str]) -> list[str]:
        """Drop the readers of these requests; returns the ids that had one."""
        with self._lock:
            return [name for name in request_ids if self._streams.pop(name, None) is not None]

    def _stop(self) -> None:
        self._finish(None)
        self._engine.abort_all()

    def _finish(self, error: BaseException | None) -> None:
        if error is None:
            reason = EngineError("the server is shutting down")
        else:
            reason = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            reason.__cause__ = error
            self.failure = reason
            logger.critical("the engine failed", exc_info=error)
        with self._lock:
            self._ended = True
            left, self._streams = set(self._streams.values()), {}
        for stream in left:
            stream.fail(reason)
        if error is not None and self._engine.recorder is not None:
            self._engine.recorder.abort_all()
        if error is not None and self._on_failure is not None:
            self._on_failure(reason)


class _Reported:
    """Hands the exception that ends its block to `report`, whatever it is, and lets it rest there."""

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._report = report

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self._report(error)
        return True
