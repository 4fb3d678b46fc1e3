"""Answers by OpenAI-compatible servers: this runtime's, vLLM's or any other that serves the verifier.

A talk's turns are asked one after another, and many talks at a time. A row's temperature and seed are those of the run
in process, so that a server of this runtime gives the same answers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculators.errors import DataError, SpeculatorsError, UsageError
from speculators.extract.conversations import Message, Sources
from speculators.extract.endpoints import Endpoints, RefusedError, RetryPolicy, ServerDownError
from speculators.extract.regenerate import Answering, RegenerateOptions, RegenerateResult, Talk
from speculators.extract.waiting import work_in_threads

# A server that refuses in one of these ways refuses every row.
_REFUSES_ALL = frozenset({401, 403, 404, 405})
# So many rows in a row without an answer mean that nobody is there.
_DOWN_AFTER = 3


@dataclass(frozen=True)
class EndpointOptions:
    """Which servers to ask, and how: `concurrency` conversations at a time over all of them.

    `model` is what the servers call the verifier; the first name that they list where it is not given.
    """

    endpoints: tuple[str, ...]
    model: str | None = None
    concurrency: int = 64
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    headers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise UsageError(f"concurrency is {self.concurrency}, expected 1 or more")


def regenerate_remotely(
    servers: EndpointOptions,
    prompts: Sources,
    output: str | Path,
    options: RegenerateOptions | None = None,
    *,
    progress: bool = True,
) -> RegenerateResult:
    """Let servers answer every row of the prompts; the files are those of `regenerate_rows`, and so is a rerun.

    A row that a server refuses, or that all attempts have failed for, is named in the errors file and asked again by a
    rerun. Raises what `regenerate_rows` raises, RefusedError where a server refuses everybody (key, address, model),
    and ServerDownError where no server answers any more; what was finished is kept.
    """
    options = options or RegenerateOptions()
    with Endpoints(servers.endpoints, policy=servers.policy, headers=servers.headers) as endpoints:
        model = servers.model or endpoints.model()
        with Answering(prompts, output, options, Path(model).name, progress) as run:
            _RemoteRun(endpoints, model, servers.concurrency, run).answer()
    return run.result


class _RemoteRun:
    def __init__(self, endpoints: Endpoints, model: str, concurrency: int, run: Answering) -> None:
        self._endpoints, self._model, self._concurrency, self._run = endpoints, model, concurrency, run
        self._stopped = threading.Event()
        self._down = 0
        self._down_after = min(_DOWN_AFTER, len(run.talks))

    def answer(self) -> None:
        """Keep `concurrency` talks under way until every one is written or left out."""
        try:
            with closing(work_in_threads(self._answer, self._next_talks(), self._concurrency)) as answering:
                for talk, outcome in answering:
                    self._take(talk, outcome)
        finally:
            self._stopped.set()

    def _next_talks(self) -> Iterator[Talk]:
        while self._run.talks:
            yield self._run.talks.popleft()

    def _take(self, talk: Talk, outcome: str | SpeculatorsError | None) -> None:
        if isinstance(outcome, ServerDownError):
            self._down += 1
            self._run.fail(talk, str(outcome))
            if self._down >= self._down_after:
                raise outcome
            return
        if isinstance(outcome, SpeculatorsError):
            raise outcome
        self._down = 0
        if outcome is None:
            self._run.advance(talk.num_tokens)
            self._run.finish(talk)
        else:
            self._run.fail(talk, outcome)

    def _answer(self, talk: Talk) -> str | None:
        """Have a talk's turns answered; the reason where a server refuses one."""
        while talk.waiting and not self._stopped.is_set():
            try:
                answer = self._endpoints.ask("POST", "/chat/completions", self._body(talk))
            except RefusedError as error:
                if error.status in _REFUSES_ALL:
                    raise
                return str(error)
            choice = _choice(answer)
            if isinstance(choice, str):
                return choice
            talk.ask()
            message = choice["message"]
            reason = "length" if choice.get("finish_reason") == "length" else "stop"
            thought = message.get("reasoning_content") or message.get("reasoning")
            ids = choice.get("token_ids") or []
            talk.take(message.get("content") or "", reason, ids, thought)
            talk.num_tokens += (answer.get("usage") or {}).get("completion_tokens", len(ids))
            if self._run.options.store_token_ids and not ids:
                raise DataError(
                    f"the server of {self._model} gives no token_ids; leave store_token_ids out, or ask a server that "
                    "knows return_token_ids"
                )
        return None

    def _body(self, talk: Talk) -> dict[str, Any]:
        options = self._run.options
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_spoken(message) for message in talk.next_messages()],
            "max_tokens": options.max_new_tokens,
            "temperature": talk.temperature,
            "seed": talk.seed + len(talk.finish_reasons),
            **options.sampling,
        }
        if options.template_options:
            body["chat_template_kwargs"] = dict(options.template_options)
        if options.store_token_ids:
            body["return_token_ids"] = True
        return body


def _spoken(message: Message) -> Message:
    """A message without the reasoning of an answer, which templates do not show again."""
    return {key: message[key] for key in ("role", "content")}


def _choice(answer: Mapping[str, Any]) -> dict[str, Any] | str:
    """The only choice of a chat completion, or what is wrong with it."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        return f"the server's answer holds no message: {str(answer)[:200]}"
    if choice["message"].get("tool_calls"):
        return "the server answers with a tool call, which nobody here runs"
    return choice
