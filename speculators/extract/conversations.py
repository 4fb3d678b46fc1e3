"""Conversations from rows of data.

Rows come from files, folders and datasets (see `sources`); each is an object in one of these shapes. Where a row fits
several, the first of this list wins; keys that no shape knows are left alone, and so is a key whose value is null.

    {"input_ids": [1, 2], "loss_mask": [0, 1]}                      already tokens
    {"messages": [{"role": "user", "content": "..."}], "tools"?}    chat messages
    {"conversations": [{"from": "human", "value": "..."}]}          ShareGPT
    {"turns": ["...", "..."], "system"?}                            what the user says, turn by turn
    {"prompt": "...", "response"?: "...", "system"?}                one user turn, and perhaps its answer
    {"text": "..."}                                                 plain text, learnt as it stands

`completion` means `response`, and `instruction` (with `input`) and `output`, or `question` and `answer`, mean `prompt`
and `response`. Messages may hold `reasoning_content` (or `thinking`, `reasoning`), `tool_calls` whose arguments are an
object or its JSON, and results of role `tool`; `tools` is a list of JSON schemas or its JSON.

`id` (a string or an integer) names a row, with the file's stem before it where another file used it already; without it
the name is `<file stem>-<line number>`. `finish_reasons` (one per
assistant message, as `regenerate` writes it) says where an answer was cut at its length limit, so that nobody trains on
an end of turn that the verifier did not write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from speculators.errors import DataError
from speculators.extract.sources import MAX_ROW_BYTES, Record, Source, Where, draw, parse_line

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
PROMPT_FIELDS = ("prompt", "instruction", "question")
RESPONSE_FIELDS = {"prompt": ("response", "completion"), "instruction": ("output",), "question": ("answer",)}


@dataclass(frozen=True)
class Conversation:
    """A row of chat messages; `cut_answers` are indices into `messages` of answers without an end of turn."""

    row_id: str
    where: Where
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    cut_answers: frozenset[int] = field(default_factory=frozenset)

    @property
    def answers(self) -> list[int]:
        """Indices of the assistant messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

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


@dataclass(frozen=True)
class TextRow:
    """A row of plain text, without turns."""

    row_id: str
    where: Where
    text: str


Row = Conversation | TokenRow | TextRow
Sources = str | Path | Source | Iterable[str | Path | Source]


@dataclass(frozen=True)
class ReadOptions:
    """Which rows are read, and what becomes of bad ones.

    `limit` rows at most, of those whose id the regular expression `match` is found in; `seed` draws the shares of
    weighted sources. A row that is malformed or longer than `max_row_bytes` is raised, or given to `on_fault`, where
    there is one, and left out.
    """

    limit: int | None = None
    match: str | None = None
    seed: int = 0
    max_row_bytes: int = MAX_ROW_BYTES
    on_fault: Callable[[DataError], None] | None = None


def as_sources(given: Sources) -> list[Source]:
    """Read one or several names of sources, with or without a weight."""
    names = [given] if isinstance(given, (str, Path, Source)) else given
    return [Source.parse(name) for name in names]


def read_rows(
    sources: Sources, limit: int | None = None, match: str | None = None, options: ReadOptions | None = None
) -> Iterator[Row]:
    """Yield the rows of one or several sources, in order; `limit` and `match` are short for those of `ReadOptions`.

    A DataError names file and line of anything malformed or empty, of an id seen before, and of a source with no rows,
    or with none that matches.
    """
    how = options or ReadOptions()
    how = replace(how, limit=how.limit if limit is None else limit, match=how.match if match is None else match)
    wanted = re.compile(how.match or "")
    seen: dict[str, Where] = {}
    count = 0
    for source in as_sources(sources):
        empty = True
        records = source.records(how.max_row_bytes)
        if source.weight != 1:
            records = draw(records, source.weight, how.seed, source.name)
        for record in records:
            if how.limit is not None and count >= how.limit:
                return
            try:
                row = _row(record, seen)
            except DataError as fault:
                if how.on_fault is None:
                    raise
                how.on_fault(fault)
                empty = False
                continue
            if wanted.search(row.row_id):
                empty = False
                count += 1
                yield row
        if empty:
            weighted = f"no row left at weight {source.weight}" if source.weight < 1 else "no rows"
            no_rows = f"{weighted}; expected one JSON object a line, or a list of them"
            no_match = f"no row whose id has a match of {how.match!r}"
            raise DataError(f"the file has {no_rows if how.match is None else no_match}", path=source.name)


