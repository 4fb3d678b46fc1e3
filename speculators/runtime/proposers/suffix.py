"""Drafting from suffix trees over what was said before (arXiv 2411.04975): no draft model, adaptive lengths."""

from speculators.runtime.proposers.ragged import LookupProposer
from speculators.runtime.proposers.suffix_cache import SuffixCache, SuffixOptions
from speculators.runtime.request import Request


class SuffixProposer(LookupProposer):
    """Proposes the most frequent continuation of the last tokens, in the request and in the outputs of others.

    A draft has at most `num_tokens` tokens and at most `max_spec_factor` times those that matched; `max_tree_depth`
    bounds match and draft together. EngineError where an option is outside its range.
    """

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        *,
        num_tokens: int,
    ) -> None:
        super().__init__(num_tokens)
        self.cache = SuffixCache(SuffixOptions(max_tree_depth, max_cached_requests, max_spec_factor, min_token_prob))
        self._seen: dict[str, int] = {}

    def forget(self, request: Request) -> None:
        """Drop a request's own tree; what it said stays for others."""
        if self.cache.is_active(request.request_id):
            self._read(request)
            self.cache.stop(request.request_id)
            del self._seen[request.request_id]

    def _read(self, request: Request) -> None:
        name = request.request_id
        if not self.cache.is_active(name):
            self.cache.start(name, request.prompt_token_ids)
            self._seen[name] = len(request.prompt_token_ids)
        self.cache.extend(name, request.tokens[self._seen[name] :])
        self._seen[name] = len(request.tokens)

    def draft(self, request: Request, num_tokens: int) -> list[int]:
        """Read what a request has gained and draft for it."""
        self._read(request)
        context = request.tokens[-self.cache.options.max_tree_depth :]
        return self.cache.speculate(request.request_id, context, min(num_tokens, request.room)).token_ids
