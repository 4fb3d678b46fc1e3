"""The small interface behind which every way of drafting stands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from speculators.models.cache import SlotCache
from speculators.models.draft_model import Proposal
from speculators.runtime.request import Request


@dataclass
class NewTokens:
    """What the verifier has just computed for the requests of cache rows `rows`.

    Row b has `lengths[b]` new positions from `starts[b]` on; `next_ids_BT` holds the token after each of them,
    `aux_BTX` and `normed_BTH` (after its final norm) the verifier's states there. All are right-padded. `cache` has the
    verifier's own keys and values of all positions (None where nobody reads them).
    """

    rows: slice
    requests: Sequence[Request]
    starts: list[int]
    lengths: list[int]
    next_ids_BT: Tensor
    aux_BTX: Tensor | None
    normed_BTH: Tensor
    cache: SlotCache | None = None


class Proposer(Protocol):
    """Drafts tokens for requests, and keeps whatever state it needs in step with the verifier's cache rows."""

    num_tokens: int
    aux_layer_ids: Sequence[int]
    verifier_ids_D: Tensor | None

    def observe(self, new: NewTokens) -> None:
        """Take notice of verified tokens without drafting (a chunk of a prompt)."""
        ...

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        """Take notice of verified tokens and draft up to `num_tokens` that follow them."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """A request moved to another cache row."""
        ...

    def forget(self, request: Request) -> None:
        """A request has left its row, finished or aborted; called before the move that fills the row."""
        ...
