"""How many tokens to draft, by how many requests there are (vLLM's `num_speculative_tokens_per_batch_size`)."""

import logging
from collections.abc import Sequence
from itertools import pairwise

from speculators.errors import EngineError
from speculators.models.draft_model import Proposal
from speculators.runtime.depth import drafted
from speculators.runtime.request import Request

logger = logging.getLogger(__name__)

KEY = "num_speculative_tokens_per_batch_size"
_EXAMPLE = "[[1, 16, 3], [17, 64, 1]], that is [first batch size, last batch size, tokens]"


class BatchSizeTable:
    """The number of drafts by the number of requests that are drafted for; all drafts are verified.

    `ranges` are closed: (first batch size, last batch size, tokens), in any order. A batch size between two ranges, or
    after the last, has the tokens of the range before it. More than `num_speculative_tokens` is cut to that, with a
    warning; 0 drafts nothing, while the draft's cache stays in step. With `hysteresis` h, the depth stays as it is
    while a batch size at most h away has it, so that it does not flutter at the border of two ranges. EngineError names
    what is wrong with a range.
    """

    needs_certainty = False

    def __init__(
        self,
        ranges: Sequence[Sequence[int]],
        num_speculative_tokens: int,
        max_num_seqs: int,
        hysteresis: int = 0,
    ) -> None:
        if isinstance(hysteresis, bool) or not isinstance(hysteresis, int) or hysteresis < 0:
            raise EngineError(f"{KEY}: hysteresis={hysteresis!r}: expected a whole number of at least 0")
        checked = _checked(ranges)
        above = [entry for entry in checked if entry[2] > num_speculative_tokens]
        if above:
            logger.warning(
                "%s: %s asks for more than num_speculative_tokens=%d; %d are drafted there",
                KEY,
                ", ".join(str(list(entry)) for entry in above),
                num_speculative_tokens,
                num_speculative_tokens,
            )
        self._depths = _by_batch_size(checked, num_speculative_tokens, max_num_seqs)
        self.num_tokens = max(self._depths)
        self.hysteresis = hysteresis
        self._now: int | None = None

    def at(self, num_requests: int) -> int:
        """The table's entry for a batch size, hysteresis apart."""
        return self._depths[min(max(num_requests, 1), len(self._depths)) - 1]

    def tokens_to_draft(self, num_requests: int) -> int:
        """The entry for this batch size, or the depth as it was where hysteresis keeps it."""
        near = range(num_requests - self.hysteresis, num_requests + self.hysteresis + 1)
        if self._now is None or self._now not in {self.at(size) for size in near}:
            self._now = self.at(num_requests)
        return self._now

    def verification_lengths(self, proposal: Proposal, requests: Sequence[Request]) -> list[int]:
        """All that was drafted."""
        return drafted(proposal)

    def learn(self, request: Request, num_accepted: int) -> None:
        """Nothing depends on what was accepted."""


def _checked(ranges: object) -> list[tuple[int, int, int]]:
    if not isinstance(ranges, list | tuple):
        raise EngineError(f"{KEY}={ranges!r}: expected a list of ranges like {_EXAMPLE}")
    if not ranges:
        raise EngineError(f"{KEY} is empty; give at least one range, as in {_EXAMPLE}")
    entries = sorted(_entry(one) for one in ranges)
    if entries[0][0] != 1:
        raise EngineError(f"{KEY}: the first range begins at batch size {entries[0][0]}; the lowest must begin at 1")
    for before, after in pairwise(entries):
        if after[0] <= before[1]:
            raise EngineError(
                f"{KEY}: {list(before)} and {list(after)} overlap: both have batch size {after[0]}; ranges are closed, "
                f"so let one begin at {before[1] + 1}"
            )
    return entries


def _entry(one: object) -> tuple[int, int, int]:
    whole = isinstance(one, list | tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in one)
    if not isinstance(one, list | tuple) or not whole or len(one) != 3:
        raise EngineError(f"{KEY}: {one!r} is no range; expected three whole numbers, as in {_EXAMPLE}")
    first, last, tokens = one
    if first < 1 or last < 1:
        raise EngineError(f"{KEY}: {list(one)} has batch size {min(first, last)}; batch sizes are at least 1")
    if first > last:
        raise EngineError(f"{KEY}: {list(one)} begins at {first} and ends before it, at {last}; write the lower first")
    if tokens < 0:
        raise EngineError(f"{KEY}: {list(one)} drafts {tokens} tokens; expected 0 (none) or more")
    return first, last, tokens


def _by_batch_size(entries: list[tuple[int, int, int]], most: int, max_num_seqs: int) -> list[int]:
    """The depth of each batch size from 1 on; entries ascend, each goes on until the next begins."""
    starts = {first: min(tokens, most) for first, _, tokens in entries}
    depths = [starts[1]]
    for size in range(2, max_num_seqs + 1):
        depths.append(starts.get(size, depths[-1]))
    return depths
