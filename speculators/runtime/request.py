"""One request inside the engine: its tokens, its text so far, and the rules that end it."""

import time
from typing import Protocol

from torch import Tensor

from speculators.models.draft_tree import depths_of
from speculators.runtime.logits_processors import Constraints
from speculators.runtime.outputs import (
    NO_TOKEN_ALLOWED,
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpecDecodeMetrics,
)
from speculators.runtime.sampling import NoiseStreams, SamplingParams
from speculators.runtime.stats import SpecDecodeStats


class TokenDecoder(Protocol):
    """The one tokenizer method that turning ids into text needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str | list[str]:
        """Text of the ids."""
        ...


class IncrementalText:
    """Text of a growing id list, without decoding all of it again for every token.

    A window of ids is decoded twice, with and without the new ones; text that ends in an incomplete character waits.
    """

    def __init__(self, tokenizer: TokenDecoder, *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._context, self._read = 0, 0

    def push(self, token_id: int) -> str:
        """Add one id and return the text that became certain."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._context : self._read])
        window = self._decode(self._ids[self._context :])
        if len(window) <= len(known) or window.endswith("\ufffd"):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return window[len(known) :]

    def flush(self) -> str:
        """Text still waiting for a character to complete."""
        known = self._decode(self._ids[self._context : self._read])
        window = self._decode(self._ids[self._context :])
        self._context = self._read = len(self._ids)
        return window[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip))


class Request:
    """Tokens and state of one request while it is scheduled.

    `num_computed` counts the tokens whose keys are in the verifier's cache; the last token is always still to be
    computed. `num_observed` counts those of them that the proposer knows of, too, and `num_cached` those that were
    copied from another request. `seed` is what its noise is made of. `drafts` are verifier ids waiting to be verified,
    `draft_probs_KD` their probabilities over draft ids; where they are a tree, `draft_parents` has the draft that each
    continues, -1 for the last token.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        eos_token_ids: frozenset[int],
        max_length: int,
        stats: SpecDecodeStats | None,
        tokenizer: TokenDecoder | None = None,
        prompt: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt, self.prompt_token_ids = prompt, prompt_token_ids
        self.params = params
        self.tokens = list(prompt_token_ids)
        self.num_computed = self.num_observed = self.num_cached = 0
        self.drafts: list[int] = []
        self.draft_probs_KD: Tensor | None = None
        self.draft_parents: list[int] = []
        self.seed = 0
        self.noise: NoiseStreams | None = None
        self.constraints: Constraints | None = None
        self.stats = stats
        self.metrics = RequestMetrics(time.monotonic())
        self.accepted: list[bool] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.hidden_states_path: str | None = None
        self.error: str | None = None
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._eos_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._max_length = max_length
        self._text = ""
        skip = params.skip_special_tokens
        self._decoder = None if tokenizer is None else IncrementalText(tokenizer, skip_special_tokens=skip)

    @property
    def output_token_ids(self) -> list[int]:
        """Ids generated so far."""
        return self.tokens[len(self.prompt_token_ids) :]

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None

    @property
    def room(self) -> int:
        """How many drafts may follow the next token without passing the length limit."""
        return max(0, self._max_length - len(self.tokens) - 1)

    @property
    def draft_depth(self) -> int:
        """How many drafts may be accepted at once: all of a chain, those on the longest path of a tree."""
        return max(depths_of(self.draft_parents)) if self.draft_parents else len(self.drafts)

    def append(self, token_ids: list[int], logprobs: list[dict[int, Logprob]] | None) -> None:
        """Take over verified tokens one by one; whatever follows the one that ends the request is dropped.

        All but the last of `token_ids` were drafts.
        """
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()
        dead_ends = {} if self.constraints is None else self.constraints.exhausted
        for place, token in enumerate(token_ids):
            if dead_ends and tuple(token_ids[:place]) in dead_ends:
                self.error = f"request {self.request_id}: {dead_ends[tuple(token_ids[:place])]}"
                self._finish("error", NO_TOKEN_ALLOWED)
                break
            self.tokens.append(token)
            self.accepted.append(place < len(token_ids) - 1)
            if self.logprobs is not None and logprobs is not None:
                self.logprobs.append(logprobs[place])
            self._end_if_due(token)
            if self.finished:
                break

    def abort(self) -> None:
        """End the request on its client's wish."""
        self._finish("abort", None)

    def fail(self, error: str) -> None:
        """End the request because its files cannot be written."""
        self.error = error
        self._finish("error", None)

    def output(self, *, detailed: bool = False, with_spec_metrics: bool = True) -> RequestOutput:
        """The request as its client sees it now."""
        chosen = None
        if self.logprobs is not None:
            pairs = zip(self.logprobs, self.output_token_ids, strict=True)
            chosen = sum(entry[token].logprob for entry, token in pairs)
        spec = SpecDecodeMetrics(self.stats, detailed) if self.stats is not None and with_spec_metrics else None
        completion = CompletionOutput(
            0,
            self._text,
            self.output_token_ids,
            chosen,
            self.logprobs,
            self.finish_reason,
            self.stop_reason,
            spec,
            list(self.accepted),
        )
        path = self.hidden_states_path
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [completion],
            self.finished,
            self.metrics,
            None if path is None else {"hidden_states_path": path},
            self.error,
            self.prompt_logprobs,
            self.num_cached,
        )

    def _end_if_due(self, token: int) -> None:
        ends = token in self._eos_ids or token in self._stop_ids
        if self._decoder is not None and not (ends and self.params.skip_special_tokens):
            start = len(self._text)
            self._text += self._decoder.push(token)
            # A stop string counts from the first token on that could end the request.
            if self._num_generated > self.params.min_tokens and self._cut_at_stop_string(start):
                return
        if ends:
            self._finish("stop", token if token in self._stop_ids else None)
        elif self._is_full():
            self._finish("length", None)

    @property
    def _num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt_token_ids)

    def _is_full(self) -> bool:
        limit = self.params.max_tokens
        return (limit is not None and self._num_generated >= limit) or len(self.tokens) >= self._max_length

    def _cut_at_stop_string(self, start: int) -> bool:
        for stop in self.params.stop_strings:
            found = self._text.find(stop, max(0, start - len(stop) + 1))
            if found >= 0:
                end = found + len(stop) if self.params.include_stop_str_in_output else found
                self._text = self._text[:end]
                self._finish("stop", stop, flush=False)
                return True
        return False

    def _finish(self, reason: str, stop: int | str | None, *, flush: bool = True) -> None:
        self.finish_reason, self.stop_reason = reason, stop
        self.metrics.finished_time = time.monotonic()
        if flush and self._decoder is not None:
            self._text += self._decoder.flush()
