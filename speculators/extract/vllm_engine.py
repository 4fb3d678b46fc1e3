"""Hidden states from vLLM's offline engine, which runs in a process of its own, and there in an environment of its own.

vLLM's dependencies and this package's need not agree, so that the engine is started with any Python that has vLLM;
rows go to it through a pipe, and their states come back as per-request files, which are removed once they are read.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from torch import Tensor

from speculators.errors import ServerError, StoreError, UsageError
from speculators.extract.filling import Advance, RowFault
from speculators.extract.folder import chosen_layers
from speculators.extract.remote import check_token_ids
from speculators.extract.vllm_plugin import CONNECTOR, MODULE
from speculators.formats.hidden_states import cleanup_hidden_states, load_hidden_states, read_layer_ids
from speculators.formats.hidden_states_options import LAYER_IDS

ROOT = Path(__file__).resolve().parents[2]
PROCESS = "speculators.extract.vllm_process"
# One generated token, and one that vLLM wants to be free or it captures nothing.
HEADROOM = 2
_BATCHED_TOKENS = 4096
_LAST_LINES, _FIRST_ERRORS = 12, 3
_NAMED_ERROR = re.compile(r"\b\w+(Error|Exception): ")
# Gibibytes for keys and values on a CPU, where vLLM else wants nearly all of the memory, which the files need too.
_CPU_CACHE = "4"
_POLL_SECONDS = 0.5
_CHOSEN_HERE = frozenset({"model", "speculative_config", "kv_transfer_config", "enable_chunked_prefill"})


@dataclass(frozen=True)
class VllmOptions:
    """How vLLM is run.

    `python` is the interpreter that has it, else this one. `max_model_len` is the longest sequence, else as long as the
    longest row needs; `chunked_prefill` lets vLLM split prompts, which loses rows before version 0.32. Files go below
    `folder`, else the system's folder for temporary files; one is waited for `file_seconds`. `keywords` are more of
    those of vLLM's `LLM`. UsageError for keywords that are chosen here.
    """

    python: Path | None = None
    max_model_len: int | None = None
    chunked_prefill: bool = False
    folder: Path | None = None
    file_seconds: float = 60.0
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = sorted(_CHOSEN_HERE & self.keywords.keys())
        if taken:
            raise UsageError(f"keywords of vLLM's LLM: {', '.join(taken)} cannot be given; extraction chooses them")

    def engine_keywords(self, verifier: str, layer_ids: Sequence[int], longest_row: int, folder: str) -> dict[str, Any]:
        """The keywords of vLLM's `LLM` for rows of up to `longest_row` tokens, whose files go to `folder`."""
        length = self.max_model_len or longest_row + HEADROOM
        return {
            "max_model_len": length,
            # Without chunks, the longest row has to fit into a step.
            "max_num_batched_tokens": max(_BATCHED_TOKENS, 2 * length),
            "enable_prefix_caching": False,
            **self.keywords,
            "model": verifier,
            "enable_chunked_prefill": self.chunked_prefill,
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {LAYER_IDS: list(layer_ids)}},
            },
            "kv_transfer_config": {
                "kv_connector": CONNECTOR,
                "kv_connector_module_path": MODULE,
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": folder},
            },
        }


@dataclass(frozen=True)
class _Engine:
    """vLLM's process, and the two ends of the talk with it."""

    process: subprocess.Popen[str]
    questions: IO[str]
    answers: IO[str]


