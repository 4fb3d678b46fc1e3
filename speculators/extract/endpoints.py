"""OpenAI-compatible servers, one or many: requests that are tried again, and servers that are left alone to rest."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from speculators.errors import ServerError, UsageError

# Answers that another attempt may turn into a good one.
_PASSING = frozenset({408, 409, 425, 429, *range(500, 600)})
_BREAK_AFTER = 3
_REST_SECONDS, _MAX_REST_SECONDS = 1.0, 60.0


class ServerDownError(ServerError):
    """No server answers: what was tried last, and how often."""


class RefusedError(ServerError):
    """A server refuses a request for what it asks; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class RetryPolicy:
    """How long a request is tried: `retries` times after the first, after waits that double from `backoff_seconds`."""

    retries: int = 5
    backoff_seconds: float = 0.5
    max_backoff_seconds: float = 30.0
    timeout_seconds: float = 600.0

    def wait_seconds(self, attempt: int) -> float:
        """Seconds before the attempt after this one (from 0), spread so that many clients do not come at once."""
        longest = min(self.max_backoff_seconds, self.backoff_seconds * 2.0**attempt)
        return longest * random.uniform(0.5, 1.0)


@dataclass
class Endpoint:
    """A server's base address (up to /v1), and its circuit breaker.

    After three failures in a row nothing is asked of it for a second, then one request at a time, and twice as long
    each time that fails.
    """

    url: str
    failures: int = 0
    rest_seconds: float = _REST_SECONDS
    resting_until: float = 0.0
    mutex: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def resting(self) -> float:
        """Seconds until it may be asked again."""
        return max(0.0, self.resting_until - time.monotonic())

    def succeeded(self) -> None:
        """Close the breaker."""
        with self.mutex:
            self.failures, self.rest_seconds, self.resting_until = 0, _REST_SECONDS, 0.0

    def failed(self) -> None:
        """Count a failure; the third in a row, and each after it, opens the breaker."""
        with self.mutex:
            self.failures += 1
            if self.failures >= _BREAK_AFTER and self.resting == 0:
                self.resting_until = time.monotonic() + self.rest_seconds
                self.rest_seconds = min(2 * self.rest_seconds, _MAX_REST_SECONDS)


class Endpoints:
    """Servers that answer for the same model; requests go to them in turn. Used from many threads."""

    def __init__(
        self, urls: Sequence[str], *, policy: RetryPolicy | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        if not urls:
            raise UsageError("no endpoint is given; expected at least one like http://127.0.0.1:8000/v1")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise UsageError(f"endpoint {url!r}: expected an address like http://127.0.0.1:8000/v1")
        self.policy = policy or RetryPolicy()
        self.endpoints = [Endpoint(_base(url)) for url in urls]
        self._turn = itertools.count()
        self._client = httpx.Client(timeout=self.policy.timeout_seconds, headers=dict(headers or {}))
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close connections; attempts that wait end with ServerDownError."""
        self._stopped.set()
        self._client.close()

    def model(self) -> str:
        """The first model that the servers name."""
        data = self.ask("GET", "/models").get("data") or []
        if not data or not isinstance(data[0], dict) or "id" not in data[0]:
            raise UsageError(f"{self.endpoints[0].url}/models names no model; give one")
        return str(data[0]["id"])

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that a server answers with.

        Raises RefusedError for a request that the server refuses, ServerDownError when all attempts have failed.
        """
        reason = "nothing was tried"
        for attempt in range(self.policy.retries + 1):
            endpoint = self._choose()
            try:
                answer = self._client.request(method, endpoint.url + path, json=body)
                if answer.status_code not in _PASSING:
                    endpoint.succeeded()
                    return _object(answer)
                reason = f"HTTP {answer.status_code}: {_message(answer)}"
            except (httpx.TransportError, RuntimeError) as error:
                # RuntimeError: the client was closed under way.
                reason = f"{type(error).__name__}: {error}"
            endpoint.failed()
            if attempt < self.policy.retries and self._stopped.wait(self.policy.wait_seconds(attempt)):
                break
        raise ServerDownError(f"{endpoint.url}{path}: {reason} ({attempt + 1} attempts)")

    def _choose(self) -> Endpoint:
        """The next one in turn that is not resting; where all rest, the one that rests shortest, after its rest."""
        first = next(self._turn)
        count = len(self.endpoints)
        ordered = [self.endpoints[(first + step) % count] for step in range(count)]
        chosen = min(ordered, key=lambda endpoint: endpoint.resting)
        self._stopped.wait(chosen.resting)
        return chosen


def _base(url: str) -> str:
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def _object(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code >= 400:
        raise RefusedError(f"{answer.url}: HTTP {answer.status_code}: {_message(answer)}", answer.status_code)
    try:
        data = answer.json()
    except ValueError as error:
        raise RefusedError(f"{answer.url}: the answer is no JSON: {error}", answer.status_code) from error
    if not isinstance(data, dict):
        raise RefusedError(f"{answer.url}: the answer is {data!r:.80}, expected an object", answer.status_code)
    return data


def _message(answer: httpx.Response) -> str:
    """What an error's body says, in the OpenAI API's shape or any other."""
    try:
        data = answer.json()
    except ValueError:
        return answer.text[:200]
    error = data.get("error", data) if isinstance(data, dict) else data
    return str(error.get("message", error) if isinstance(error, dict) else error)[:400]
