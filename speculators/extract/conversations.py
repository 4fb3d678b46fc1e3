"""Conversations from JSON lines.

One object a line, plain or compressed (`.jsonl`, `.jsonl.gz`, `.jsonl.xz`), in one of five shapes. Where a row fits
several, the first of this list wins; keys that no shape knows are left alone.

    {"input_ids": [1, 2], "loss_mask": [0, 1]}                      already tokens
    {"messages": [{"role": "user", "content": "..."}], "tools"?}    chat messages
    {"conversations": [{"from": "human", "value": "..."}]}          ShareGPT
    {"turns": ["...", "..."], "system"?}                            what the user says, turn by turn
    {"prompt": "...", "system"?}                                    one user turn

`id` (a string or an integer) names a row; without it the name is `<file stem>-<line number>`. `finish_reasons` (one per
assistant message, as `regenerate` writes it) says where an answer was cut at its length limit, so that nobody trains on
an end of turn that the verifier did not write.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from speculators.errors import DataError

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}


class Where(NamedTuple):
    """A line of a data file, 1-based."""

    path: Path
    line: int

    def fault(self, message: str) -> DataError:
        """The error to raise about this line."""
        return DataError(message, path=self.path, line=self.line)


@dataclass(frozen=True)
class Conversation:
    """A row of chat messages; `cut_answers` are indices into `messages` of answers without an end of turn."""

    row_id: str
    where: Where
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    cut_answers: frozenset[int] = field(default_factory=frozenset)

    @property
    def user_turns(self) -> list[str]:
        """What the user says, in order."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    @property
    def first_turn(self) -> list[Message]:
        """Everything up to the first thing the user says, which is where an answer is measured."""
        return [*self.system_messages, {"role": "user", "content": self.user_turns[0]}]

    @property
    def system_messages(self) -> list[Message]:
        """The messages before the first user turn."""
        first_user = next(i for i, message in enumerate(self.messages) if message["role"] == "user")
        return self.messages[:first_user]


@dataclass(frozen=True)
class TokenRow:
    """A row that is tokens already: ids and, per token, whether the verifier wrote it."""

    row_id: str
    where: Where
    input_ids: list[int]
    loss_mask: list[bool]


Row = Conversation | TokenRow


def read_rows(
    paths: str | Path | Iterable[str | Path], limit: int | None = None, match: str | None = None
) -> Iterator[Row]:
    """Yield the rows of one or several files, in order, `limit` at most, of those whose id `match` is found in.

    `match` is a regular expression. A DataError names file and line of anything malformed or empty, of an id seen
    before, and of a file with no rows, or with none that matches.
    """
    wanted = re.compile(match or "")
    files = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    seen: dict[str, Where] = {}
    count = 0
    for path in files:
        empty = True
        for number, line in _read_lines(path):
            if limit is not None and count >= limit:
                return
            row = parse_row(line, path, number)
            if row.row_id in seen:
                before = seen[row.row_id]
                raise row.where.fault(f"id {row.row_id!r} was used at {before.path}:{before.line}; ids must be unique")
            seen[row.row_id] = row.where
            if wanted.search(row.row_id):
                empty = False
                count += 1
                yield row
        if empty:
            no_rows, no_match = "no rows; expected one JSON object a line", f"no row whose id has a match of {match!r}"
            raise DataError(f"the file has {no_rows if match is None else no_match}", path=path)


def read_conversations(
    paths: str | Path | Iterable[str | Path], limit: int | None = None, match: str | None = None
) -> Iterator[Conversation]:
    """Yield rows as `read_rows` does; a row of tokens is a DataError, since nobody can talk with it."""
    for row in read_rows(paths, limit, match):
        if isinstance(row, TokenRow):
            raise row.where.fault("the row holds input_ids; expected turns, prompt, messages or conversations")
        yield row


