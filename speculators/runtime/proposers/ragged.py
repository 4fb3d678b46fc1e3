"""Drafting row by row from what requests say, and drafts of unequal lengths as one proposal."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from speculators.models.draft_model import Proposal
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.request import Request


class LookupProposer(ABC):
    """A proposer that drafts for each request by itself, from its tokens: it reads no states, and has no cache rows."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.aux_layer_ids: Sequence[int] = ()
        self.verifier_ids_D: Tensor | None = None

    def observe(self, new: NewTokens) -> None:
        """Nothing to do: a prompt is read whole when its request first drafts."""
        return

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        """Draft at most `num_tokens` a row."""
        # What a request learns of others depends on when they came, not on the rows that they have.
        order = sorted(range(len(new.requests)), key=lambda row: new.requests[row].metrics.arrival_time)
        drafted = {row: self.draft(new.requests[row], num_tokens) for row in order}
        drafts = [drafted[row] for row in range(len(new.requests))]
        return ragged_proposal(drafts, num_tokens, new.next_ids_BT.device)

    def move(self, source: int, target: int, length: int) -> None:
        """Nothing to do: requests are known by their ids."""
        return

    def require_prefix_reuse(self, num_slots: int) -> None:
        """Nothing to do: what is drafted follows from a request's tokens."""
        return

    def copy_prefix(self, source: int, target: int, length: int, request: Request | None) -> None:
        """Nothing to do: there are no rows."""
        return

    @abstractmethod
    def draft(self, request: Request, num_tokens: int) -> list[int]:
        """At most `num_tokens` ids that may follow a request's tokens."""

    @abstractmethod
    def forget(self, request: Request) -> None:
        """A request has ended."""


def ragged_proposal(drafts: Sequence[Sequence[int]], num_tokens: int, device: torch.device) -> Proposal:
    """One-hot drafts, a list of at most `num_tokens` ids a row, as a Proposal [B, num_tokens] padded with 0."""
    padded = [[*draft, *[0] * (num_tokens - len(draft))] for draft in drafts]
    token_ids_BK = torch.tensor(padded, dtype=torch.int64, device=device).view(len(drafts), num_tokens)
    return Proposal(token_ids_BK, torch.tensor([len(draft) for draft in drafts], device=device))
