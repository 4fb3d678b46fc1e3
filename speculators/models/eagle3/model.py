"""The EAGLE-3 network: packed unrolling for training, incremental drafting for serving.

Shape suffixes as in `draft_model`; R context positions of a packed batch that are active at a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculators.models.cache import SlotWrite
from speculators.models.draft_model import DraftContext, DraftSampler, Proposal
from speculators.models.eagle3.config import Eagle3Config
from speculators.models.eagle3.network import FusedDraftModel
from speculators.models.eagle3.unroll import Trunk, Unroll
from speculators.models.proposing import proposal_of


class Eagle3Model(FusedDraftModel):
    """An EAGLE-3 draft: each token's state is made from the state before it."""

    config: Eagle3Config

    def forward(self, inputs: Unroll) -> list[Tensor]:
        """Unroll over packed documents and return, per step, the states [R, H] that `lm_head` reads.

        Keys and values of step 0 are made for every context position, queries and all that follows for active ones.
        """
        trunk = Trunk(self, inputs)
        hidden, steps = trunk.first(self.combine(inputs.features_CX)), []
        for step in range(len(inputs.slots)):
            if step:
                hidden = trunk.later(hidden, step)
            normed: Tensor = self.norm(hidden)
            steps.append(normed)
            if self.config.norm_output:
                hidden = normed
        return steps

    @torch.no_grad()
    def propose(self, context: DraftContext, num_tokens: int, sampler: DraftSampler) -> Proposal:
        """Bring the cache in step with the verified tokens and draft `num_tokens` more, one after another."""
        embeds, hidden = self.enter(context)
        rows, token_ids = len(context.starts), context.token_ids_BT
        write = SlotWrite.at(context.rows, context.starts, token_ids.shape[1], token_ids.device)
        last = [[max(length, 1) - 1] for length in context.lengths] if num_tokens else None
        hidden = self.extend(embeds, hidden, context.cache, write, last)
        starts = [start + length for start, length in zip(context.starts, context.lengths, strict=True)]
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(num_tokens):
            if step:
                write = SlotWrite.at(context.rows, starts, 1, token_ids.device)
                hidden = self.extend(self.embed(drafts[-1][:, None]), hidden, context.cache, write, [[0]] * rows)
                starts = [start + 1 for start in starts]
            normed = self.norm(hidden)
            ids, probs_BD = sampler(self.lm_head(normed).squeeze(1), step)
            hidden = normed if self.config.norm_output else hidden
            drafts.append(self.verifier_ids(ids))
            probs.extend([] if probs_BD is None else [probs_BD])
        return proposal_of(context, drafts, probs)
