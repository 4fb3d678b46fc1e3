"""From logits to probabilities, as a request's sampling parameters ask, and the noise that draws from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from speculators.errors import RequestError
from speculators.runtime.structured_outputs import StructuredOutputsParams

# Options that vLLM's SamplingParams knows and whose neutral value alone is true of this engine, with what to do.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "detokenize": ((True,), "the text is made from the tokens in any case"),
    "logits_processors": (
        (None, []),
        "a function of a request's own does not know of draft windows; use logit_bias, bad_words or structured_outputs",
    ),
    "truncate_prompt_tokens": ((None,), "shorten the prompt before giving it"),
    "guided_decoding": ((None,), "its name is structured_outputs, a StructuredOutputsParams"),
}
# What `extra_args["kv_transfer_params"]` may hold.
TRANSFER_PARAMS = ("hidden_states_path", "include_output_tokens")


@dataclass
class SamplingParams:
    """How tokens of a request are chosen and when it ends; names and meaning are vLLM's.

    temperature 0 is greedy; top_k 0 or -1 and top_p 1 keep everything; min_p keeps tokens of at least min_p times the
    likeliest one's probability. logprobs N returns the log-probabilities of the N likeliest tokens and of the chosen
    one, from the unprocessed logits (of structured_outputs: from those that the grammar allows), prompt_logprobs N
    those of the prompt's tokens. The penalties, logit_bias,
    allowed_token_ids, bad_words, min_tokens (no end of sequence, stop id or stop string before so many) and
    structured_outputs (StructuredOutputsParams or a dict of their fields) change the logits before temperature does, of
    greedy requests too. extra_args may hold `kv_transfer_params`, a dict with `hidden_states_path` (str) and
    `include_output_tokens` (bool), for an engine that extracts hidden states. Raises RequestError naming the parameter,
    what was got and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    logits_processors: list[Any] | None = None
    truncate_prompt_tokens: int | None = None
    guided_decoding: Any = None
    extra_args: dict[str, Any] | None = None
    stop_strings: list[str] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        self.stop_strings = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self._check("n", _whole(self.n) and self.n >= 1, "a whole number of at least 1")
        self._check("temperature", _finite(self.temperature) and self.temperature >= 0, "a number of at least 0")
        self._check("top_p", _finite(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]")
        self._check("top_k", _whole(self.top_k) and self.top_k >= -1, "-1 or 0 (all) or a whole number of at least 1")
        self._check("min_p", _finite(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]")
        self._check(
            "seed",
            self.seed is None or (_whole(self.seed) and -(2**63) <= self.seed < 2**63),
            "a whole number of at most 64 bits or None",
        )
        self._check(
            "max_tokens",
            self.max_tokens is None or (_whole(self.max_tokens) and self.max_tokens >= 1),
            "None or a whole number of at least 1",
        )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            self._check(name, count is None or (_whole(count) and 0 <= count <= 20), "None or a whole number in 0..20")
        self._check("stop", all(isinstance(text, str) and text for text in self.stop_strings), "non-empty strings")
        self._check(
            "stop_token_ids", all(_whole(token) and token >= 0 for token in self.stop_token_ids or []), "token ids"
        )
        self._check_constraints()
        self._check_transfer_params()
        for name, (allowed, advice) in _NEUTRAL.items():
            value = getattr(self, name)
            if value not in allowed:
                raise RequestError(
                    f"sampling parameter {name}={value!r} is not supported by this runtime: {advice}; leave it at "
                    f"{allowed[0]!r}",
                    parameter=name,
                )

    @property
    def transfer_params(self) -> dict[str, Any]:
        """What is asked of hidden-states extraction; empty where nothing is."""
        return (self.extra_args or {}).get("kv_transfer_params") or {}

    def _check_constraints(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            self._check(name, _finite(value) and -2 <= value <= 2, "a number in [-2, 2]")
        repetition = self.repetition_penalty
        self._check("repetition_penalty", _finite(repetition) and repetition > 0, "a number above 0 (1 is neutral)")
        self._check("min_tokens", _whole(self.min_tokens) and self.min_tokens >= 0, "a whole number of at least 0")
        if self.max_tokens is not None:
            self._check("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens={self.max_tokens}")
        self._check(
            "logit_bias",
            self.logit_bias is None
            or (
                isinstance(self.logit_bias, Mapping)
                and all(_token_id(token) for token in self.logit_bias)
                and all(_finite(bias) and -100 <= bias <= 100 for bias in self.logit_bias.values())
            ),
            "a dict from token ids to numbers in [-100, 100]",
        )
        allowed = self.allowed_token_ids
        self._check(
            "allowed_token_ids",
            allowed is None or (isinstance(allowed, list | tuple) and bool(allowed) and all(map(_token_id, allowed))),
            "None or a list of token ids that is not empty",
        )
        words = self.bad_words
        self._check(
            "bad_words",
            words is None
            or (isinstance(words, list | tuple) and all(isinstance(word, str) and word.strip() for word in words)),
            "a list of texts, none blank",
        )
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)

    def _check_transfer_params(self) -> None:
        args = self.extra_args or {}
        given = args.get("kv_transfer_params") if isinstance(args, dict) else args
        fine = isinstance(args, dict) and set(args) <= {"kv_transfer_params"}
        self._check("extra_args", fine and (given is None or isinstance(given, dict)), "{'kv_transfer_params': {...}}")
        for name, value in self.transfer_params.items():
            if name not in TRANSFER_PARAMS:
                raise RequestError(f"kv_transfer_params: unknown key {name!r}; known: {', '.join(TRANSFER_PARAMS)}")
            kind = str if name == "hidden_states_path" else bool
            if value is not None and not isinstance(value, kind):
                raise RequestError(f"kv_transfer_params: {name}={value!r}: expected {kind.__name__} or None")

    def choices(self) -> list["SamplingParams"]:
        """Parameters of each of the `n` completions; a seed counts up, so that they differ."""
        seeds = [None if self.seed is None else self.seed + choice for choice in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken at each position."""
        return self.temperature < 1e-5

    def _check(self, name: str, fine: bool, expected: str) -> None:
        if not fine:
            raise RequestError(
                f"sampling parameter {name}={getattr(self, name)!r}: expected {expected}", parameter=name
            )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(float(value)) < float("inf")


def probabilities(logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Distribution each row is sampled from, float32 [N, V]: temperature, then min_p, then top_k and top_p.

    `params` has one entry a row, none of them greedy. The order is vLLM's: min_p on the tempered distribution, top_k
    before top_p.
    """
    device = logits_NV.device
    temperature_N1 = torch.tensor([[p.temperature] for p in params], device=device)
    scaled_NV = logits_NV.float() / temperature_N1
    if any(p.min_p > 0 for p in params):
        probs_NV = scaled_NV.softmax(-1)
        floor_N1 = torch.tensor([[p.min_p] for p in params], device=device) * probs_NV.amax(-1, keepdim=True)
        scaled_NV = scaled_NV.masked_fill(probs_NV < floor_N1, float("-inf"))
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        scaled_NV = _keep_top(scaled_NV, params)
    return scaled_NV.softmax(-1)


def _keep_top(scaled_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    vocab_size, device = scaled_NV.shape[-1], scaled_NV.device
    sorted_NV, order_NV = scaled_NV.sort(dim=-1, descending=True, stable=True)
    k_N1 = torch.tensor([[min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size] for p in params], device=device)
    sorted_NV = sorted_NV.masked_fill(torch.arange(vocab_size, device=device) >= k_N1, float("-inf"))
    top_p_N1 = torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=device)
    probs_NV = sorted_NV.double().softmax(-1)
    before_NV = probs_NV.cumsum(-1) - probs_NV
    sorted_NV = sorted_NV.masked_fill((before_NV >= top_p_N1) & (top_p_N1 < 1), float("-inf"))
    return torch.empty_like(scaled_NV).scatter_(-1, order_NV, sorted_NV)


@dataclass
class NoiseStreams:
    """The three independent noise streams of one request: drafting, accepting, drawing.

    Sharing one stream biases the output towards what the draft prefers, so each is a generator of its own.
    """

    draft: torch.Generator
    accept: torch.Generator
    sample: torch.Generator

    @classmethod
    def from_seed(cls, seed: int, device: torch.device) -> "NoiseStreams":
        """Streams of a request; equal seeds give equal streams, whatever else the batch holds."""
        mixed = [int(word) for word in torch.randint(2**62, (3,), generator=torch.Generator().manual_seed(seed))]
        draft, accept, sample = (torch.Generator(device).manual_seed(word) for word in mixed)
        return cls(draft, accept, sample)


def exponential(size: int, generator: torch.Generator) -> Tensor:
    """Exp(1) noise [size], float32, on the generator's device."""
    return torch.empty(size, device=generator.device).exponential_(generator=generator)


def uniform(size: int, generator: torch.Generator) -> Tensor:
    """U[0, 1) noise [size], float64, on the generator's device."""
    return torch.rand(size, generator=generator, dtype=torch.float64, device=generator.device)
