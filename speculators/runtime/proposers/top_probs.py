"""How sure a draft is of its tokens: what a sampler of draft logits is shown, kept on the way."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from speculators.models.draft_model import DraftSampler, Proposal
from speculators.runtime.request import Request


class TopProbs:
    """A draft sampler that leaves the choice to another one and keeps the largest probability of each step.

    It is that of softmax(logits / temperature), with temperature 1 for greedy requests, whatever is then chosen.
    """

    def __init__(self, sampler: DraftSampler, requests: Sequence[Request]) -> None:
        self._sampler = sampler
        self._temperatures = [1.0 if r.params.greedy else r.params.temperature for r in requests]
        self._kept: list[Tensor] = []

    def __call__(self, logits_BD: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        """What the other sampler chooses."""
        scaled_BD = logits_BD.float() / torch.tensor(self._temperatures, device=logits_BD.device)[:, None]
        self._kept.append((scaled_BD.amax(-1) - scaled_BD.logsumexp(-1)).exp())
        return self._sampler(logits_BD, step)

    def told(self, proposal: Proposal) -> Proposal:
        """The proposal with `top_probs_BK`, where it has no confidences of its own."""
        if proposal.confidence_BK is not None or not self._kept:
            return proposal
        return replace(proposal, top_probs_BK=torch.stack(self._kept, 1))
