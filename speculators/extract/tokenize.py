"""Conversations to token ids and loss masks, through the verifier's own chat template.

What the verifier wrote is true in the mask: the text of each assistant turn and the token that ends it, not the header
before it and not the line break that a template puts after it. Where the template marks its answers itself
(`{% generation %}`), its marks are used. Otherwise the span of a turn is the difference of two renders: the messages
before it with the generation prompt, and the messages up to it; both must begin the render of the whole conversation,
so that a draft is trained on the very text that it is served with.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from speculators.errors import VerifierError
from speculators.extract.conversations import Conversation, Message, Where

Turns = Literal["all", "last"]
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTokenizer:
    """A verifier's tokenizer with its chat template.

    `template_options` are passed to the template by name (for instance `enable_thinking=False`). `turns` says whether
    all answers of a conversation are learnt, or the last one only. Raises VerifierError for a tokenizer without a chat
    template and for one that cannot tell where in the text its tokens lie.
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
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}

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
        """Token ids of a conversation and, per token, whether the verifier wrote it.

        Raises DataError, naming the row, where the template refuses it, ignores its tools, or renders the beginning of
        the conversation otherwise than the whole.
        """
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        template = self.tokenizer.get_chat_template(tools=conversation.tools)
        if answers and GENERATION_TAG.search(template):
            ids, spans = self._spans_by_tags(conversation, len(answers))
        else:
            ids, spans = self._spans_by_renders(conversation, answers)
        if self.turns == "last":
            spans, answers = spans[-1:], answers[-1:]
        mask = [False] * len(ids)
        for answer, (start, end) in zip(answers, spans, strict=True):
            while answer in conversation.cut_answers and end > start and ids[end - 1] in self.special_ids:
                end -= 1
            mask[start:end] = [True] * (end - start)
        return ids, mask

    def _spans_by_tags(self, row: Conversation, num_answers: int) -> tuple[list[int], list[tuple[int, int]]]:
        self._check_tools(row)
        encoded = self._apply(
            row.messages, row.tools, row.where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        edges = [0, *mask, 0]
        starts = [i for i in range(len(mask)) if edges[i + 1] and not edges[i]]
        ends = [i + 1 for i in range(len(mask)) if edges[i + 1] and not edges[i + 2]]
        if len(starts) != num_answers:
            raise row.where.fault(
                f"the template's {{% generation %}} marks show {len(starts)} spans for {num_answers} assistant "
                "messages; expected one each"
            )
        return ids, list(zip(starts, ends, strict=True))

    def _spans_by_renders(self, row: Conversation, answers: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        self._check_tools(row)
        wanted = answers[-1:] if self.turns == "last" else answers
        text = self._render(row.messages, row.tools, row.where)
        spans = [self._text_span(row, text, answer) for answer in wanted]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = encoded["input_ids"]
        starts, ends = _monotone(encoded["offset_mapping"])
        found = []
        for start, end in spans:
            first = bisect_left(starts, start)
            after = max(first, bisect_right(ends, end))
            found.append((first, self._without_line_break(ids, first, after)))
        return ids, found

    def _text_span(self, row: Conversation, text: str, answer: int) -> tuple[int, int]:
        """Characters of the whole render that the verifier wrote as message `answer`."""
        before = row.messages[:answer]
        plain = self._render(before, row.tools, row.where)
        prompt = self._render(before, row.tools, row.where, add_generation_prompt=True)
        through = self._render(row.messages[: answer + 1], row.tools, row.where)
        content = row.messages[answer]["content"].strip()
        end = _common_length(through, text)
        missing = content not in text[len(prompt) : end] if content else not text.startswith(through)
        if missing or not text.startswith(prompt):
            raise row.where.fault(
                f"the chat template renders message {answer} (assistant) and what precedes it otherwise within the "
                "conversation than when it is answered, so the answer's tokens cannot be told; learn the last answer "
                'only (turns="last"), or use a template with {% generation %} marks'
            )
        if prompt != plain:
            return len(prompt), end
        # The template has no generation prompt: its header is still ahead, and nobody predicts that. It is what the
        # renders of two different answers begin with.
        one, other = (
            self._render([*before, {"role": "assistant", "content": letter}], row.tools, row.where) for letter in "AB"
        )
        header_end = _common_length(one, other)
        return (header_end if text[len(prompt) : header_end].strip() else len(prompt)), end

    def _without_line_break(self, ids: list[int], first: int, after: int) -> int:
        """End of a span without the white space that the template, not the verifier, puts after the end of turn."""
        end = after
        while (
            end > first
            and ids[end - 1] not in self.special_ids
            and not str(self.tokenizer.decode([ids[end - 1]])).strip()
        ):
            end -= 1
        return end if end > first and ids[end - 1] in self.special_ids else after

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
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise where.fault(f"the verifier's chat template refuses the row: {error}") from error


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


def _common_length(a: str, b: str) -> int:
    """Number of leading characters in which two texts agree."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _monotone(offsets: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Starts and ends of tokens; one whose white space was trimmed to nothing begins where the token before it ends."""
    starts, ends, last = [], [], 0
    for start, end in offsets:
        starts.append(min(start, last) if start == end else start)
        ends.append(end)
        last = end
    return starts, ends
