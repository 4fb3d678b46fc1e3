"""How many drafts are verified, by how sure the draft is of them (vLLM-Ascend's `dynamic_spec_config`).

Shapes: B rows, K drafts. Confidence is how likely a draft is to be accepted once those before it were; survival, its
running product, how likely it is to be accepted at all.
"""

from collections.abc import Sequence
from math import ceil
from typing import cast

import torch
from torch import Tensor

from speculators.errors import EngineError
from speculators.models.draft_model import Proposal
from speculators.runtime.depth import drafted
from speculators.runtime.request import Request

KEY = "dynamic_spec_config"


def survival(confidence_BK: Tensor) -> Tensor:
    """Running product along each row, [B, K] float64; confidences are kept within [1e-6, 1]."""
    return confidence_BK.double().clamp(1e-6, 1.0).cumprod(1)


def usable_lengths(proposal: Proposal, requests: Sequence[Request]) -> Tensor:
    """How many drafts of each row could be verified before its request is full, [B] int64 on the CPU."""
    rooms = [request.room for request in requests]
    return torch.tensor(
        [min(length, room) for length, room in zip(drafted(proposal), rooms, strict=True)], dtype=torch.int64
    )


def allocate(survival_BK: Tensor, limits_B: Tensor, budget: int, least: int = 0) -> list[int]:
    """How many drafts each row verifies, when `budget` of them go to the likeliest anywhere in the batch.

    Every row has its first `least` beside that, and none more than `limits_B` (int64). Survivals never rise along a
    row, so that what a row gets are its first ones; of equals, the earlier position comes first, then the earlier row.
    Whether a draft is taken depends on drafts before it and in other rows only.
    """
    slots_K = torch.arange(survival_BK.shape[1])
    lengths_B = limits_B.clamp(max=least)
    open_BK = (slots_K >= least) & (slots_K < limits_B[:, None])
    # Position-major, so that a stable sort leaves equals in the promised order.
    places = open_BK.T.flatten().nonzero()[:, 0]
    order = survival_BK.T.flatten()[places].argsort(descending=True, stable=True)
    taken = places[order[: max(budget, 0)]] % len(limits_B)
    lengths: list[int] = (lengths_B + torch.bincount(taken, minlength=len(limits_B))).tolist()
    return lengths


class ConfidenceBudget:
    """Verifies of each row the drafts that are likely to be accepted, within a budget for the whole batch.

    Each request has its first `min_verify_tokens` verified, and the batch has (k - min_verify_tokens) more a request,
    which go to the largest survivals. k starts at `initial_verify_budget_per_req`. Every `budget_update_interval`
    proposals it becomes the mean number of drafts a request whose survival is at least `budget_threshold`, rounded up,
    then up to an odd number where that is no more than `num_speculative_tokens`; it holds from the next proposal on,
    because a budget that this proposal's drafts have moved would bias what is sampled. `from_head` says whether the
    confidence head is read, else the probability of the draft's likeliest token.
    """

    needs_certainty = True

    def __init__(
        self,
        num_speculative_tokens: int,
        *,
        from_head: bool,
        initial_verify_budget_per_req: int = 5,
        budget_update_interval: int = 16,
        budget_threshold: float = 0.3,
        min_verify_tokens: int = 1,
    ) -> None:
        self.num_tokens = num_speculative_tokens
        _require("initial_verify_budget_per_req", initial_verify_budget_per_req, 1, None)
        _require("budget_update_interval", budget_update_interval, 1, None)
        _require("min_verify_tokens", min_verify_tokens, 0, num_speculative_tokens)
        number = isinstance(budget_threshold, int | float) and not isinstance(budget_threshold, bool)
        if not number or not 0 <= budget_threshold <= 1:
            raise EngineError(f"{KEY}: budget_threshold={budget_threshold!r}: expected a number in [0, 1]")
        self._from_head, self._interval = from_head, budget_update_interval
        self._threshold, self._least = float(budget_threshold), min_verify_tokens
        self.budget_per_request = max(min_verify_tokens, min(initial_verify_budget_per_req, num_speculative_tokens))
        self._proposals = 0

    def tokens_to_draft(self, num_requests: int) -> int:
        """Always all."""
        return self.num_tokens

    def verification_lengths(self, proposal: Proposal, requests: Sequence[Request]) -> list[int]:
        """Each row's share of the budget."""
        limits_B = usable_lengths(proposal, requests)
        survival_BK = survival(self._confidence(proposal).cpu())
        extra = len(requests) * (self.budget_per_request - self._least)
        lengths = allocate(survival_BK, limits_B, extra, self._least)
        self._proposals += 1
        if self._proposals % self._interval == 0:
            self._update(survival_BK)
        return lengths

    def learn(self, request: Request, num_accepted: int) -> None:
        """The budget follows the draft's confidence alone."""

    def _confidence(self, proposal: Proposal) -> Tensor:
        found = proposal.confidence_BK if self._from_head else proposal.top_probs_BK
        if found is None:
            what = "a confidence head" if self._from_head else "the probability of its likeliest tokens"
            raise EngineError(f"{KEY}: this draft does not give {what}; remove {KEY}")
        return found

    def _update(self, survival_BK: Tensor) -> None:
        wanted = ceil(int((survival_BK >= self._threshold).sum()) / len(survival_BK))
        if wanted % 2 == 0 and wanted < self.num_tokens:
            wanted += 1
        self.budget_per_request = max(self._least, min(wanted, self.num_tokens))


def _require(name: str, value: object, least: int, most: int | None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or cast(int, value) < least or (most is not None and cast(int, value) > most):
        allowed = f"at least {least}" if most is None else f"{least} to {most} (num_speculative_tokens)"
        raise EngineError(f"{KEY}: {name}={value!r}: expected a whole number of {allowed}")
