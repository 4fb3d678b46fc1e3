"""Text of a running request, as soon as it is certain: for a client that reads along, and for a terminal."""

import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from speculators.errors import RequestError
from speculators.runtime.llm import LLM, Prompt
from speculators.runtime.outputs import CompletionOutput, RequestOutput
from speculators.runtime.request import IncrementalText
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.stats import SpecDecodeStats


def length_held_back(text: str, stop_strings: Sequence[str]) -> int:
    """Length of the longest end of `text` that could still become one of the stop strings."""
    longest = max((len(stop) - 1 for stop in stop_strings), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stop_strings):
            return length
    return 0


class VisibleText:
    """How much of a growing text may be shown: all but an end that a stop string may yet remove."""

    def __init__(self, params: SamplingParams) -> None:
        self._stop_strings = [] if params.include_stop_str_in_output else params.stop_strings
        self.shown = 0

    def end(self, completion: CompletionOutput) -> int:
        """Characters of the completion's text that will not change any more."""
        if completion.finish_reason is not None:
            return len(completion.text)
        return len(completion.text) - length_held_back(completion.text, self._stop_strings)

    def advance(self, completion: CompletionOutput) -> str:
        """The text that became visible since the last call."""
        start, self.shown = self.shown, max(self.shown, self.end(completion))
        return completion.text[start : self.shown]


@dataclass(frozen=True)
class Piece:
    """Text of one token, or a part of it; `accepted` where the token was a draft that the verifier kept."""

    text: str
    accepted: bool


class TextStream:
    """Generates one completion piece by piece; the pieces joined are the completion's text.

    `prompt` is what `LLM.generate` takes (for a conversation, `{"prompt_token_ids": llm.chat_token_ids(messages)}`).
    Raises RequestError for parameters that ask for several completions. `output` is the newest state; a stream that is
    left early ends its request.
    """

    def __init__(self, llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
        if params.n != 1:
            raise RequestError(f"sampling parameter n={params.n}: a text stream shows one completion; leave it at 1")
        if llm.get_tokenizer() is None:
            raise RequestError("the verifier has no tokenizer, so its tokens have no text to stream")
        self._llm, self._params = llm, params
        self._prompt, self._prompt_token_ids = llm.prompt_ids(prompt)
        self._visible = VisibleText(params)
        self._num_read = 0
        self._waiting: deque[Piece] = deque()
        self.output: RequestOutput | None = None

    def __iter__(self) -> Iterator[Piece]:
        engine, name = self._llm.engine, f"stream-{uuid.uuid4().hex}"
        decoder = IncrementalText(self._llm.get_tokenizer(), skip_special_tokens=self._params.skip_special_tokens)
        engine.add_request(name, self._prompt_token_ids, self._params, prompt=self._prompt)
        try:
            while self.output is None or not self.output.finished:
                for output in engine.step():
                    if output.request_id == name:
                        self.output = output
                        yield from self._pieces(output.outputs[0], decoder)
        finally:
            engine.abort(name)

    def statistics(self) -> str:
        """One line about the finished completion: tokens, seconds, speed, and how the drafts fared."""
        if self.output is None or self.output.metrics is None:
            return "nothing was generated"
        moments, completion = self.output.metrics, self.output.outputs[0]
        count = len(completion.token_ids)
        line = f"{count} tokens"
        if moments.finished_time is not None:
            seconds = moments.finished_time - moments.arrival_time
            line += f" in {seconds:.2f} s ({count / seconds:.1f} tokens/s)"
        spec = completion.spec_decode_metrics
        return line if spec is None else f"{line}; {describe_acceptance(spec.stats)}"

    def _pieces(self, completion: CompletionOutput, decoder: IncrementalText) -> Iterator[Piece]:
        new = zip(completion.token_ids[self._num_read :], completion.accepted[self._num_read :], strict=True)
        self._waiting.extend(Piece(decoder.push(token), accepted) for token, accepted in new)
        self._num_read = len(completion.token_ids)
        left = self._visible.advance(completion)
        while left and self._waiting:
            piece = self._waiting.popleft()
            if len(piece.text) > len(left):
                self._waiting.appendleft(Piece(piece.text[len(left) :], piece.accepted))
                piece = Piece(left, piece.accepted)
            left = left[len(piece.text) :]
            if piece.text:
                yield piece
        if left:
            yield Piece(left, completion.accepted[-1])


def describe_acceptance(stats: SpecDecodeStats) -> str:
    """The counts of speculative decoding as a phrase."""
    if stats.num_drafts == 0:
        return "nothing was drafted"
    rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_position)
    return (
        f"acceptance length {stats.acceptance_length:.2f}: {stats.num_accepted_tokens} of {stats.num_draft_tokens} "
        f"drafts accepted in {stats.num_drafts} steps, per position {rates}"
    )
