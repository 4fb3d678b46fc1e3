"""What clients ask over HTTP: the OpenAI API's requests, with vLLM's additional fields.

A field is honoured, or it is refused by name; one whose value asks for nothing passes. `null` means the default.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from speculators.runtime.sampling import SamplingParams
from speculators.runtime.structured_outputs import StructuredOutputsParams

# Fields that say who asks or what for, and change no answer.
LABELS = frozenset({"user", "metadata", "safety_identifier"})
# Fields that this server cannot honour: the values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "priority": (0,),
    "cache_salt": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
}
# Older names of what is asked for under another name now.
_GUIDED = ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")
RENAMED = {f"guided_{name}": f"structured_outputs={{{name!r}: ...}}" for name in _GUIDED} | {
    "guided_decoding_backend": "structured_outputs, and the backend is always llguidance"
}
NEUTRAL_COMPLETION: dict[str, tuple[object, ...]] = NEUTRAL | {"suffix": ("",), "add_special_tokens": (True,)}
NEUTRAL_CHAT: dict[str, tuple[object, ...]] = NEUTRAL | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
}


class Body(BaseModel):
    """Part of a request: strict types, and no field passes unnoticed."""

    model_config = ConfigDict(extra="forbid", strict=True)
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}
    labels: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_known(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        known = [*cls.model_fields, *cls.neutral, *cls.labels]
        for name, value in given.items():
            if name not in known:
                raise PydanticCustomError(
                    "unknown_parameter", "unknown field {quoted}; {hint}",
                    {"field": str(name), "quoted": repr(name), "hint": cls._hint(str(name), known)},
                )  # fmt: skip
            if name in cls.neutral and value is not None and not _among(value, cls.neutral[name]):
                allowed = ["null", *[repr(one) for one in cls.neutral[name]]]
                raise PydanticCustomError(
                    "unsupported_value",
                    "{field}={value} cannot be honoured by this server; leave it out or at {allowed}",
                    {"field": name, "value": repr(value)[:80], "allowed": " or ".join(allowed)},
                )  # fmt: skip
        return {name: value for name, value in given.items() if name in cls.model_fields and value is not None}

    @classmethod
    def _hint(cls, name: str, known: list[str]) -> str:
        if name in cls.renamed:
            return f"ask for {cls.renamed[name]}"
        near = difflib.get_close_matches(name, known, n=1)
        return f"did you mean {near[0]!r}?" if near else f"known fields are {', '.join(known)}"


def _among(value: object, allowed: tuple[object, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def _as_stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_bias(value: object) -> object:
    """Biases by token id; JSON has texts for keys."""
    if not isinstance(value, dict):
        return value
    wrong = next((key for key in value if not (isinstance(key, str) and key.isascii() and key.isdigit())), None)
    if wrong is not None:
        raise PydanticCustomError("invalid_value", "{key} is no token id", {"key": repr(wrong)})
    return {int(key): bias for key, bias in value.items()}


def _as_named_schema(value: object) -> object:
    """A schema with its name, as the OpenAI API wraps it; an answer obeys it strictly in any case."""
    if not isinstance(value, dict):
        return value
    known = ("name", "description", "schema", "strict")
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        text = f"unknown field {unknown!r}; known fields are {', '.join(known)}"
        raise PydanticCustomError("unknown_parameter", "{text}", {"text": text})
    if not isinstance(value.get("schema"), dict):
        raise PydanticCustomError("invalid_value", "expected a JSON schema under 'schema'")
    return value


def _as_prompts(value: object) -> object:
    """A text, texts, token ids or lists of token ids, as a list of prompts."""
    if isinstance(value, str) or _are_ids(value):
        return [value]
    if (
        isinstance(value, list)
        and value
        and (all(isinstance(item, str) for item in value) or all(_are_ids(item) for item in value))
    ):
        return value
    raise PydanticCustomError(
        "invalid_value", "expected a text, a list of texts, a list of token ids, or a list of such lists; none empty"
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _as_text(value: object) -> object:
    """The text of a message: a string, or the texts of its parts on lines of their own."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
            raise PydanticCustomError(
                "unsupported_value",
                "a content part of type {kind} cannot be honoured; give parts of type 'text', each with a text alone",
                {"kind": repr(kind)},
            )  # fmt: skip
        texts.append(part["text"])
    return "\n".join(texts)


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}
_STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
Prompts = Annotated[list[str | list[int]], BeforeValidator(_as_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
Content = Annotated[str | None, BeforeValidator(_as_text), WithJsonSchema(_CONTENT_SCHEMA)]
StopList = Annotated[
    list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_stop_list), WithJsonSchema(_STOP_SCHEMA)
]
TokenId = Annotated[int, Field(ge=0)]
LogitBias = Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_as_bias)]
JsonSchema = Annotated[dict[str, Any], BeforeValidator(_as_named_schema)]


