"""Counters for Prometheus and the periodic log line, under vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from speculators.runtime.engine import Engine
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.stats import SpecDecodeStats

LOG_INTERVAL_SECONDS = 10.0
FINISHED_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True)
class DraftCounts:
    """Counts of speculative decoding at one moment."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @classmethod
    def of(cls, stats: SpecDecodeStats) -> "DraftCounts":
        """What `stats` counts now."""
        return cls(
            stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens, tuple(stats.accepted_per_position)
        )

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """What was counted after `before`."""
        earlier = before.accepted_per_position or (0,) * len(self.accepted_per_position)
        return DraftCounts(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_per_position, earlier, strict=True)),
        )

    def log_line(self, seconds: float) -> str:
        """vLLM's line about `seconds` in which at least one draft was verified."""
        rates = ", ".join(f"{count / self.num_drafts:.3f}" for count in self.accepted_per_position)
        return (
            f"SpecDecoding metrics: Mean acceptance length: {1 + self.num_accepted_tokens / self.num_drafts:.2f}, "
            f"Accepted throughput: {self.num_accepted_tokens / seconds:.2f} tokens/s, "
            f"Drafted throughput: {self.num_draft_tokens / seconds:.2f} tokens/s, "
            f"Accepted: {self.num_accepted_tokens} tokens, Drafted: {self.num_draft_tokens} tokens, "
            f"Per-position acceptance rate: {rates}, "
            f"Avg Draft acceptance rate: {100 * self.num_accepted_tokens / self.num_draft_tokens:.1f}%"
        )


class ServerMetrics:
    """Counts what an engine does; `stepped` and `aborted` are called on the engine's thread.

    `drafts` is the state after the last step, None without speculation. The registry is this object's own.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        self._families: dict[str, Counter] = {}
        self._seen: set[str] = set()
        self._num_generated = engine.num_generated_tokens
        self.drafts = None if engine.stats is None else DraftCounts.of(engine.stats)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the requests that were started.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._gauge("num_requests_running", "Requests in the batch.").set_function(lambda: len(engine.running))
        self._gauge("num_requests_waiting", "Requests waiting for a place.").set_function(lambda: len(engine.waiting))
        self._finished = {
            reason: self._counter("request_success", "Requests that ended.", finished_reason=reason)
            for reason in FINISHED_REASONS
        }
        if engine.prefixes is not None:
            self._prefix_tokens = [engine.prefixes.queries, engine.prefixes.hits]
            self._prefix_counters = [
                self._counter("prefix_cache_queries", "Prompt tokens looked for in the cache."),
                self._counter("prefix_cache_hits", "Prompt tokens found in the cache."),
            ]
        if self.drafts is not None:
            self._add_draft_counters(len(self.drafts.accepted_per_position))

    def stepped(self, outputs: Sequence[RequestOutput]) -> None:
        """Count one step that moved these requests."""
        for output in outputs:
            if output.request_id not in self._seen:
                self._seen.add(output.request_id)
                self._prompt_tokens.inc(len(output.prompt_token_ids))
            if output.finished:
                self._seen.discard(output.request_id)
                self._finished[output.outputs[0].finish_reason or "stop"].inc()
        before, self._num_generated = self._num_generated, self._engine.num_generated_tokens
        self._generation_tokens.inc(self._num_generated - before)
        prefixes = self._engine.prefixes
        if prefixes is not None:
            tokens = [prefixes.queries, prefixes.hits]
            for counter, now, then in zip(self._prefix_counters, tokens, self._prefix_tokens, strict=True):
                counter.inc(now - then)
            self._prefix_tokens = tokens
        if self.drafts is not None and self._engine.stats is not None:
            drafts = DraftCounts.of(self._engine.stats)
            self._count_drafts(drafts.since(self.drafts))
            self.drafts = drafts

    def aborted(self, request_ids: Sequence[str]) -> None:
        """Count requests that their clients ended."""
        self._seen.difference_update(request_ids)
        self._finished["abort"].inc(len(request_ids))

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _add_draft_counters(self, num_positions: int) -> None:
        self._num_drafts = self._counter("spec_decode_num_drafts", "Verifications of at least one draft token.")
        self._num_draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._num_accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._per_position = [
            self._counter("spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted.", position=str(position))
            for position in range(num_positions)
        ]

    def _count_drafts(self, new: DraftCounts) -> None:
        self._num_drafts.inc(new.num_drafts)
        self._num_draft_tokens.inc(new.num_draft_tokens)
        self._num_accepted.inc(new.num_accepted_tokens)
        for counter, count in zip(self._per_position, new.accepted_per_position, strict=True):
            counter.inc(count)

    def _counter(self, name: str, text: str, **more: str) -> Counter:
        labels = self._labels | more
        if name not in self._families:
            self._families[name] = Counter(f"vllm:{name}", text, list(labels), registry=self._registry)
        return self._families[name].labels(**labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, list(self._labels), registry=self._registry).labels(**self._labels)


class DraftLog:
    """The periodic line about speculative decoding."""

    def __init__(self, metrics: ServerMetrics, now: float) -> None:
        self._metrics, self._then = metrics, now
        self._before = metrics.drafts

    def line(self, now: float) -> str | None:
        """The line about the time since the last call; None where nothing was drafted."""
        counts = self._metrics.drafts
        if counts is None or self._before is None:
            return None
        new, seconds = counts.since(self._before), now - self._then
        self._before, self._then = counts, now
        return new.log_line(seconds) if new.num_drafts else None