def read_conversations(
    sources: Sources, limit: int | None = None, match: str | None = None, options: ReadOptions | None = None
) -> Iterator[Conversation]:
    """Yield rows as `read_rows` does; a row of tokens or of plain text is a DataError: nobody can talk with it."""
    for row in read_rows(sources, limit, match, options):
        if not isinstance(row, Conversation):
            what = "input_ids" if isinstance(row, TokenRow) else "plain text"
            raise row.where.fault(f"the row holds {what}; expected turns, prompt, messages or conversations")
        yield row


def parse_row(line: str, path: Path, number: int) -> Row:
    """Read one line of a file; a DataError names the file, the line and the fault."""
    where = Where(path, number)
    return _row(Record(where, parse_line(line, where), path.name.split(".")[0]), {})


def _row(record: Record, seen: dict[str, Where]) -> Row:
    where = record.where
    if isinstance(record.value, DataError):
        raise record.value
    value = {key: item for key, item in record.value.items() if item is not None}
    row_id = value.get("id", f"{record.stem}-{where.line:06d}")
    if isinstance(row_id, bool) or not isinstance(row_id, (str, int)):
        raise where.fault(f"id is {row_id!r}, expected a string or an integer")
    row_id = f"{row_id}#{record.copy + 1}" if record.copy else str(row_id)
    if row_id in seen and seen[row_id].path != where.path:
        # Two sources that both count from 0 are no fault of either.
        row_id = f"{record.stem}/{row_id}"
    if row_id in seen:
        before = seen[row_id]
        raise where.fault(f"id {row_id!r} was used at {before.path}:{before.line}; ids must be unique")
    seen[row_id] = where
    if "input_ids" in value:
        return _token_row(value, row_id, where)
    if "text" in value and not value.keys() & {"messages", "conversations", "turns", *PROMPT_FIELDS}:
        return TextRow(row_id, where, _text(value["text"], where, "text"))
    messages = _messages(value, where)
    _check_order(messages, where)
    return Conversation(row_id, where, messages, _tools(value, where), _cut_answers(value, messages, where))


def _messages(row: dict[str, Any], where: Where) -> list[Message]:
    if "messages" in row:
        return [_message(item, where, i) for i, item in enumerate(_list(row, "messages", where))]
    if "conversations" in row:
        given = _list(row, "conversations", where)
        turns = [_sharegpt(item, where, i) for i, item in enumerate(given)]
        return [*_system(row, where), *turns] if turns[0]["role"] != "system" else turns
    if "turns" in row:
        texts = _list(row, "turns", where)
        users = [_text(text, where, f"user turn {i}") for i, text in enumerate(texts)]
        return _system(row, where) + [{"role": "user", "content": text} for text in users]
    key = next((key for key in PROMPT_FIELDS if key in row), None)
    if key is None:
        raise where.fault(
            f"keys {sorted(row)} make no row; expected one of messages, conversations, turns, prompt, input_ids, text"
        )
    prompt = _text(row[key], where, "user turn 0" if key == "prompt" else key)
    if key == "instruction" and row.get("input"):
        prompt = f"{prompt}\n\n{_text(row['input'], where, 'input')}"
    found: list[Message] = [*_system(row, where), {"role": "user", "content": prompt}]
    answer = next((name for name in RESPONSE_FIELDS[key] if name in row), None)
    if answer is not None:
        message = {"role": "assistant", "content": row[answer]}
        message |= {name: row[name] for name in REASONING_FIELDS if name in row}
        found.append(_message(message, where, len(found)))
    return found