class StreamOptions(Body):
    """Options of a streamed answer: `include_usage` asks for a last chunk with the token counts."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "continuous_usage_stats": (False,),
        "include_obfuscation": (False,),
    }

    include_usage: bool = False


class ResponseFormat(Body):
    """The form of an answer as the OpenAI API names it: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def structured_outputs(self) -> StructuredOutputsParams | None:
        """The same wish as the engine knows it; None for any text."""
        if self.type == "text":
            return None
        if self.json_schema is None:
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=self.json_schema["schema"])

    @model_validator(mode="after")
    def _schema_belongs_to_its_type(self) -> Self:
        if (self.type == "json_schema") is (self.json_schema is None):
            raise _contradiction("json_schema", "json_schema and type='json_schema' belong together; give both or none")
        return self


class GenerationRequest(Body):
    """Fields that completions and chat share."""

    labels: ClassVar[frozenset[str]] = LABELS
    renamed: ClassVar[Mapping[str, str]] = RENAMED

    model: str | None = None
    n: int = Field(default=1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 256)
    stop: StopList = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    logit_bias: LogitBias = Field(default_factory=dict)
    min_tokens: int = Field(default=0, ge=0)
    bad_words: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    allowed_token_ids: list[TokenId] | None = Field(default=None, min_length=1)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    structured_outputs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def output_limit(self) -> int | None:
        """Most tokens to generate; None for as many as fit."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens' log-probabilities to return besides the chosen one's; None for none at all."""
        return None

    def sampling_params(self) -> SamplingParams:
        """The same wishes as the engine knows them."""
        transfer = self.kv_transfer_params
        form = None if self.response_format is None else self.response_format.structured_outputs
        if self.structured_outputs is not None:
            form = StructuredOutputsParams.of(self.structured_outputs)
        return SamplingParams(
            n=self.n, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p,
            seed=self.seed, stop=self.stop, stop_token_ids=self.stop_token_ids, max_tokens=self.output_limit,
            include_stop_str_in_output=self.include_stop_str_in_output, ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs, prompt_logprobs=self.prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty, logit_bias=self.logit_bias, min_tokens=self.min_tokens,
            bad_words=self.bad_words, allowed_token_ids=self.allowed_token_ids, structured_outputs=form,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )  # fmt: skip

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _contradiction("stream_options", "stream_options needs stream=true")
        return self

    @model_validator(mode="after")
    def _prompts_are_told_of_in_whole_answers(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise _contradiction("prompt_logprobs", "prompt_logprobs are not told in a stream; leave out stream")
        return self

    @model_validator(mode="after")
    def _one_form_is_asked_for(self) -> Self:
        form = self.response_format
        if self.structured_outputs is not None and form is not None and form.type != "text":
            raise _contradiction("structured_outputs", "structured_outputs and response_format exclude each other")
        return self


def _contradiction(field: str, text: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_value", "{text}", {"field": field, "text": text})


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = NEUTRAL_COMPLETION

    prompt: Prompts
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens' log-probabilities to return; None for none at all."""
        return self.logprobs


class Message(Body):
    """One message of a conversation; what the verifier's chat template makes of a role is its own business."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "tool_calls": ([],),
        "tool_call_id": (),
        "function_call": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
        "reasoning": (),
        "reasoning_content": (),
    }

    role: str = Field(min_length=1)
    content: Content = None
    name: str | None = None


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = NEUTRAL_CHAT

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def output_limit(self) -> int | None:
        """Most tokens to generate, under either of its two names; None for as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens' log-probabilities to return; None for none at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[dict[str, str]]:
        """The messages as a chat template takes them."""
        return [
            {"role": one.role, "content": one.content or ""} | ({} if one.name is None else {"name": one.name})
            for one in self.messages
        ]

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _contradiction("top_logprobs", "top_logprobs needs logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise _contradiction("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
        return self
