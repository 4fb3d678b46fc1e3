"""Answers by the verifier itself, so that a draft learns the text that it will have to predict.

Prompts (rows with one or several user turns; answers in them are dropped) become conversations: the verifier answers
each turn in order. The batch stays full because every row is a request of its own; a row's next turn is queued as soon
as its answer is there. A row's temperature and seed depend on its id alone, never on the order in which rows finish.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from speculators.errors import DataError, UsageError
from speculators.extract.answers_file import AnswersFile
from speculators.extract.conversations import Conversation, Message, ReadOptions, Sources, read_conversations
from speculators.extract.progress import RowProgress
from speculators.extract.tokenize import ChatTokenizer
from speculators.runtime.engine import Engine
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.sampling import SamplingParams

REPLACEMENT_CHARACTER = "\ufffd"
# What the options name themselves, and what would change how many answers there are.
_OWN_SAMPLING = frozenset({"temperature", "seed", "max_tokens", "n"})


@dataclass(frozen=True)
class RegenerateOptions:
    """How rows are answered.

    `temperatures` are (value, share) pairs: 0.0 is greedy, shares are relative. `max_new_tokens` counts per answer.
    `sampling` holds further sampling parameters by name (top_p, top_k ...), `template_options` go to the chat template.
    `skip_bad_rows` names malformed rows in the errors file instead of raising.
    """

    max_new_tokens: int = 256
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    seed: int = 0
    store_token_ids: bool = False
    limit: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    template_options: Mapping[str, Any] = field(default_factory=dict)
    skip_bad_rows: bool = False

    def __post_init__(self) -> None:
        own = sorted(_OWN_SAMPLING & self.sampling.keys())
        if own:
            raise UsageError(f"sampling holds {', '.join(own)}; temperatures, seed and max_new_tokens say that")
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
        kept = {key: value for key, value in asdict(self).items() if key not in ("limit", "skip_bad_rows")}
        # Files made before these options existed have no word of them.
        kept = {key: value for key, value in kept.items() if value or key not in ("sampling", "template_options")}
        return {"verifier": verifier, **kept, "temperatures": [list(pair) for pair in self.temperatures]}


@dataclass
class RegenerateResult:
    """Counts of one run; `resumed` rows were finished before.

    `skipped` rows leave no room for an answer, `failed` ones were refused by a server or malformed; both are named with
    a reason in the errors file, and a rerun asks for them again.
    """

    output: Path
    rows: int = 0
    resumed: int = 0
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    answer_tokens: int = 0


@dataclass
class Talk:
    """A conversation under way; `waiting` holds the user turns to come."""

    row: Conversation
    temperature: float
    seed: int
    messages: list[Message]
    waiting: deque[str]
    token_ids: list[list[int]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    num_tokens: int = 0

    @classmethod
    def begin(cls, row: Conversation, options: RegenerateOptions) -> Talk:
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

    def next_messages(self) -> list[Message]:
        """The conversation with the next user turn at its end."""
        return [*self.messages, {"role": "user", "content": self.waiting[0]}]

    def ask(self) -> None:
        """Move the next user turn from those that wait to the conversation."""
        self.messages = self.next_messages()
        self.waiting.popleft()

    def take(self, text: str, finish_reason: str, token_ids: list[int], reasoning: str | None = None) -> None:
        """Add the verifier's answer to what was asked."""
        # A cut answer may end within a character, which reads as a replacement character that nobody wrote.
        text = text.rstrip(REPLACEMENT_CHARACTER) if finish_reason == "length" else text
        more = {"reasoning_content": reasoning} if reasoning else {}
        self.messages.append({"role": "assistant", "content": text, **more})
        self.token_ids.append(token_ids)
        self.finish_reasons.append(finish_reason)

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