def _system(row: dict[str, Any], where: Where) -> list[Message]:
    system = row.get("system", "")
    if not isinstance(system, str):
        raise where.fault(f"system is a {type(system).__name__}, expected a text")
    return [{"role": "system", "content": system}] if system else []


def _text(value: object, where: Where, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise where.fault(f"{name} is {_short(value)}, expected a text that is not blank")
    return _encodable(value, where, name)


def _encodable(text: str, where: Where, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise where.fault(f"{name} has half a surrogate pair at character {error.start}; repair the text") from error
    return text


def _message(item: object, where: Where, i: int) -> Message:
    if not isinstance(item, dict):
        raise where.fault(f"message {i} is a {type(item).__name__}, expected an object with role and content")
    message = {key: value for key, value in item.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise where.fault(f"message {i} has role {role!r}, expected one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        raise where.fault(f"message {i} has content in parts, which is not supported; give content as one text")
    for name in REASONING_FIELDS:
        if name in message and not isinstance(message[name], str):
            raise where.fault(f"message {i} has {name} {_short(message[name])}, expected a text")
    calls = message.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise where.fault(f"message {i} has tool_calls, but its role is {role!r}; the assistant alone calls tools")
        message["tool_calls"] = _calls(calls, where, i)
    if content is None and role == "assistant" and (calls or reasoning(message)):
        return {**message, "content": ""}
    if not isinstance(content, str):
        raise where.fault(f"message {i} has content {_short(content)}, expected a text")
    for name in ("content", *REASONING_FIELDS):
        _encodable(message.get(name, ""), where, f"message {i}, {name},")
    return message


def reasoning(message: Message) -> str:
    """What the assistant thought before it answered; empty where it did not say."""
    return next((str(message[name]) for name in REASONING_FIELDS if message.get(name)), "")


def _calls(given: object, where: Where, i: int) -> list[dict[str, Any]]:
    """Tool calls with arguments as objects, which is what chat templates write as JSON."""
    if not isinstance(given, list) or not all(isinstance(call, dict) for call in given):
        raise where.fault(f"message {i} has tool_calls {_short(given)}, expected a list of objects")
    calls = []
    for call in given:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise where.fault(f"message {i} has the tool call {_short(call)}, expected a function with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except json.JSONDecodeError as error:
                raise where.fault(f"message {i} calls {function['name']} with arguments that are no JSON") from error
        if not isinstance(arguments, dict | None):
            raise where.fault(f"message {i} calls {function['name']} with {_short(arguments)}, expected an object")
        outer = {key: value for key, value in call.items() if key != "function" and value is not None}
        whole = {**function, "arguments": arguments or {}}
        calls.append({**outer, "function": whole} if "function" in call else {"type": "function", "function": whole})
    return calls


def _tools(row: dict[str, Any], where: Where) -> list[dict[str, Any]] | None:
    tools = row.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) or None
        except json.JSONDecodeError:
            tools = row["tools"]
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise where.fault(f"tools is a {type(tools).__name__}, expected a list of JSON schemas (objects)")
    return tools


def _sharegpt(item: object, where: Where, i: int) -> Message:
    if not isinstance(item, dict):
        raise where.fault(f"turn {i} is a {type(item).__name__}, expected an object with from and value")
    speaker = str(item.get("from"))
    role = SHAREGPT_ROLES.get(speaker)
    if role is None:
        raise where.fault(f"turn {i} is from {item.get('from')!r}, expected one of {', '.join(SHAREGPT_ROLES)}")
    value = item.get("value")
    if speaker == "function_call":
        call = json_object(value)
        if call is None:
            raise where.fault(f"turn {i} calls {_short(value)}, expected a JSON object with name and arguments")
        return _message({"role": role, "tool_calls": [call]}, where, i)
    return _message({"role": role, "content": value}, where, i)


def json_object(text: object) -> dict[str, Any] | None:
    """Read a JSON object from a text; None where it is none."""
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


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
