"""How many tokens are drafted for each request, and how many of them are verified.

A depth never changes what is generated, only how fast. For that, whether a draft is verified must not depend on the
draft itself: only on the drafts before it, on other requests and on the past (the scheduler of arXiv 2607.05147).
"""

import logging
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from speculators.errors import EngineError
from speculators.models.draft_model import Proposal
from speculators.runtime.proposers.proposer import Proposer
from speculators.runtime.request import Request

logger = logging.getLogger(__name__)


class DepthPolicy(Protocol):
    """Says before each proposal how many tokens to draft, and after it how many of them to verify.

    `num_tokens` is the most that it ever asks for. `needs_certainty` says whether it reads the proposal's confidences.
    """

    num_tokens: int
    needs_certainty: bool

    def tokens_to_draft(self, num_requests: int) -> int:
        """Drafts to make for each of `num_requests` requests; 0 drafts nothing."""
        ...

    def verification_lengths(self, proposal: Proposal, requests: Sequence[Request]) -> list[int]:
        """How many of each row's drafts are verified; row b of the proposal belongs to `requests[b]`."""
        ...

    def learn(self, request: Request, num_accepted: int) -> None:
        """Take notice of how many of a request's last drafts its verification accepted."""
        ...


@runtime_checkable
class TellsCertainty(Protocol):
    """A proposer that can say how sure its drafts are.

    Where `keeps_top_probs` is true, proposals without a confidence head's `confidence_BK` have `top_probs_BK`.
    """

    keeps_top_probs: bool


class StaticDepth:
    """Always `num_tokens` drafts, all of them verified."""

    needs_certainty = False

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def tokens_to_draft(self, num_requests: int) -> int:
        """`num_tokens`."""
        return self.num_tokens

    def verification_lengths(self, proposal: Proposal, requests: Sequence[Request]) -> list[int]:
        """All that was drafted."""
        return drafted(proposal)

    def learn(self, request: Request, num_accepted: int) -> None:
        """Nothing depends on what was accepted."""


class DraftContextLimit:
    """Another policy's depth, but none for requests longer than what the draft can attend to.

    A request whose tokens and drafts would pass `max_model_len` positions is decoded without drafts from there on; a
    warning tells of the first one.
    """

    def __init__(self, depth: DepthPolicy, max_model_len: int) -> None:
        self._depth, self._limit = depth, max_model_len
        self.num_tokens, self.needs_certainty = depth.num_tokens, depth.needs_certainty
        self._warned = False

    def tokens_to_draft(self, num_requests: int) -> int:
        """What the other policy asks for."""
        return self._depth.tokens_to_draft(num_requests)

    def verification_lengths(self, proposal: Proposal, requests: Sequence[Request]) -> list[int]:
        """The other policy's lengths, 0 for requests that are too long."""
        lengths = self._depth.verification_lengths(proposal, requests)
        fits = [len(request.tokens) + self.num_tokens <= self._limit for request in requests]
        for request, fitting in zip(requests, fits, strict=True):
            if not fitting and not self._warned:
                self._warned = True
                logger.warning(
                    "request %s has %d tokens and the draft a context of %d: it goes on without speculation, and so "
                    "will every request of that length",
                    request.request_id,
                    len(request.tokens),
                    self._limit,
                )
        return [length if fitting else 0 for length, fitting in zip(lengths, fits, strict=True)]

    def learn(self, request: Request, num_accepted: int) -> None:
        """For the other policy to take notice of."""
        self._depth.learn(request, num_accepted)


def drafted(proposal: Proposal) -> list[int]:
    """How many tokens each row of a proposal has."""
    lengths: list[int] = proposal.lengths_B.tolist()
    return lengths


def depth_of(proposer: Proposer | None, depth: DepthPolicy | None) -> DepthPolicy:
    """The policy that an engine with this proposer follows; without one, the proposer's own depth.

    EngineError where there is nothing to draft with, where the policy asks for more than the proposer drafts, or for
    confidences of a proposer that has none.
    """
    if depth is None:
        return StaticDepth(0 if proposer is None else proposer.num_tokens)
    name = type(depth).__name__
    if proposer is None:
        raise EngineError(f"{name} says how many tokens to draft, but there is no speculation; give a proposer, too")
    if depth.num_tokens > proposer.num_tokens:
        raise EngineError(
            f"{name} asks for up to {depth.num_tokens} tokens, but the proposer drafts {proposer.num_tokens}; give "
            "both the same num_speculative_tokens"
        )
    if depth.needs_certainty:
        if not isinstance(proposer, TellsCertainty):
            raise EngineError(
                f"{name} needs the draft's confidence in each token, which {type(proposer).__name__} does not tell; "
                "use a trained draft model, or a fixed depth"
            )
        proposer.keeps_top_probs = True
    return depth
