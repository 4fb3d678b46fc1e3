"""The P-EAGLE network: all depths at once for training, one pass for all drafts in serving.

Shape suffixes as in `draft_model`; R elements of one depth of a packed batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.models.cache import SlotWrite
from speculators.models.draft_model import DraftContext, DraftSampler, Proposal
from speculators.models.eagle3.network import FusedDraftModel
from speculators.models.peagle.config import PEagleConfig
from speculators.models.peagle.parallel import Depths, ParallelTrunk
from speculators.models.proposing import Drafts


class PEagleModel(FusedDraftModel):
    """A P-EAGLE draft: slots behind the last verified token read a mask token and the learned `mask_hidden`.

    `mask_hidden` [1, 1, A*Ht] stands in for the verifier's states, before the norms and `fc`.
    """

    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.num_features))

    def mask_slot(self) -> tuple[Tensor, Tensor]:
        """Embedding and first state [1, H] of every slot whose token is not known."""
        token = torch.tensor([self.config.mask_token_id], device=self.mask_hidden.device)
        return self.embed(token), self.combine(self.mask_hidden.flatten(0, 1))

    def forward(self, inputs: Depths) -> list[Tensor]:
        """Run over packed documents and return, per depth, the states [R, H] that `lm_head` reads."""
        hidden = ParallelTrunk(self, self.mask_slot(), inputs).run()
        sizes = [len(states) for states in hidden]
        normed: Tensor = self.norm(torch.cat(hidden))
        return list(normed.split(sizes))

    @torch.no_grad()
    def propose(self, context: DraftContext, num_tokens: int, sampler: DraftSampler) -> Proposal:
        """Bring the cache in step with the verified tokens and draft `num_tokens` more in the same pass.

        Mask slots are written behind the verified positions of a row, where the next write lands.
        """
        drafts = Drafts(self, sampler, num_tokens)
        embeds, hidden = self.enter(context)
        width, device, num_masks = embeds.shape[1], embeds.device, max(num_tokens - 1, 0)
        if num_masks:
            lengths_B11 = torch.tensor(context.lengths, device=device)[:, None, None]
            verified_BT1 = torch.arange(width + num_masks, device=device)[:, None] < lengths_B11
            mask_embeds, mask_hidden = self.mask_slot()
            embeds = torch.where(verified_BT1, F.pad(embeds, (0, 0, 0, num_masks)), mask_embeds)
            hidden = torch.where(verified_BT1, F.pad(hidden, (0, 0, 0, num_masks)), mask_hidden)
        write = SlotWrite.at(context.rows, context.starts, width + num_masks, device)
        wanted = [list(range(first, first + num_tokens)) for first in context.last] if num_tokens else None
        inputs, residual = self.first_layer.join(embeds, hidden)
        states_BKH = self.extend(inputs, residual, context.cache, write, wanted)
        if num_tokens:
            for logits_BD in self.lm_head(self.norm(states_BKH)).unbind(1):
                drafts.draw(logits_BD)
        return drafts.proposal(context)
