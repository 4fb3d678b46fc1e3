"""What clients are answered: the OpenAI API's bodies, whole or as a stream of events, made of the engine's outputs."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from speculators.errors import EngineError
from speculators.runtime.engine_thread import RequestStream
from speculators.runtime.outputs import NO_TOKEN_ALLOWED, CompletionOutput, Logprob, RequestOutput
from speculators.runtime.server_protocol import GenerationRequest
from speculators.runtime.stream import VisibleText

# Likelier than nothing, and a number that JSON has.
LOWEST_LOGPROB = -9999.0


class PromptTokensDetails(BaseModel):
    """Of a prompt's tokens, those that were copied from a request that began with them."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts; a prompt of several completions counts once. Details are there where prefix caching found some."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionLogprobs(BaseModel):
    """Parallel lists over the tokens; `text_offset` counts characters of the completion."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class PromptLogprob(BaseModel):
    """Log-probability of a token of the prompt, or of one likely there; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None


# An entry a token, by ids; None for the first, which nothing lies before.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionChoice(BaseModel):
    """One completion, or a piece of it; `prompt_logprobs` is there where it was asked for."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(BaseModel):
    """Answer of /v1/completions and, with `choices` holding pieces, each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class TokenLogprob(BaseModel):
    """Log-probability of a token, and its text as UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """The chosen token's, with the likeliest ones'."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the answer's tokens."""

    content: list[ChosenLogprob]


class ChatMessage(BaseModel):
    """A message, or what a chunk adds to it."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(BaseModel):
    """One answer: whole (`message`) or a piece (`delta`)."""

    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatResponse(BaseModel):
    """Answer of /v1/chat/completions, or a chunk of a streamed one; `prompt_logprobs` where it was asked for."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    metrics: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ErrorDetail(BaseModel):
    """What is wrong: a message, the kind of error, the field at fault, and a stable code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Body of every answer that is no success."""

    error: ErrorDetail


class ModelCard(BaseModel):
    """One name that this server answers to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


@dataclass
class Part:
    """What one completion gained: its text, and the tokens from `start` on (`offset` characters lie before them).

    `about_prompt` has the field `prompt_logprobs` where the request asked for it.
    """

    index: int
    text: str
    completion: CompletionOutput
    start: int = 0
    offset: int = 0
    about_prompt: Mapping[str, PromptLogprobs] = field(default_factory=dict)

    @property
    def logprobs(self) -> list[tuple[Logprob, list[Logprob]]] | None:
        """For each of the tokens the chosen one's entry and all entries, likeliest first; None when not asked for."""
        if self.completion.logprobs is None:
            return None
        ids = self.completion.token_ids
        entries = self.completion.logprobs[self.start : len(ids)]
        return [
            (entry[token], sorted(entry.values(), key=lambda one: one.rank))
            for token, entry in zip(ids[self.start :], entries, strict=True)
        ]


class _Progress:
    """How far a streamed completion has been sent."""

    def __init__(self, index: int, visible: VisibleText) -> None:
        self._index, self._visible = index, visible
        self._start = self._offset = 0

    def advance(self, completion: CompletionOutput) -> Part | None:
        """What is new and worth sending; None where that is nothing."""
        part = Part(self._index, self._visible.advance(completion), completion, self._start, self._offset)
        if not part.text and completion.logprobs is None and completion.finish_reason is None:
            return None
        self._start = len(completion.token_ids)
        self._offset += sum(len(chosen.decoded_token or "") for chosen, _ in part.logprobs or ())
        return part


class Answer(ABC):
    """One exchange under way: its id, the name it was asked under, and how its bodies are shaped."""

    prefix: ClassVar[str]

    def __init__(self, model: str, body: GenerationRequest) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._num_choices, self._num_logprobs = body.n, body.num_logprobs or 0
        self._include_usage = body.include_usage

    @abstractmethod
    def body(self, parts: Sequence[Part], **more: Any) -> BaseModel:
        """The answer, with these completions whole."""

    @abstractmethod
    def chunk(self, parts: Sequence[Part], **more: Any) -> BaseModel:
        """An event that adds these parts."""

    def opening(self) -> list[BaseModel]:
        """Events before the first token."""
        return []

    def whole(self, outputs: Sequence[RequestOutput]) -> BaseModel:
        """The answer made of finished outputs, `num_choices` a prompt."""
        parts = [
            Part(index, one.outputs[0].text, one.outputs[0], about_prompt=_about_prompt(one))
            for index, one in enumerate(outputs)
        ]
        return self.body(parts, usage=self._usage(outputs), metrics=draft_metrics(outputs), **transferred(outputs[0]))

    async def events(self, stream: RequestStream) -> AsyncIterator[str]:
        """The answer as server-sent events, ending with [DONE]; an engine's failure is an event too."""
        names = [request.request_id for request in stream.requests]
        progress = {
            request.request_id: _Progress(index, VisibleText(request.params))
            for index, request in enumerate(stream.requests)
        }
        newest: dict[str, RequestOutput] = {}
        rest: dict[str, Any] = {"usage": None} if self._include_usage else {}
        for chunk in self.opening():
            yield _event(chunk)
        try:
            async for outputs in stream:
                newest.update((output.request_id, output) for output in outputs)
                for output in outputs:
                    part = progress[output.request_id].advance(output.outputs[0])
                    if output.error is not None:
                        yield _event(failure_body(output))
                    elif part is not None:
                        yield _event(self.chunk([part], **rest, **transferred(output)))
        except EngineError as error:
            yield _event(error_body(str(error), kind="server_error", code="engine_failed"))
        else:
            if self._include_usage:
                last = [newest[name] for name in names]
                yield _event(self.chunk([], usage=self._usage(last), metrics=draft_metrics(last)))
        yield "data: [DONE]\n\n"

    def _usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        prompt = sum(len(output.prompt_token_ids) for output in outputs[:: self._num_choices])
        completion = sum(len(output.outputs[0].token_ids) for output in outputs)
        cached = sum(output.num_cached_tokens for output in outputs[:: self._num_choices])
        details = {"prompt_tokens_details": PromptTokensDetails(cached_tokens=cached)} if cached else {}
        return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion, **details)