def parse_row(line: str, path: Path, number: int) -> Row:
    """Read one line of a file; a DataError names the file, the line and the fault."""
    where = Where(path, number)
    if not line.strip():
        raise where.fault("the line is empty; remove it")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise where.fault(f"not JSON ({error.msg} at column {error.colno}); expected one object a line") from error
    if not isinstance(row, dict):
        raise where.fault(f"got a JSON {type(row).__name__}, expected an object")
    row_id = row.get("id", f"{path.name.split('.')[0]}-{number:06d}")
    if isinstance(row_id, bool) or not isinstance(row_id, (str, int)):
        raise where.fault(f"id is {row_id!r}, expected a string or an integer")
    row_id = str(row_id)
    if "input_ids" in row:
        return _token_row(row, row_id, where)
    messages = _messages(row, where)
    _check_order(messages, where)
    tools = row.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise where.fault(f"tools is a {type(tools).__name__}, expected a list of JSON schemas (objects)")
    return Conversation(row_id, where, messages, tools, _cut_answers(row, messages, where))


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with _open(path) as stream:
            for number, raw in enumerate(stream, start=1):
                yield number, raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise Where(path, number).fault(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        after = f" after line {number}" if number else ""
        raise DataError(f"cannot be read{after}: {error}", path=path) from error


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _messages(row: dict[str, Any], where: Where) -> list[Message]:
    if "messages" in row:
        return [_message(item, where, i) for i, item in enumerate(_list(row, "messages", where))]
    if "conversations" in row:
        return [_sharegpt(item, where, i) for i, item in enumerate(_list(row, "conversations", where))]
    if "turns" in row:
        turns = _list(row, "turns", where)
    elif "prompt" in row:
        turns = [row["prompt"]]
    else:
        raise where.fault(
            f"keys {sorted(row)} make no row; expected one of messages, conversations, turns, prompt, input_ids"
        )
    for i, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise where.fault(f"user turn {i} is {_short(turn)}, expected a text that is not blank")
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise where.fault(f"system is a {type(system).__name__}, expected a text")
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    return start + [{"role": "user", "content": turn} for turn in turns]


def _message(item: object, where: Where, i: int) -> Message:
    if not isinstance(item, dict):
        raise where.fault(f"message {i} is a {type(item).__name__}, expected an object with role and content")
    role = item.get("role")
    if role not in ROLES:
        raise where.fault(f"message {i} has role {role!r}, expected one of {', '.join(ROLES)}")
    content = item.get("content")
    if isinstance(content, list):
        raise where.fault(f"message {i} has content in parts, which is not supported; give content as one text")
    if content is None and role == "assistant" and item.get("tool_calls"):
        return {**item, "content": ""}
    if not isinstance(content, str):
        raise where.fault(f"message {i} has content {_short(content)}, expected a text")
    return dict(item)


def _sharegpt(item: object, where: Where, i: int) -> Message:
    if not isinstance(item, dict):
        raise where.fault(f"turn {i} is a {type(item).__name__}, expected an object with from and value")
    role = SHAREGPT_ROLES.get(str(item.get("from")))
    if role is None:
        raise where.fault(f"turn {i} is from {item.get('from')!r}, expected one of {', '.join(SHAREGPT_ROLES)}")
    return _message({"role": role, "content": item.get("value")}, where, i)


def _check_order(messages: list[Message], where: Where) -> None:
    spoken = [message["role"] for message in messages if message["role"] not in ("system", "developer")]
    if not spoken:
        raise where.fault("no user turn; expected at least one")
    if spoken[0] != "user":
        raise where.fault(f"the first turn comes from {spoken[0]!r}; expected the user to begin")


def _cut_answers(row: dict[str, Any], messages: list[Message], where: Where) -> frozenset[int]:
    reasons = row.get("finish_reasons")
    if reasons is None:
        return frozenset()
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not isinstance(reasons, list) or len(reasons) != len(answers):
        raise where.fault(f"finish_reasons is {_short(reasons)}, expected one per assistant message ({len(answers)})")
    return frozenset(i for i, reason in zip(answers, reasons, strict=True) if reason == "length")


def _token_row(row: dict[str, Any], row_id: str, where: Where) -> TokenRow:
    ids = _list(row, "input_ids", where)
    mask = _list(row, "loss_mask", where)
    if len(ids) != len(mask):
        raise where.fault(f"{len(ids)} input_ids but {len(mask)} entries in loss_mask; expected as many")
    for i, (token, learnt) in enumerate(zip(ids, mask, strict=True)):
        if type(token) is not int or token < 0:
            raise where.fault(f"input_ids[{i}] is {_short(token)}, expected an id of 0 or more")
        if type(learnt) not in (int, bool) or learnt not in (0, 1):
            raise where.fault(f"loss_mask[{i}] is {_short(learnt)}, expected 0 or 1")
    return TokenRow(row_id, where, ids, [bool(value) for value in mask])


def _list(row: dict[str, Any], key: str, where: Where) -> list[Any]:
    value = row.get(key)
    if not isinstance(value, list) or not value:
        raise where.fault(f"{key} is {_short(value)}, expected a list with at least one element")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
