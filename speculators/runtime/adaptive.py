"""Adaptive verification: as many drafts as make the most of a step's time (vLLM's `enable_adaptive_verification`).

Shapes: G past batches, B requests, K drafts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.errors import EngineError
from speculators.models.draft_model import Proposal
from speculators.runtime.acceptance import AcceptanceEstimator
from speculators.runtime.confidence import allocate, survival, usable_lengths
from speculators.runtime.request import Request
from speculators.runtime.step_costs import StepCosts

# Plans are made from at most so many rows of confidences, none older than so many proposals, but for the last batch.
_MOST_ROWS = 256
_OLDEST = 128
_EXPLORE_EVERY = 64
_NEWEST = 0.2  # weight of a batch in the running means


@dataclass(frozen=True)
class Plan:
    """How many drafts to make for each request, and how many to verify in the whole batch."""

    depth: int
    budget: int


class AdaptiveVerification:
    """Drafts and verifies what gives the most expected tokens a second, by measured costs and the draft's confidence.

    With survivals s and n requests, the plan maximises (n + sum of the largest B survivals among the first D of each
    request) / (cost of drafting D + cost of verifying n + B tokens) over all D and B: a budget of B verified tokens,
    that the current batch's largest survivals share. Where passes are padded (not `Verifier.packs`), B is n D: shorter
    rows would save nothing. Survivals of the plan are those of recent proposals, put together to batches of today's
    size, never those of the proposal that it decides on, which would bias what is sampled. Until a draft has been seen,
    everything is verified.

    Confidences are the draft's confidence head's, else an `AcceptanceEstimator`'s, which learns from the probabilities
    of its likeliest tokens. Once in 64 proposals all is drafted and one draft a request more is verified than planned,
    so that what has become worth drafting is found out.
    """

    needs_certainty = True

    def __init__(self, num_speculative_tokens: int, costs: StepCosts) -> None:
        self.num_tokens, self.costs = num_speculative_tokens, costs
        self.estimator = AcceptanceEstimator(num_speculative_tokens)
        self.plan = Plan(num_speculative_tokens, 0)
        self._recent: deque[tuple[int, Tensor]] = deque()
        self._mean_K = torch.ones(num_speculative_tokens, dtype=torch.float64)
        self._pending: dict[Request, list[float]] = {}
        self._proposals = 0

    def tokens_to_draft(self, num_requests: int) -> int:
        """Make the plan for a batch of this size; returns its depth."""
        self._proposals += 1
        self.plan = self._best(num_requests)
        if self._proposals % _EXPLORE_EVERY == 0:
            deeper = min(self.plan.budget + num_requests, num_requests * self.num_tokens)
            self.plan = Plan(self.num_tokens, deeper)
        return self.plan.depth

    def verification_lengths(self, proposal: Proposal, requests: Sequence[Request]) -> list[int]:
        """Each row's share of the plan's budget."""
        limits_B = usable_lengths(proposal, requests)
        confidence_BK, features_BK = self._confidence(proposal)
        count = len(requests)
        if self.costs.padded:
            lengths = limits_B.clamp(max=-(-self.plan.budget // count)).tolist()
        else:
            lengths = allocate(survival(confidence_BK), limits_B, self.plan.budget)
        self._remember(confidence_BK[proposal.lengths_B.cpu() > 0])
        self._pending = {}
        if features_BK is not None:
            rows = zip(requests, features_BK.tolist(), lengths, strict=True)
            self._pending = {request: features[:length] for request, features, length in rows}
        return lengths

    def learn(self, request: Request, num_accepted: int) -> None:
        """Let the estimator learn from what the verification of a request's drafts accepted."""
        self.estimator.learn(self._pending.pop(request, []), num_accepted)

    def _confidence(self, proposal: Proposal) -> tuple[Tensor, Tensor | None]:
        """Confidences [B, K] float64 on the CPU, and the features that they were estimated from."""
        if proposal.confidence_BK is not None:
            return proposal.confidence_BK.double().cpu(), None
        if proposal.top_probs_BK is None:
            raise EngineError(
                "enable_adaptive_verification: this draft tells neither a confidence nor the probability of its "
                "likeliest tokens; turn it off"
            )
        self.estimator.step()
        features_BK = self.estimator.features(proposal.top_probs_BK.cpu())
        return self.estimator.predict(features_BK), features_BK

    def _remember(self, confidence_BK: Tensor) -> None:
        """Keep a batch's confidences; positions that were not drafted have those of the batches that had them."""
        width = confidence_BK.shape[1]
        if not width or not len(confidence_BK):
            return
        newest = _NEWEST if self._recent else 1.0
        self._mean_K[:width] += newest * (confidence_BK.mean(0) - self._mean_K[:width])
        unseen_BK = self._mean_K[width:].expand(len(confidence_BK), -1)
        self._recent.append((self._proposals, torch.cat([confidence_BK, unseen_BK], 1)))
        rows = sum(len(batch) for _, batch in self._recent)
        while len(self._recent) > 1 and (rows > _MOST_ROWS or self._recent[0][0] < self._proposals - _OLDEST):
            rows -= len(self._recent.popleft()[1])

    def _best(self, num_requests: int) -> Plan:
        most = self.num_tokens
        if not self._recent:
            return Plan(most, num_requests * most)
        past_GBK = self._past_batches(num_requests)
        survival_GBK = survival(past_GBK.flatten(0, 1)).view_as(past_GBK)
        draft_K = self.costs.draft_ms(num_requests, torch.arange(most + 1))
        best, rate = Plan(0, 0), 0.0
        for depth in self._depths(draft_K):
            budgets, accepted = self._gains(survival_GBK[:, :, :depth])
            ms = draft_K[depth] + self.costs.verify_ms(num_requests, num_requests + budgets)
            rates = (num_requests + accepted) / ms
            # Of equals the largest budget: nothing speaks against it.
            place = len(rates) - 1 - int(rates.flip(0).argmax())
            if float(rates[place]) >= rate:
                best, rate = Plan(depth, int(budgets[place])), float(rates[place])
        return best

    def _depths(self, draft_K: Tensor) -> Sequence[int]:
        """Depths worth looking at: of those that cost as much as all, only all."""
        return [depth for depth in range(self.num_tokens) if draft_K[depth] < draft_K[-1]] + [self.num_tokens]

    def _gains(self, survival_GBD: Tensor) -> tuple[Tensor, Tensor]:
        """Budgets, ascending, and the drafts that each is expected to have accepted."""
        batches, count, depth = survival_GBD.shape
        if self.costs.padded:
            accepted = survival_GBD.sum(1).mean(0).cumsum(0)
            return count * torch.arange(depth + 1), torch.cat([accepted.new_zeros(1), accepted])
        ranked_GN = survival_GBD.reshape(batches, count * depth).sort(1, descending=True).values
        accepted = ranked_GN.mean(0).cumsum(0)
        return torch.arange(count * depth + 1), torch.cat([accepted.new_zeros(1), accepted])

    def _past_batches(self, num_requests: int) -> Tensor:
        """Recent confidences as batches of this size, [G, B, K]; the newest rows repeat where there are too few."""
        rows_NK = torch.cat([batch for _, batch in self._recent])
        batches = max(1, len(rows_NK) // num_requests)
        if len(rows_NK) < num_requests:
            rows_NK = rows_NK.repeat(-(-num_requests // len(rows_NK)), 1)
        return rows_NK[-batches * num_requests :].reshape(batches, num_requests, self.num_tokens)
