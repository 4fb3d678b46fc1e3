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
from speculators.models.eagle3.unroll import Eagle3Trunk
from speculators.models.proposing import Drafts
from speculators.models.unroll import Memory, Unroll


class Eagle3Model(FusedDraftModel):
    """An EAGLE-3 draft: each token's state is made from the state before it."""

    config: Eagle3Config

    def forward(self, inputs: Unroll) -> list[Tensor]:
        """Unroll over packed documents and return, per step, the states [R, H] that `lm_head` reads.

        Keys and values of step 0 are made for every context position, queries and all that follows for active ones.
        """
        trunk, memory = Eagle3Trunk(self, inputs), Memory(len(self.layers))
        hidden, steps = trunk.first(self.segment(self.combine, inputs.features_CX), memory), []
        for step in range(len(inputs.slots)):
            if step:
                hidden = trunk.later(hidden, memory, step)
            normed: Tensor = self.norm(hidden)
            steps.append(normed)
            if self.config.norm_output:
                hidden = normed
        return steps

    @torch.no_grad()
    def propose(self, context: DraftContext, num_tokens: int, sampler: DraftSampler) -> Proposal:
        """Bring the cache in step with the verified tokens and draft `num_tokens` more, one after another."""
        drafts, token_ids = Drafts(self, sampler, num_tokens), context.token_ids_BT
        embeds, hidden = self.enter(context)
        write = SlotWrite.at(context.rows, context.starts, token_ids.shape[1], token_ids.device)
        wanted = [[index] for index in context.last]
        inputs, residual = self.first_layer.join(embeds, hidden)
        hidden = self.extend(inputs, residual, context.cache, write, wanted if num_tokens else None)
        for step in range(num_tokens):
            if step:
                starts = [end + step - 1 for end in context.ends]
                write = SlotWrite.at(context.rows, starts, 1, token_ids.device)
                inputs, residual = self.first_layer.join(self.embed(drafts.token_ids[-1][:, None]), hidden)
                hidden = self.extend(inputs, residual, context.cache, write, [[0]] * len(starts))
            normed = self.norm(hidden)
            drafts.draw(self.lm_head(normed).squeeze(1))
            hidden = normed if self.config.norm_output else hidden
        return drafts.proposal(context)
