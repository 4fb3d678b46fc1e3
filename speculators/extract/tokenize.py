"""Conversations to token ids and loss masks, through the verifier's own chat template.

What the verifier wrote is true in the mask: the text of each assistant turn (its reasoning and tool calls with it) and
the token that ends it, not the header before it and not the line break that a template puts after it. Where the
template marks its answers itself (`{% generation %}`), its marks are used. Otherwise the span of a turn is the
difference of two renders: the messages before it with the generation prompt, and the messages up to it; both must begin
the render of the row, so that a draft is trained on the very text that it is served with. Where a template writes
earlier answers otherwise than when they were given (without their reasoning, for instance), the conversation becomes
several rows, each ending with an answer as it was given. Either way the spans are decoded and compared with the
answers.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from speculators.errors import UsageError, VerifierError
from speculators.extract.answer_text import (
    after_thought_opener,
    calls_of,
    common_length,
    is_missing,
    mismatch,
    monotone,
    thought_and_answer,
    without_empty_thought,
)
from speculators.extract.conversations import Conversation, Message, TextRow
from speculators.extract.sources import Where

Turns = Literal["all", "last"]
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Spans = list[tuple[int, int]]
# Where an answer begins within a token, because its first characters share one with the header.
_LONGEST_TOKEN = 64


class EncodedRow(NamedTuple):
    """Token ids and, per token, whether the verifier wrote it; `lost_reasoning` answers lack theirs in the render."""

    input_ids: list[int]
    loss_mask: list[bool]
    lost_reasoning: int = 0


class ChatTokenizer:
    """A verifier's tokenizer with its chat template.

    `template_options` are passed to the template by name (for instance `enable_thinking=False`). `turns` says whether
    all answers of a conversation are learnt, or the last one only. Raises VerifierError for a tokenizer without a chat
    template and for one that cannot tell where in the text its tokens lie, and UsageError for an option that the
    template does not read.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str = "verifier",
        turns: Turns = "all",
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if tokenizer is None or not tokenizer.chat_template:
            raise VerifierError(
                f"the tokenizer of {name!r} has no chat template; use an instruction-tuned verifier, put a "
                "chat_template.jinja into its folder, or give rows of input_ids and loss_mask"
            )
        if not tokenizer.is_fast:
            raise VerifierError(
                f"the tokenizer of {name!r} ({type(tokenizer).__name__}) gives no offsets; expected one with a "
                "tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.turns = turns
        self.template_options = dict(template_options or {})
        source = json.dumps(tokenizer.chat_template)
        for option in self.template_options:
            if not re.search(rf"\b{re.escape(option)}\b", source):
                raise UsageError(f"the chat template of {name!r} does not read {option!r}; leave the option out")
        self.special_ids = special_ids(tokenizer)

    @property
    def template_hash(self) -> str:
        """SHA-256 over the chat template, its options and the tokenizer: equal where rows turn into equal ids."""
        parts = {
            "template": self.tokenizer.chat_template,
            "options": self.template_options,
            "tokenizer": tokenizer_hash(self.tokenizer),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode_prompt(self, messages: Sequence[Message], where: Where) -> list[int]:
        """Token ids of messages with the header of the answer to come: what a server feeds the verifier."""
        text = self._render(messages, None, where, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation and, per token, whether the verifier wrote it, as one row.

        Raises DataError as `encode_rows` does, and where the template renders an answer otherwise within the
        conversation than when it is given, so that one row cannot hold them all.
        """
        rows = self.encode_rows(conversation)
        if len(rows) > 1:
            first = conversation.answers[0]
            raise conversation.where.fault(
                f"the chat template renders message {first} (assistant) otherwise within the conversation than when it "
                f'is answered; expected one row, not {len(rows)}: learn the last answer only (turns="last")'
            )
        return rows[0].input_ids, rows[0].loss_mask

    def encode_rows(self, conversation: Conversation) -> list[EncodedRow]:
        """Rows that hold every answer (or the last) once as learnt; more than one where the template rewrites history.

        Raises DataError, naming the row, where the template refuses it, leaves out its tools or tool calls, marks or
        renders an answer so that its tokens cannot be told, and where the tokens do not decode to the answer.
        """
        self._check_tools(conversation)
        left = conversation.answers[-1:] if self.turns == "last" else conversation.answers
        tagged = bool(GENERATION_TAG.search(self.tokenizer.get_chat_template(tools=conversation.tools)))
        rows: list[tuple[int, EncodedRow]] = []
        messages = conversation.messages
        while left or not rows:
            part = _Part(conversation, messages, left)
            ids, spans = self._tagged(part) if tagged and left else self._rendered(part)
            left = [answer for answer in left if answer not in spans]
            if spans or not left:
                row = self._row(conversation, ids, spans, 0 if tagged else _LONGEST_TOKEN)
                rows.append((min(spans, default=0), row))
            if left:
                messages = messages[: left[-1] + 1]
        return [row for _, row in sorted(rows, key=lambda pair: pair[0])]

    def _row(self, conversation: Conversation, ids: list[int], spans: dict[int, Spans], straddled: int) -> EncodedRow:
        mask = [False] * len(ids)
        lost = 0
        for answer, found in spans.items():
            message = conversation.messages[answer]
            decoded, wrong = self._read_back(message, ids, found, straddled)
            if wrong is not None:
                raise conversation.where.fault(
                    f"the tokens to learn of message {answer} (assistant) are not what it says: the span {wrong}; "
                    "expected the answer and its end; check the chat template ({% generation %} marks must not stand "
                    "within a macro)"
                )
            lost += is_missing(thought_and_answer(message)[0], decoded)
            for place, (start, end) in enumerate(found):
                last = place == len(found) - 1
                while last and answer in conversation.cut_answers and end > start and ids[end - 1] in self.special_ids:
                    end -= 1
                mask[start:end] = [True] * (end - start)
        return EncodedRow(ids, mask, lost)

    def _read_back(self, message: Message, ids: list[int], spans: Spans, straddled: int = 0) -> tuple[str, str | None]:
        """Decode an answer's spans; the text, and why it is not the answer."""
        tokens = [token for start, end in spans for token in ids[start:end]]
        decoded = "".join(str(self.tokenizer.decode(ids[start:end])) for start, end in spans)
        markup = [str(self.tokenizer.convert_ids_to_tokens(token)) for token in self.special_ids.intersection(tokens)]
        wrong = mismatch(message, decoded, markup, straddled)
        if wrong is not None:
            # A tokenizer may normalise what it reads; then it is that which its tokens decode to.
            read = self.tokenizer(message["content"], add_special_tokens=False)["input_ids"]
            wrong = mismatch({**message, "content": str(self.tokenizer.decode(read))}, decoded, markup, straddled)
        return decoded, wrong

    def _tagged(self, part: _Part) -> tuple[list[int], dict[int, Spans]]:
        """Spans by the template's marks, of the answers that read there as they were given."""
        row = part.conversation
        encoded = self._apply(
            part.messages, row.tools, row.where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        answers = [answer for answer in row.answers if answer < len(part.messages)]
        marked = runs(mask)
        numbers = [1] * len(answers) if len(marked) == len(answers) else self._marks_each(part, answers)
        if sum(numbers) != len(marked) or 0 in numbers:
            raise row.where.fault(
                f"the template's {{% generation %}} marks show {len(marked)} spans for {len(answers)} assistant "
                "messages; expected one or more for each"
            )
        spans: dict[int, Spans] = {}
        for answer, number in zip(answers, numbers, strict=True):
            found, marked = marked[:number], marked[number:]
            decoded, wrong = self._read_back(row.messages[answer], ids, found)
            as_given = part.ends_with(answer) or (
                wrong is None and not is_missing(thought_and_answer(row.messages[answer])[0], decoded)
            )
            if answer in part.wanted and as_given:
                spans[answer] = found
        return ids, spans

    def _marks_each(self, part: _Part, answers: list[int]) -> list[int]:
        """Number of marked spans of each answer, by rendering the conversation up to it."""
        row = part.conversation
        totals = [0]
        for answer in answers:
            encoded = self._apply(
                row.messages[: answer + 1],
                row.tools,
                row.where,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            totals.append(len(runs(encoded["assistant_masks"])))
        return [max(0, after - before) for before, after in pairwise(totals)]

    def _rendered(self, part: _Part) -> tuple[list[int], dict[int, Spans]]:
        """Spans by comparing renders, of the answers that stand in the text as they were given."""
        text = self._render(part.messages, part.conversation.tools, part.conversation.where)
        places = {answer: self._text_span(part, text, answer) for answer in part.wanted}
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = encoded["input_ids"]
        starts, ends = monotone(encoded["offset_mapping"])
        spans: dict[int, Spans] = {}
        for answer, place in places.items():
            if place is not None:
                first = bisect_left(starts, place[0])
                if place[3] and first and starts[first - 1] < place[0] < ends[first - 1]:
                    # " Hello" after "ASSISTANT:": the blank belongs to the word.
                    first -= not text[starts[first - 1] : place[0]].strip()
                after = max(first, bisect_right(ends, place[1]))
                calls = bool(part.conversation.messages[answer].get("tool_calls"))
                spans[answer] = [(first, self._turn_end(ids, first, after, place[2], calls))]
        return ids, spans

    def _text_span(self, part: _Part, text: str, answer: int) -> tuple[int, int, bool, bool] | None:
        """Characters of the row's render that the verifier wrote as message `answer`; None where it reads otherwise.

        The third value says whether the render of the conversation up to the answer ends there, the fourth whether the
        template has no generation prompt.
        """
        row, message = part.conversation, part.conversation.messages[answer]
        before = row.messages[:answer]
        prompt = self._render(before, row.tools, row.where, add_generation_prompt=True)
        through = self._render(row.messages[: answer + 1], row.tools, row.where)
        end = common_length(through, text)
        start: int | None = len(prompt)
        unprompted = False
        if not text.startswith(prompt):
            start = None if through.startswith(prompt) else after_thought_opener(prompt, text)
        elif prompt == self._render(before, row.tools, row.where):
            start, unprompted = self._header_end(part, prompt, answer), True
        if start is not None and self._reads_as_given(message, text[start:end], through, end == len(through)):
            return start + without_empty_thought(text[start:end], message), end, end == len(through), unprompted
        if not part.ends_with(answer):
            return None
        dropped = next((name for name in calls_of(message) if name not in through), None)
        if dropped is not None:
            raise row.where.fault(
                f"message {answer} calls the tool {dropped}, but the verifier's chat template leaves tool calls out; "
                "remove the row"
            )
        raise row.where.fault(
            f"the chat template renders message {answer} (assistant) and what precedes it otherwise within the "
            "conversation than when it is answered, so the answer's tokens cannot be told; use a template with "
            "{% generation %} marks"
        )

    @staticmethod
    def _reads_as_given(message: Message, span: str, through: str, is_whole: bool) -> bool:
        thought, answer = thought_and_answer(message)
        if is_missing(answer, span) or any(name not in span for name in calls_of(message)):
            return False
        if thought and is_missing(thought, span):
            return is_missing(thought, through)
        return is_whole or (bool(message["content"].strip()) and not message.get("tool_calls"))

    def _header_end(self, part: _Part, prompt: str, answer: int) -> int:
        """Where an answer begins under a template without a generation prompt.

        Its header is still ahead, and nobody predicts that. It is what the renders of two different answers begin with.
        """
        row = part.conversation
        one, other = (
            self._render([*row.messages[:answer], {"role": "assistant", "content": letter}], row.tools, row.where)
            for letter in "AB"
        )
        header_end = common_length(one, other)
        return header_end if one[len(prompt) : header_end].strip() else len(prompt)

    def _turn_end(self, ids: list[int], first: int, after: int, is_whole: bool, calls: bool) -> int:
        """End of a span with the token that ends the turn, and without what the template puts after that.

        A line break after it, and an end of text after the line break, nobody wrote. Where turns have no end of their
        own, it is the next header's first token that the verifier stops with.
        """
        end = self._before_white_space(ids, first, after)
        if end == first or ids[end - 1] not in self.special_ids:
            ended_by_header = is_whole and after > first and after < len(ids) and ids[after] in self.special_ids
            return after + ended_by_header
        while not calls:
            earlier = self._before_white_space(ids, first, end - 1)
            if earlier in (first, end - 1) or ids[earlier - 1] not in self.special_ids:
                break
            end = earlier
        return end

    def _before_white_space(self, ids: list[int], first: int, end: int) -> int:
        while (
            end > first
            and ids[end - 1] not in self.special_ids
            and not str(self.tokenizer.decode([ids[end - 1]])).strip()
        ):
            end -= 1
        return end

    def _check_tools(self, row: Conversation) -> None:
        if row.tools and self._render(row.messages, row.tools, row.where) == self._render(
            row.messages, None, row.where
        ):
            raise row.where.fault("the row has tools, but the verifier's chat template leaves them out; remove the row")

    def _render(
        self, messages: Sequence[Message], tools: Any, where: Where, add_generation_prompt: bool = False
    ) -> str:
        text: str = self._apply(messages, tools, where, tokenize=False, add_generation_prompt=add_generation_prompt)
        return text

    def _apply(self, messages: Sequence[Message], tools: Any, where: Where, **how: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tools=tools, **how, **self.template_options)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise where.fault(f"the verifier's chat template refuses the row: {error}") from error


class _Part(NamedTuple):
    """The messages that a row renders, and the answers that are still to be learnt."""

    conversation: Conversation
    messages: list[Message]
    wanted: list[int]

    def ends_with(self, answer: int) -> bool:
        """Whether the render ends with the answer, so that no later row can hold it better."""
        return answer == len(self.messages) - 1


def encode_text(tokenizer: PreTrainedTokenizerBase, row: TextRow) -> EncodedRow:
    """Token ids of plain text, all learnt but for the special tokens that the tokenizer puts before it.

    DataError where special tokens stand within the text: it is formatted already, and nobody can tell who wrote what.
    """
    ids: list[int] = tokenizer(row.text)["input_ids"]
    special = special_ids(tokenizer)
    inner = [token for token in tokenizer(row.text, add_special_tokens=False)["input_ids"] if token in special]
    if inner:
        raise row.where.fault(
            f"the text holds the markup {tokenizer.decode(inner[:1])!r}, so it is a formatted conversation; give its "
            "messages, or input_ids and loss_mask"
        )
    return EncodedRow(ids, [token not in special for token in ids])


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens that are markup, not text."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(tokenizer.all_special_ids) | added


def runs(mask: Sequence[object]) -> Spans:
    """Start and end of every unbroken run of true values."""
    edges = [False, *map(bool, mask), False]
    changes = [i for i in range(len(mask) + 1) if edges[i] != edges[i + 1]]
    return list(zip(changes[::2], changes[1::2], strict=True))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over the tokenizer's rules, vocabulary and added tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        text = json.loads(backend.to_str())
        # Padding and truncation are a caller's momentary settings.
        text.pop("padding", None)
        text.pop("truncation", None)
        rules = json.dumps(text, sort_keys=True)
    else:
        rules = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(rules.encode()).hexdigest()