class Answering:
    """One run over prompts: the talks that are still to be had, and where their answers go. A context manager."""

    def __init__(
        self, prompts: Sources, output: str | Path, options: RegenerateOptions, verifier: str, progress: bool
    ) -> None:
        faults: list[DataError] = []
        order: list[str] = []
        talks: deque[Talk] = deque()
        how = ReadOptions(options.limit, on_fault=faults.append if options.skip_bad_rows else None)
        for row in read_conversations(prompts, options=how):
            try:
                talks.append(Talk.begin(row, options))
            except DataError as fault:
                if not options.skip_bad_rows:
                    raise
                faults.append(fault)
                continue
            order.append(row.row_id)
        self._file = AnswersFile(output, options.settings(verifier), order)
        self.talks = deque(talk for talk in talks if talk.row.row_id not in self._file.finished)
        self.result = RegenerateResult(self._file.path, resumed=len(order) - len(self.talks))
        self.options = options
        for one in faults:
            self._file.leave_out(None, None, str(one))
            self.result.failed.append(str(one).split(": ")[0])
        shown = progress and bool(self.talks)
        self.bar = RowProgress("regenerate", len(order), done=self.result.resumed, enabled=shown)

    def __enter__(self) -> Self:
        self._file.__enter__()
        self.bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.__exit__(*error)
        self._file.__exit__(*error)

    def advance(self, tokens: int) -> None:
        """Count an answer's tokens."""
        self.result.answer_tokens += tokens
        self.bar.advance(0, tokens)

    def finish(self, talk: Talk) -> None:
        """Write a talk whose turns are all answered."""
        self._file.append(talk.to_json(self.options.store_token_ids))
        self.result.rows += 1
        self.bar.advance(1)

    def skip(self, talk: Talk, why: str) -> None:
        """Leave out a talk that has no room for an answer."""
        self._leave_out(talk, why, self.result.skipped)

    def fail(self, talk: Talk, why: str) -> None:
        """Leave out a talk that went wrong."""
        self._leave_out(talk, why, self.result.failed)

    def _leave_out(self, talk: Talk, why: str, names: list[str]) -> None:
        names.append(talk.row.row_id)
        self._file.leave_out(talk.row.row_id, talk.row.where, why)
        self.bar.advance(1)


def regenerate_rows(
    engine: Engine,
    prompts: Sources,
    output: str | Path,
    options: RegenerateOptions | None = None,
    *,
    progress: bool = True,
) -> RegenerateResult:
    """Answer every row of the prompts and write one JSON line per finished conversation to `output`.

    A line holds id, messages, temperature, seed and finish_reasons ("stop" or "length", one per answer), and token_ids
    of the answers on request. Lines are flushed as rows finish, and put in the order of the prompts at the end. A rerun
    drops a torn last line, keeps finished rows and goes on. Rows left out are named in `<output>.errors.jsonl`. Raises
    DataError for bad rows and for an output made with other settings, and UsageError for an output that is not named
    .jsonl and for sampling parameters that the engine does not know.
    """
    options = options or RegenerateOptions()
    name = engine.verifier.name_or_path
    chat = ChatTokenizer(engine.verifier.tokenizer, name=name, template_options=options.template_options)
    _params(options, 0.0, 0)
    with Answering(prompts, output, options, Path(name).name, progress) as run:
        _EngineRun(engine, chat, run).answer()
    return run.result


def _params(options: RegenerateOptions, temperature: float, seed: int) -> SamplingParams:
    try:
        return SamplingParams(temperature=temperature, max_tokens=options.max_new_tokens, seed=seed, **options.sampling)
    except TypeError as error:
        raise UsageError(
            f"sampling holds {sorted(options.sampling)}, which the engine does not know: {error}"
        ) from error


@dataclass
class _EngineRun:
    engine: Engine
    chat: ChatTokenizer
    run: Answering

    def answer(self) -> None:
        """Keep the engine supplied until every talk is written."""
        talks = self.run.talks
        active: dict[str, Talk] = {}
        try:
            while talks or active:
                # More than fit at once, so that a slot that comes free is taken within the same round.
                while talks and len(active) < 2 * self.engine.limits.max_num_seqs:
                    talk = talks.popleft()
                    if self._ask(talk):
                        active[talk.row.row_id] = talk
                    else:
                        self.run.skip(talk, f"no room for an answer within {self.engine.limits.max_model_len} tokens")
                for answer in self.engine.step():
                    if answer.finished:
                        self._take(active, answer)
        finally:
            for request_id in active:
                self.engine.abort(request_id)

    def _ask(self, talk: Talk) -> bool:
        """Queue the next turn; False where the prompt leaves no room for a token."""
        messages = talk.next_messages()
        token_ids = self.chat.encode_prompt(messages, talk.row.where)
        if len(token_ids) >= self.engine.limits.max_model_len:
            return False
        params = _params(self.run.options, talk.temperature, talk.seed + len(talk.finish_reasons))
        talk.ask()
        self.engine.add_request(talk.row.row_id, token_ids, params)
        return True

    def _take(self, active: dict[str, Talk], answer: RequestOutput) -> None:
        talk = active.pop(answer.request_id)
        completion = answer.outputs[0]
        talk.take(completion.text, completion.finish_reason or "stop", list(completion.token_ids))
        self.run.advance(len(completion.token_ids))
        if talk.waiting and self._ask(talk):
            active[answer.request_id] = talk
        else:
            self.run.finish(talk)


def _hash(seed: int, purpose: str, row_id: str) -> int:
    digest = hashlib.sha256(f"{seed}/{purpose}/{row_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