class CompletionAnswer(Answer):
    """Bodies of /v1/completions."""

    prefix = "cmpl"

    def body(self, parts: Sequence[Part], **more: Any) -> CompletionResponse:
        """A whole answer; a chunk has the same shape."""
        return CompletionResponse(
            id=self.id, object="text_completion", created=self._created, model=self._model,
            choices=[self._choice(part) for part in parts], **more,
        )  # fmt: skip

    chunk = body

    def _choice(self, part: Part) -> CompletionChoice:
        return CompletionChoice(
            index=part.index, text=part.text, logprobs=self._logprobs(part),
            finish_reason=part.completion.finish_reason, stop_reason=part.completion.stop_reason, **part.about_prompt,
        )  # fmt: skip

    def _logprobs(self, part: Part) -> CompletionLogprobs | None:
        if part.logprobs is None:
            return None
        tokens = [chosen.decoded_token or "" for chosen, _ in part.logprobs]
        offsets = [part.offset + sum(map(len, tokens[:place])) for place in range(len(tokens))]
        tops = []
        for chosen, entries in part.logprobs:
            top: dict[str, float] = {}
            for one in (*entries[: self._num_logprobs], chosen):
                top.setdefault(one.decoded_token or "", _number(one))
            tops.append(top)
        chosen_values = [_number(chosen) for chosen, _ in part.logprobs]
        return CompletionLogprobs(text_offset=offsets, token_logprobs=chosen_values, tokens=tokens, top_logprobs=tops)


class ChatAnswer(Answer):
    """Bodies of /v1/chat/completions."""

    prefix = "chatcmpl"

    def body(self, parts: Sequence[Part], **more: Any) -> ChatResponse:
        """A whole answer."""
        choices = [self._choice(part, message=ChatMessage(role="assistant", content=part.text)) for part in parts]
        return self._response("chat.completion", choices, {**parts[0].about_prompt, **more})

    def chunk(self, parts: Sequence[Part], **more: Any) -> ChatResponse:
        """An event that adds text."""
        choices = [self._choice(part, delta=ChatMessage(content=part.text)) for part in parts]
        return self._response("chat.completion.chunk", choices, more)

    def opening(self) -> list[BaseModel]:
        """An event for each completion that says whose turn it is."""
        more = {"usage": None} if self._include_usage else {}
        start = ChatMessage(role="assistant", content="")
        choices = [
            ChatChoice(index=index, delta=start, logprobs=None, finish_reason=None, stop_reason=None)
            for index in range(self._num_choices)
        ]
        return [self._response("chat.completion.chunk", [choice], more) for choice in choices]

    def _response(
        self, kind: Literal["chat.completion", "chat.completion.chunk"], choices: list[ChatChoice], more: dict[str, Any]
    ) -> ChatResponse:
        return ChatResponse(
            id=self.id, object=kind, created=self._created, model=self._model, choices=choices, **more
        )  # fmt: skip

    def _choice(self, part: Part, **text: ChatMessage) -> ChatChoice:
        logprobs = None
        if part.logprobs is not None:
            logprobs = ChatLogprobs(
                content=[
                    ChosenLogprob(
                        **_token(chosen).model_dump(),
                        top_logprobs=[_token(one) for one in entries[: self._num_logprobs]],
                    )
                    for chosen, entries in part.logprobs
                ]
            )
        completion = part.completion
        return ChatChoice(
            index=part.index, logprobs=logprobs, finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason, **text,
        )  # fmt: skip


def _about_prompt(output: RequestOutput) -> dict[str, PromptLogprobs]:
    if output.prompt_logprobs is None:
        return {}
    return {
        "prompt_logprobs": [
            None
            if entries is None
            else {
                token: PromptLogprob(logprob=_number(one), rank=one.rank, decoded_token=one.decoded_token)
                for token, one in entries.items()
            }
            for entries in output.prompt_logprobs
        ]
    }


def transferred(output: RequestOutput) -> dict[str, Any]:
    """Where the hidden states of a finished request lie, for the answer that ends it."""
    return {} if output.kv_transfer_params is None else {"kv_transfer_params": output.kv_transfer_params}


def draft_metrics(outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
    """Counts of speculative decoding of a single completion; None for several, or where there are none."""
    spec = outputs[0].outputs[0].spec_decode_metrics if len(outputs) == 1 else None
    return None if spec is None else {"speculative_decoding": spec.to_dict()}


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> ErrorResponse:
    """An error in the OpenAI API's shape."""
    return ErrorResponse(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def failure_body(output: RequestOutput) -> ErrorResponse:
    """Why a request has an error: its own constraints left it no token, or its hidden states are lost."""
    if output.outputs[0].stop_reason == NO_TOKEN_ALLOWED:
        return error_body(output.error or "", kind="invalid_request_error", code=NO_TOKEN_ALLOWED)
    return error_body(output.error or "", kind="server_error", code="hidden_states_lost")


def _token(entry: Logprob) -> TokenLogprob:
    text = entry.decoded_token or ""
    return TokenLogprob(token=text, logprob=_number(entry), bytes=list(text.encode("utf-8")))


def _number(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST_LOGPROB)


def _event(chunk: BaseModel) -> str:
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
