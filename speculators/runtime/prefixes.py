"""Prompts that begin as another request does: its keys and values are copied, and not computed again.

A slot of the cache is copied whole tokens at a time, since it has no blocks that would have to be shared whole. What a
draft keeps of a position depends on the token behind it (its embedding is an input there), so that of the tokens two
requests have in common the last is computed anew: one token, where blocks would lose sixteen.
"""

from bisect import bisect
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from speculators.errors import EngineError
from speculators.models.cache import SlotCache
from speculators.models.slot_states import kept_states
from speculators.runtime.description import LanguageModel, has_static_rotation
from speculators.runtime.proposers.proposer import Proposer
from speculators.runtime.request import Request

# Fewer tokens are computed sooner than requests are made to wait for each other.
LEAST_SHARED = 16


@runtime_checkable
class ReusesPrefixes(Protocol):
    """A proposer that can begin a request from what it has of another one's tokens."""

    def require_prefix_reuse(self, num_slots: int) -> None:
        """Raise EngineError where rows cannot be copied, or are fewer than `num_slots`."""
        ...

    def copy_prefix(self, source: int, target: int, length: int, request: Request | None) -> None:
        """Let row `target` begin with the first `length` tokens of row `source`; None: no request runs in it."""
        ...


def require_prefix_caching(verifier: LanguageModel) -> None:
    """Raise EngineError where keys and values of a verifier's beginning are not all that goes on from there."""
    where = f"enable_prefix_caching: verifier {verifier.name_or_path!r} ({verifier.config.model_type})"
    if kept_states(verifier.config):
        raise EngineError(
            f"{where} has layers with a running state, which is kept for a request's last tokens alone, not for its "
            "first; leave it out"
        )
    if not has_static_rotation(verifier.config):
        raise EngineError(
            f"{where} rotates keys by how long a sequence has become, so that those of another request are not its "
            "own; leave it out"
        )


class PrefixCache:
    """Finds what requests begin with in the slots of running requests and of finished ones.

    Slots `first_slot` on, `num_slots` of them, keep what finished requests had; the one that was used least recently
    makes room. `queries` counts the prompt tokens that were looked for, `hits` those that were there. EngineError where
    the proposer cannot begin in the middle of a prompt.
    """

    def __init__(self, cache: SlotCache, proposer: Proposer | None, first_slot: int, num_slots: int) -> None:
        self.queries = self.hits = 0
        self._proposer: ReusesPrefixes | None = None
        if proposer is not None:
            if not isinstance(proposer, ReusesPrefixes):
                raise EngineError(
                    f"enable_prefix_caching: {type(proposer).__name__} lacks `copy_prefix` and `require_prefix_reuse`, "
                    "so its drafts would change with what is cached; leave it out"
                )
            proposer.require_prefix_reuse(first_slot + num_slots)
            self._proposer = proposer
        self._cache = cache
        self._free = list(range(first_slot, first_slot + num_slots))
        # Tokens by slot, one more than the slot has, in the order of their use.
        self._kept: OrderedDict[int, list[int]] = OrderedDict()

    def start(self, requests: Sequence[Request], running: list[Request]) -> list[Request]:
        """Let requests run behind the others, those with most to compute first, each from the longest beginning there.

        Returns those that shall start when these have computed their prompts, since they will share more with one.
        """
        now: list[Request] = []
        later: list[Request] = []
        found: dict[Request, int] = {}
        for request in requests:
            slot, length = self._longest(request, running)
            coming = max((_shared(request.tokens, one.tokens) for one in now), default=0)
            if request.prompt_logprobs is None and coming >= LEAST_SHARED and coming > length:
                later.append(request)
                continue
            now.append(request)
            if slot is not None:
                found[request] = slot
                request.num_computed = request.num_observed = request.num_cached = length
            if request.prompt_logprobs is None:
                self.queries += len(request.prompt_token_ids)
                self.hits += length
        now.sort(key=lambda request: request.num_computed - len(request.tokens))
        for request in now:
            if request in found:
                self._copy(found[request], len(running), request.num_computed, request)
            running.append(request)
        return later

    def keep(self, request: Request, row: int) -> None:
        """Keep what a request that ends has in its row, unless another one has it all."""
        length = request.num_observed
        if length < LEAST_SHARED:
            return
        tokens = request.tokens[: length + 1]
        for slot, others in self._kept.items():
            if others[: length + 1] == tokens:
                self._kept.move_to_end(slot)
                return
        longer = [slot for slot, others in self._kept.items() if tokens[: len(others)] == others]
        slot = longer[0] if longer else self._free.pop() if self._free else next(iter(self._kept))
        self._copy(row, slot, length, None)
        self._kept[slot] = tokens
        self._kept.move_to_end(slot)

    def _longest(self, request: Request, running: Sequence[Request]) -> tuple[int | None, int]:
        """The slot that has most of a request's beginning, and how many tokens of it; None and 0 for too few."""
        if request.prompt_logprobs is not None:
            # Logits of every position are wanted.
            return None, 0
        there = [(min(_shared(request.tokens, one.tokens), one.num_observed), row) for row, one in enumerate(running)]
        there += [(_shared(request.tokens, tokens), slot) for slot, tokens in self._kept.items()]
        length, slot = max(there, default=(0, 0))
        if length < LEAST_SHARED:
            return None, 0
        if slot in self._kept:
            self._kept.move_to_end(slot)
        return slot, length

    def _copy(self, source: int, target: int, length: int, request: Request | None) -> None:
        self._cache.move(source, target, length)
        if self._proposer is not None:
            self._proposer.copy_prefix(source, target, length, request)


def _shared(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with, but for the last of them."""
    most = min(len(tokens), len(others))
    # Whole slices are compared faster than one token after another.
    common = bisect(range(1, most + 1), 0, key=lambda count: int(tokens[:count] != others[:count]))
    return max(common - 1, 0)