class VllmSource:
    """Asks an engine of vLLM for the states of rows; a context manager that ends it.

    The engine starts with the first row. ServerError, with what vLLM said last, when it ends by itself. A row without
    room below `max_model_len` is a RowFault, since vLLM captures nothing of a batch with such a row.
    """

    def __init__(
        self, verifier: str | Path, layer_ids: Sequence[int], longest_row: int, options: VllmOptions | None = None
    ) -> None:
        self._options = options or VllmOptions()
        self._layer_ids = tuple(layer_ids)
        self._folder = tempfile.TemporaryDirectory(prefix="hidden-states-", dir=self._options.folder)
        # A relative path means nothing to a process that runs elsewhere.
        name = str(Path(verifier).resolve()) if Path(verifier).is_dir() else str(verifier)
        states = str(Path(self._folder.name, "states"))
        self._keywords = self._options.engine_keywords(name, layer_ids, longest_row, states)
        self._engine: _Engine | None = None

    def __enter__(self) -> VllmSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def states(self, rows: Sequence[Tensor], advance: Advance) -> list[Tensor | RowFault]:
        """States [T, layers, H] of each row of ids [T], or why there are none."""
        longest = int(self._keywords["max_model_len"]) - HEADROOM
        fitting = [place for place, row in enumerate(rows) if len(row) <= longest]
        found: list[Tensor | RowFault] = [
            RowFault(f"{len(row)} tokens; max_model_len {longest + HEADROOM} has room for {longest}") for row in rows
        ]
        if not fitting:
            return found
        answer = self._ask({"rows": [rows[place].tolist() for place in fitting]})
        for place, file in zip(fitting, answer["files"], strict=True):
            found[place] = self._read(file, rows[place])
            advance(1, len(rows[place]))
        return found

    def close(self) -> None:
        """End the engine and remove what it wrote."""
        if self._engine is not None:
            process = self._engine.process
            # Where it has ended already, there is nobody to hear that there is no more.
            with suppress(BrokenPipeError):
                self._engine.questions.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._options.file_seconds)
            # Its own processes outlive it when it dies, and hold gigabytes.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._engine.answers.close()
            self._engine = None
        self._folder.cleanup()

    def _read(self, file: Mapping[str, Any], row: Tensor) -> Tensor | RowFault:
        if file["path"] is None:
            return RowFault(file["error"] or "vLLM named no file")
        path = Path(file["path"])
        try:
            loaded = load_hidden_states(path, timeout=self._options.file_seconds)
            stored = read_layer_ids(path) or self._layer_ids
        except StoreError as error:
            return RowFault(str(error))
        finally:
            cleanup_hidden_states(path)
        check_token_ids(loaded["token_ids"].tolist(), row.tolist(), path)
        return chosen_layers(loaded["hidden_states"], stored, self._layer_ids, str(path))

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        if self._engine is None:
            self._engine = self._start()
            self._exchange(self._engine, self._keywords)
        return self._exchange(self._engine, question)

    def _exchange(self, engine: _Engine, question: Mapping[str, Any]) -> dict[str, Any]:
        # Where it has ended, what it said last is read below.
        with suppress(BrokenPipeError):
            engine.questions.write(json.dumps(question) + "\n")
            engine.questions.flush()
        # Not until the end of the pipe: processes that vLLM forked may hold it open after its death.
        while not select.select([engine.answers], [], [], _POLL_SECONDS)[0] and engine.process.poll() is None:
            pass
        line = engine.answers.readline() if select.select([engine.answers], [], [], 0)[0] else ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = engine.process.wait()
        raise ServerError(f"vLLM ended with code {code}; it said:\n" + "\n".join(self._said()))

    def _said(self) -> list[str]:
        """The errors that vLLM's processes named, the first of which is the cause, and what came last."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        named = [line for line in lines[:-_LAST_LINES] if _NAMED_ERROR.search(line)]
        return [*dict.fromkeys(named[:_FIRST_ERRORS]), *lines[-_LAST_LINES:]]

    @property
    def _log(self) -> Path:
        return Path(self._folder.name, "vllm.log")

    def _start(self) -> _Engine:
        python = self._options.python or Path(sys.executable)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment["PYTHONPATH"] = str(ROOT)
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE)
        reading, writing = os.pipe()
        try:
            with self._log.open("wb") as log:
                process = subprocess.Popen(
                    [python.absolute(), "-m", PROCESS, str(writing)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[writing],
                    env=environment,
                    cwd=self._folder.name,
                    start_new_session=True,
                    text=True,
                )
        except OSError as error:
            os.close(reading)
            raise ServerError(f"vLLM cannot be started with {python}: {error.strerror}") from error
        finally:
            os.close(writing)
        assert process.stdin is not None
        return _Engine(process, process.stdin, os.fdopen(reading, encoding="utf-8"))
