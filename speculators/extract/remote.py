"""Hidden states from OpenAI-compatible servers that extract them: this runtime's, or vLLM's with a connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from speculators.errors import SpeculatorsError, StoreError
from speculators.extract.endpoints import Endpoints, RefusedError, RetryPolicy, ServerDownError
from speculators.extract.filling import Advance, RowFault
from speculators.extract.folder import chosen_layers
from speculators.extract.waiting import work_in_threads
from speculators.formats.hidden_states import (
    HiddenStatesTimeoutError,
    cleanup_hidden_states,
    load_hidden_states,
    read_layer_ids,
)

_LENGTH_CODES = frozenset({400, 413, 422})


@dataclass(frozen=True)
class ServerOptions:
    """Which servers to ask, and how: `concurrency` requests at a time over all of them.

    Their files must be visible here under the same paths. `file_seconds` is how long an announced file is waited for;
    `server_layer_ids` are the layers that the servers were started with, where their files do not say.
    """

    endpoints: tuple[str, ...]
    model: str | None = None
    concurrency: int = 16
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    file_seconds: float = 60.0
    headers: Mapping[str, str] | None = None
    server_layer_ids: tuple[int, ...] | None = None


class ServerSource:
    """Asks servers for the states of rows; a context manager that closes the connections.

    A server must give back the very token ids that it was sent: StoreError names the first that differs. ServerError
    when no server answers any more, or one refuses whatever the row.
    """

    def __init__(self, options: ServerOptions, layer_ids: Sequence[int]) -> None:
        if options.concurrency < 1:
            raise StoreError(f"concurrency is {options.concurrency}, expected 1 or more")
        self._options, self._layer_ids = options, tuple(layer_ids)
        self._endpoints = Endpoints(options.endpoints, policy=options.policy, headers=options.headers)
        self._model = options.model

    def __enter__(self) -> ServerSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._endpoints.close()

    def states(self, rows: Sequence[Tensor], advance: Advance) -> list[Tensor | RowFault]:
        """States of each row, longest first, so that a long one does not come last and alone."""
        if self._model is None:
            self._model = self._endpoints.model()
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place]))
        found: dict[int, Tensor | RowFault] = {}

        def ask(place: int) -> Tensor | RowFault:
            return self._states_of(rows[place].tolist())

        with ExitStack() as stop_unless_done:
            # Whatever ends this early, the threads are not to go on trying.
            stop_unless_done.callback(self._endpoints.close)
            asking = closing(work_in_threads(ask, order, self._options.concurrency))
            for place, outcome in stop_unless_done.enter_context(asking):
                if isinstance(outcome, SpeculatorsError):
                    raise outcome
                found[place] = outcome
                advance(1, len(rows[place]))
            stop_unless_done.pop_all()
        return [found[place] for place in range(len(rows))]

    def _states_of(self, ids: list[int]) -> Tensor | RowFault:
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        reason = ""
        for _ in range(self._options.policy.retries + 1):
            try:
                answer = self._endpoints.ask("POST", "/completions", body)
            except RefusedError as error:
                if error.status in _LENGTH_CODES:
                    return RowFault(str(error))
                raise
            path = _path(answer)
            try:
                return self._read(path, ids)
            except HiddenStatesTimeoutError as error:
                # The server died, or was killed, between its answer and the file.
                reason = str(error)
            finally:
                if path.exists() or path.parent.is_dir():
                    cleanup_hidden_states(path)
        raise ServerDownError(
            f"{reason}; the server's folder must be visible here under the same path, and its process alive"
        )

    def _read(self, path: Path, ids: list[int]) -> Tensor | RowFault:
        try:
            loaded = load_hidden_states(path, timeout=self._options.file_seconds)
            layers = read_layer_ids(path)
        except HiddenStatesTimeoutError:
            raise
        except StoreError as error:
            return RowFault(str(error))
        check_token_ids(loaded["token_ids"].tolist(), ids, path)
        stored = layers or self._options.server_layer_ids or self._layer_ids
        return chosen_layers(loaded["hidden_states"], stored, self._layer_ids, str(path))


def check_token_ids(got: Sequence[int], sent: Sequence[int], path: Path) -> None:
    """Raise StoreError naming the first index where a file's token ids are not those that were sent."""
    if list(got) == list(sent):
        return
    pairs = zip(got, sent, strict=False)
    index = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(got), len(sent)))
    shown = [str(side[index]) if index < len(side) else "nothing" for side in (got, sent)]
    raise StoreError(
        f"{path}: token ids differ first at index {index}: got {shown[0]}, sent {shown[1]} ({len(got)} and {len(sent)} "
        "tokens); does the server add tokens, or run another model?"
    )


def _path(answer: Mapping[str, Any]) -> Path:
    params = answer.get("kv_transfer_params")
    path = params.get("hidden_states_path") if isinstance(params, Mapping) else None
    if not isinstance(path, str):
        raise StoreError(
            "the server answered without kv_transfer_params.hidden_states_path; start it with speculative_config's "
            "method extract_hidden_states and a kv_transfer_config"
        )
    return Path(path)
