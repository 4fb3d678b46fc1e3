"""The suffix trees of suffix decoding (arXiv 2411.04975): one a request, and one over the outputs of all of them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from speculators.errors import EngineError
from speculators.runtime.proposers.suffix_tree import Continuation, SuffixTree, TrackedSequence, float32


@dataclass(frozen=True)
class SuffixOptions:
    """Depth of the trees, outputs kept, drafts a matched token, and the least probability a draft may have.

    `max_cached_requests` 0 keeps no outputs of other requests. EngineError names a value outside its range.
    """

    max_tree_depth: int = 24
    max_cached_requests: int = 10000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        self._check("max_tree_depth", self.max_tree_depth >= 1, "at least 1")
        self._check("max_cached_requests", self.max_cached_requests >= 0, "at least 0")
        self._check("max_spec_factor", self.max_spec_factor >= 0, "at least 0")
        self._check("min_token_prob", 0 <= self.min_token_prob <= 1, "in [0, 1]")

    def _check(self, name: str, fine: bool, expected: str) -> None:
        if not fine:
            raise EngineError(f"suffix decoding: {name}={getattr(self, name)!r}, expected a number {expected}")


class SuffixCache:
    """Matches the end of a request's tokens against what came before, in the request itself and in other outputs.

    The tree of a request holds prompt and output, and goes when the request ends. The global tree holds outputs, those
    of running requests too, and forgets the one that was started first when there are more than
    `max_cached_requests`.
    """

    def __init__(self, options: SuffixOptions) -> None:
        self.options = options
        self._active: dict[Hashable, tuple[SuffixTree, TrackedSequence]] = {}
        self._outputs: dict[Hashable, TrackedSequence] = {}
        self._global = SuffixTree(options.max_tree_depth)
        factor, least = float32(options.max_spec_factor), float32(options.min_token_prob)
        # The small addend lets a product such as 3 * (1 / 3) reach the whole number that it means.
        self._limits = [int(float32(length * factor) + 1e-6) for length in range(1, options.max_tree_depth + 1)]
        self._min_probability = least

    @property
    def active(self) -> frozenset[Hashable]:
        """Requests that were started and not stopped."""
        return frozenset(self._active)

    @property
    def cached(self) -> list[Hashable]:
        """Requests whose outputs the global tree holds, the one to be forgotten first in front."""
        return list(self._outputs)

    def is_active(self, request_id: Hashable) -> bool:
        """Whether a request was started and not stopped."""
        return request_id in self._active

    def start(self, request_id: Hashable, prompt_token_ids: Sequence[int]) -> None:
        """Begin a request; the output of an earlier one of the same id is forgotten."""
        tree, sequence = SuffixTree(self.options.max_tree_depth), TrackedSequence()
        tree.extend(sequence, prompt_token_ids)
        self._active[request_id] = (tree, sequence)
        if self.options.max_cached_requests == 0:
            return
        if request_id in self._outputs:
            self._global.remove(self._outputs.pop(request_id))
        self._outputs[request_id] = TrackedSequence()
        if len(self._outputs) > self.options.max_cached_requests:
            self._global.remove(self._outputs.pop(next(iter(self._outputs))))

    def extend(self, request_id: Hashable, token_ids: Sequence[int]) -> None:
        """Append output tokens of an active request."""
        tree, sequence = self._active[request_id]
        tree.extend(sequence, token_ids)
        if request_id in self._outputs:
            self._global.extend(self._outputs[request_id], token_ids)

    def stop(self, request_id: Hashable) -> None:
        """End a request: its own tree goes, its output stays in the global tree."""
        del self._active[request_id]
        if request_id in self._outputs:
            self._outputs[request_id].close()

    def speculate(self, request_id: Hashable, context: Sequence[int], num_tokens: int) -> Continuation:
        """At most `num_tokens` tokens after `context`, the last tokens of an active request.

        The request's own tree wins a tie.
        """
        context = context[-self.options.max_tree_depth :]
        limits = [min(num_tokens, limit) for limit in self._limits]
        tree, sequence = self._active[request_id]
        best = tree.continuation(context, sequence, limits, self._min_probability, Continuation())
        if self.options.max_cached_requests:
            output = self._outputs.get(request_id)
            best = self._global.continuation(context, output, limits, self._min_probability, best)
        return best
