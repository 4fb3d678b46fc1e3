"""What a request answers with; classes and fields carry vLLM's names."""

from dataclasses import dataclass, field
from typing import Any

from speculators.runtime.stats import SpecDecodeStats

# Stop reason of a completion that ended because its constraints came to forbid every token.
NO_TOKEN_ALLOWED = "no_token_allowed"


@dataclass
class Logprob:
    """Log-probability of one token from the unprocessed logits, its rank (1 = likeliest) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class SpecDecodeMetrics:
    """Counts of one request; `to_dict()` gives vLLM's fields at the level asked for."""

    stats: SpecDecodeStats
    detailed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The per-request fields as plain numbers and lists."""
        return self.stats.to_dict(detailed=self.detailed)


@dataclass
class CompletionOutput:
    """One completion: text, token ids, and why it ended ("stop", "length", "abort", "error" or None while
    running).

    `accepted` is true where a token was a draft that the verifier kept.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None
    accepted: list[bool] = field(default_factory=list)


@dataclass
class RequestMetrics:
    """Moments of a request, seconds of a monotonic clock; None until they happen."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class RequestOutput:
    """State of one request: its prompt and completions, and whether it is finished.

    `kv_transfer_params` holds `hidden_states_path` where states were extracted; `error` says why completions ended with
    finish reason "error": their files could not be written, or (stop reason NO_TOKEN_ALLOWED) their constraints left no
    token to choose. `prompt_logprobs` has an entry for each prompt token, None for the first, where that was asked for.
    `num_cached_tokens` prompt tokens were not computed, but copied from a request that began with them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
