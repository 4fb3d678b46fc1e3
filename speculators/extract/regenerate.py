"""Answers by the verifier itself, so that a draft learns the text that it will have to predict.

Prompts (rows with one or several user turns; answers in them are dropped) become conversations: the verifier answers
each turn in order. The batch stays full because every row is a request of its own; a row's next turn is queued as soon
as its answer is there. A row's temperature and seed depend on its id alone, never on the order in which rows finish.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from speculators.errors import DataError, UsageError
from speculators.extract.conversations import Conversation, Message, read_conversations
from speculators.extract.progress import RowProgress
from speculators.extract.tokenize import ChatTokenizer
from speculators.runtime.engine import Engine
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.sampling import SamplingParams

REPLACEMENT_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class RegenerateOptions:
    """How rows are answered.

    `temperatures` are (value, share) pairs: 0.0 is greedy, shares are relative. `max_new_tokens` counts per answer.
    """

    max_new_tokens: int = 256
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    seed: int = 0
    store_token_ids: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}, expected 1 or more")
        if not self.temperatures or any(value < 0 or share <= 0 for value, share in self.temperatures):
            raise UsageError(
                f"temperatures are {self.temperatures}, expected (value, share) pairs with value >= 0 and share > 0"
            )

    def temperature_of(self, row_id: str) -> float:
        """The temperature of a row, drawn by its id with the given shares."""
        drawn = _hash(self.seed, "temperature", row_id) / 2**32 * sum(share for _, share in self.temperatures)
        for value, share in self.temperatures:
            drawn -= share
            if drawn < 0:
                return value
        return self.temperatures[-1][0]

    def seed_of(self, row_id: str) -> int:
        """The seed of a row, 31 bits; its n-th answer (from 0) is drawn with this plus n."""
        return _hash(self.seed, "noise", row_id) >> 1

    def settings(self, verifier: str) -> dict[str, Any]:
        """What must be equal for a run to go on where another one stopped."""
        kept = {key: value for key, value in asdict(self).items() if key != "limit"}
        return {"verifier": verifier, **kept, "temperatures": [list(pair) for pair in self.temperatures]}


@dataclass
class RegenerateResult:
    """Counts of one run; `resumed` rows were finished before, `skipped` ones leave no room for an answer."""

    output: Path
    rows: int = 0
    resumed: int = 0
    skipped: list[str] = field(default_factory=list)
    answer_tokens: int = 0


@dataclass
class _Talk:
    """A conversation under way; `waiting` holds the user turns to come."""

    row: Conversation
    temperature: float
    seed: int
    messages: list[Message]
    waiting: deque[str]
    token_ids: list[list[int]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, row: Conversation, options: RegenerateOptions) -> _Talk:
        """A conversation before its first turn; DataError where it needs someone besides user and verifier."""
        if row.tools or any(message["role"] == "tool" for message in row.messages):
            raise row.where.fault("the row uses tools, which nobody here answers; remove it")
        start = row.system_messages
        if any(message["role"] in ("system", "developer") for message in row.messages[len(start) :]):
            raise row.where.fault("the row has a system message between turns; expected it before the first one")
        return cls(
            row,
            options.temperature_of(row.row_id),
            options.seed_of(row.row_id),
            [dict(message) for message in start],
            deque(row.user_turns),
        )

    def to_json(self, store_token_ids: bool) -> str:
        """The finished conversation as a line."""
        row: dict[str, Any] = {
            "id": self.row.row_id,
            "messages": self.messages,
            "temperature": self.temperature,
            "seed": self.seed,
            "finish_reasons": self.finish_reasons,
        }
        if store_token_ids:
            row["token_ids"] = self.token_ids
        return json.dumps(row, ensure_ascii=False)


def regenerate_rows(
    engine: Engine,
    prompts: str | Path | Sequence[str | Path],
    output: str | Path,
    options: RegenerateOptions | None = None,
    *,
    progress: bool = True,
) -> RegenerateResult:
    """Answer every row of the prompt files and write one JSON line per finished conversation to `output`.

    A line holds id, messages, temperature, seed and finish_reasons ("stop" or "length", one per answer), and token_ids
    of the answers on request. Lines are flushed as rows finish, and put in the order of the prompts at the end. A rerun
    drops a torn last line, keeps finished rows and goes on. Raises DataError for bad rows and for an output made with
    other settings, and UsageError for an output that is not named .jsonl.
    """
    output, options = Path(output), options or RegenerateOptions()
    if output.suffix != ".jsonl":
        raise UsageError(f"output {output} must end in .jsonl, since rows are appended as they finish")
    chat = ChatTokenizer(engine.verifier.tokenizer, name=engine.verifier.name_or_path)
    order: list[str] = []
    talks: deque[_Talk] = deque()
    for row in read_conversations(prompts, options.limit):
        order.append(row.row_id)
        talks.append(_Talk.begin(row, options))
    output.parent.mkdir(parents=True, exist_ok=True)
    _check_settings(output, options.settings(Path(engine.verifier.name_or_path).name))
    finished = set(_recover(output))
    talks = deque(talk for talk in talks if talk.row.row_id not in finished)
    result = RegenerateResult(output, resumed=len(order) - len(talks))
    if talks:
        bar = RowProgress("regenerate", len(order), done=result.resumed, enabled=progress)
        with output.open("a", encoding="utf-8") as stream, bar:
            _Run(engine, chat, options, stream, bar, result).answer(talks)
    _put_in_order(output, order)
    return result


@dataclass
class _Run:
    engine: Engine
    chat: ChatTokenizer
    options: RegenerateOptions
    stream: TextIO
    bar: RowProgress
    result: RegenerateResult

    def answer(self, talks: deque[_Talk]) -> None:
        """Keep the engine supplied until every talk is written."""
        active: dict[str, _Talk] = {}
        try:
            while talks or active:
                # More than fit at once, so that a slot that comes free is taken within the same round.
                while talks and len(active) < 2 * self.engine.limits.max_num_seqs:
                    talk = talks.popleft()
                    if self._ask(talk):
                        active[talk.row.row_id] = talk
                    else:
                        self.result.skipped.append(talk.row.row_id)
                        self.bar.advance(1)
                for answer in self.engine.step():
                    if answer.finished:
                        self._take(active, answer)
        finally:
            for request_id in active:
                self.engine.abort(request_id)
            os.fsync(self.stream.fileno())

    def _ask(self, talk: _Talk) -> bool:
        """Queue the next turn; False where the prompt leaves no room for a token."""
        messages = [*talk.messages, {"role": "user", "content": talk.waiting[0]}]
        token_ids = self.chat.encode_prompt(messages, talk.row.where)
        if len(token_ids) >= self.engine.limits.max_model_len:
            return False
        talk.messages = messages
        talk.waiting.popleft()
        params = SamplingParams(
            temperature=talk.temperature,
            max_tokens=self.options.max_new_tokens,
            seed=talk.seed + len(talk.finish_reasons),
        )
        self.engine.add_request(talk.row.row_id, token_ids, params)
        return True

    def _take(self, active: dict[str, _Talk], answer: RequestOutput) -> None:
        talk = active.pop(answer.request_id)
        completion = answer.outputs[0]
        reason = completion.finish_reason or "stop"
        # A cut answer may end within a character, which reads as a replacement character that nobody wrote.
        text = completion.text.rstrip(REPLACEMENT_CHARACTER) if reason == "length" else completion.text
        talk.messages.append({"role": "assistant", "content": text})
        talk.token_ids.append(list(completion.token_ids))
        talk.finish_reasons.append(reason)
        self.result.answer_tokens += len(completion.token_ids)
        if talk.waiting and self._ask(talk):
            active[answer.request_id] = talk
            self.bar.advance(0, len(completion.token_ids))
            return
        self.stream.write(talk.to_json(self.options.store_token_ids) + "\n")
        self.stream.flush()
        self.result.rows += 1
        self.bar.advance(1, len(completion.token_ids))


def _check_settings(output: Path, settings: dict[str, Any]) -> None:
    path = output.with_name(output.name + ".settings.json")
    if output.exists() and path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"not JSON ({error}); remove it and {output} to begin anew", path=path) from error
        for key, value in settings.items():
            if before.get(key) != value:
                raise DataError(
                    f"the file was made with {key} {before.get(key)!r}, now {value!r} is asked for; go on with the "
                    "former, or give another output",
                    path=output,
                )
        return
    if output.exists() and output.stat().st_size:
        raise DataError(f"the file exists, but {path.name}, which tells how it was made, does not", path=output)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _recover(output: Path) -> Iterator[str]:
    """Yield the ids of finished rows, after cutting off a last line that was torn."""
    if not output.exists():
        return
    for number, (row_id, start, end) in enumerate(_lines(output), start=1):
        if row_id is not None:
            yield row_id
        elif end == output.stat().st_size:
            os.truncate(output, start)
        else:
            raise DataError("the line is no finished row; remove the line, or the file", path=output, line=number)


def _lines(output: Path) -> Iterator[tuple[str | None, int, int]]:
    """Yield, per line, the row's id (None where it is not whole) and the bytes where it starts and ends."""
    start = 0
    with output.open("rb") as stream:
        for raw in stream:
            row_id: str | None = None
            if raw.endswith(b"\n"):
                try:
                    row_id = str(json.loads(raw)["id"])
                except (ValueError, KeyError, TypeError):
                    row_id = None
            yield row_id, start, start + len(raw)
            start += len(raw)


def _put_in_order(output: Path, order: list[str]) -> None:
    """Sort the rows as the prompts were; rows of other prompts follow."""
    if not output.exists():
        return
    rank = {row_id: i for i, row_id in enumerate(order)}
    spans = [(rank.get(row_id or "", len(order)), start, end) for row_id, start, end in _lines(output)]
    if spans == sorted(spans):
        return
    temporary = output.with_name(output.name + ".tmp")
    with output.open("rb") as source, temporary.open("wb") as target:
        for _, start, end in sorted(spans):
            source.seek(start)
            target.write(source.read(end - start))
        target.flush()
        os.fsync(target.fileno())
    os.replace(temporary, output)


def _hash(seed: int, purpose: str, row_id: str) -> int:
    digest = hashlib.sha256(f"{seed}/{purpose}/{row_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
