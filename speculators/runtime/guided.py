"""Guided decoding: which tokens a grammar allows next, at every position of a draft window (through `llguidance`)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from speculators.errors import RequestError
from speculators.runtime.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiled grammars that are kept: a server is asked for the same few again and again.
_KEPT_GRAMMARS = 64


class GrammarState:
    """How far one request has come in its grammar.

    Where a complete output lies behind it and nothing may follow, the tokens that end a sequence are allowed, and they
    alone; a grammar that may go on allows them beside what goes on.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self._eos_token_ids = matcher, eos_token_ids

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Take over verified tokens for good; False where the grammar does not allow one of them."""
        return all(_take(self._matcher, token, self._eos_token_ids) is not None for token in token_ids)

    def masks(self, paths: Sequence[Sequence[int]]) -> list[bytes | str | None]:
        """After each path of drafts, one bit a token: whether it is allowed (the lowest bit first).

        None after a path that the grammar does not allow, where no token is ever drawn; a text after one where the
        library gave up, for the reason that it tells. The state stays as it was.
        """
        walk = _Walk(self._matcher.deep_copy(), self._eos_token_ids)
        masks: list[bytes | str | None] = []
        for path in paths:
            mask = walk.to(path)
            masks.append(mask if walk.error is None else walk.error)
            if walk.error is not None:
                walk = _Walk(self._matcher.deep_copy(), self._eos_token_ids)
        return masks


class _Walk:
    """A copy of a grammar's state that goes from one path of drafts to the next; what both begin with is kept."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._matcher, self._eos_token_ids = matcher, eos_token_ids
        self._entered: list[tuple[int, int]] = []

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further (it passes the library's limits); None while it can."""
        return (self._matcher.get_error() or "unknown") if self._matcher.is_error() else None

    def to(self, path: Sequence[int]) -> bytes | None:
        """The mask after a path; None where the grammar does not allow it."""
        shared = 0
        while shared < min(len(self._entered), len(path)) and self._entered[shared][0] == path[shared]:
            shared += 1
        back = sum(moved for _, moved in self._entered[shared:])
        del self._entered[shared:]
        if back:
            self._matcher.rollback(back)
        for token in path[shared:]:
            moved = _take(self._matcher, token, self._eos_token_ids)
            if moved is None:
                return None
            self._entered.append((token, moved))
        return self._matcher.compute_bitmask()


def _take(matcher: LLMatcher, token: int, eos_token_ids: frozenset[int]) -> int | None:
    """Go on by a token; returns by how many the matcher moved, None where the token is not allowed."""
    if matcher.is_stopped():
        return 0 if token in eos_token_ids else None
    return 1 if matcher.try_consume_tokens([token]) == 1 else None


class GrammarCompiler:
    """Makes grammars for one tokenizer; `vocab_size` counts the rows of the verifier's logits.

    RequestError where `llguidance` is not installed, where there is no fast tokenizer or nothing ends a sequence, and
    for a schema, regular expression or grammar that is wrong.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def start(self, wanted: StructuredOutputsParams) -> GrammarState:
        """The state before the first output token."""
        vocabulary = self._prepared()
        source = _source(wanted)
        if source not in self._compiled:
            self._compiled[source] = _compile(source, wanted, vocabulary)
            while len(self._compiled) > _KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return GrammarState(self._compiled[source].deep_copy(), self._eos_token_ids)

    def _prepared(self) -> LLTokenizer:
        if self._vocabulary is not None:
            return self._vocabulary
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise _refused(
                "guided decoding needs the package llguidance, which is not installed; "
                "install it with: pip install 'speculators[guided]'"
            ) from error
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            kind = "none" if self._tokenizer is None else type(self._tokenizer).__name__
            raise _refused(f"guided decoding needs a fast tokenizer, and the verifier's is {kind}")
        ends = sorted(token for token in self._eos_token_ids if token < self._vocab_size)
        if not ends:
            raise _refused("guided decoding needs a token that ends a sequence, and the verifier has none")
        self._vocabulary = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=ends)
        return self._vocabulary


def allowed_tokens(masks: Sequence[bytes], vocab_size: int, device: torch.device) -> Tensor:
    """Bit masks as bool [len(masks), vocab_size] on `device`."""
    bytes_NW = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).view(len(masks), -1).to(device)
    places_8 = torch.arange(8, dtype=torch.uint8, device=device)
    return ((bytes_NW[:, :, None] >> places_8) & 1).bool().flatten(1)[:, :vocab_size]


def _source(wanted: StructuredOutputsParams) -> str:
    """The grammar in the library's own language."""
    from llguidance import LLMatcher, grammar_from

    if wanted.kind in ("json", "json_object"):
        return LLMatcher.grammar_from_json_schema(
            wanted.schema,
            defaults={
                "whitespace_flexible": not wanted.disable_any_whitespace,
                "whitespace_pattern": wanted.whitespace_pattern,
            },
        )
    if wanted.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in wanted.choice or []))
    if wanted.kind == "regex":
        return LLMatcher.grammar_from_regex(wanted.regex or "")
    try:
        return grammar_from("grammar", wanted.grammar or "")
    except ValueError as error:
        raise _refused(f"grammar is wrong: {error}") from error


def _compile(source: str, wanted: StructuredOutputsParams, vocabulary: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher

    wrong, messages = LLMatcher.validate_grammar_with_warnings(source, vocabulary)
    if wrong:
        raise _refused(f"{wanted.kind} is wrong: {' '.join(messages).strip()}")
    return LLMatcher(vocabulary, source, log_level=0)


def _refused(text: str) -> RequestError:
    return RequestError(f"structured_outputs: {text}", parameter="structured_outputs")
