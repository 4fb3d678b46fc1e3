"""Training a P-EAGLE draft: every depth of every anchor is compared with the verifier in one pass.

The element (a, d) stands for the slot d behind position a, which serving fills when token a is the last whose states
are known and token a+1 has just been chosen. Its prediction is compared with the verifier's distribution over token
a+2+d. It counts where that token is one the verifier wrote, in the same document, as are those of the depths before.
Shape suffixes as in `depths`.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.eagle3.distillation import FusedObjective, align
from speculators.models.family import Count
from speculators.models.losses import VerifierHead
from speculators.models.objective import unwrapped
from speculators.models.peagle.depths import sample_anchors
from speculators.models.peagle.model import PEagleModel
from speculators.models.peagle.parallel import Depths
from speculators.models.supervision import (
    acceptance_counts,
    counted_positions,
    nothing_to_learn,
    step_metrics,
    sums_by_step,
)


class PEagleObjective(FusedObjective):
    """The knobs of training a P-EAGLE draft, and its training step; `FusedObjective` has the others.

    `num_depths` slots are trained at once, the last verified position and those behind it. Of a document's n elements
    that could be, depth d keeps int((n - d) * max(down_sample_ratio^d, down_sample_ratio_min)) while training, and all
    of them in evaluation.
    """

    num_depths: int = Field(default=8, ge=1, le=64)
    down_sample_ratio: float = Field(default=0.7, gt=0, le=1)
    down_sample_ratio_min: float = Field(default=0.2, ge=0, le=1)

    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """Loss and counts of one batch; the loss is the mean over all elements that were kept.

        Counts: `loss` (sum and number of elements), `loss_d` (those of depth d), `full_acc_d` (the depths 0..d all
        right, of the anchors kept at depth d), `cond_acc_d` (depth d right, given the depths 0..d-1 were).
        """
        model = unwrapped(draft, PEagleModel)
        aligned = align(batch)
        if not aligned.document_lengths:
            return nothing_to_learn(model, self.num_depths)
        counted_KC = counted_positions(aligned.supervised_C, aligned.document_lengths, self.num_depths)
        ratio = self.down_sample_ratio if draft.training else 1.0
        anchors = sample_anchors(counted_KC, aligned.document_lengths, ratio, self.down_sample_ratio_min)
        states = draft(
            Depths(aligned.features_CX, aligned.token_ids_C, aligned.positions_C, aligned.document_lengths, anchors)
        )
        places_N = torch.cat([places + depth for depth, places in enumerate(anchors)])
        losses = self.compare(model, aligned, verifier_head, torch.cat(states), places_N)
        kept_KC = torch.zeros_like(counted_KC)
        for kept_C, places in zip(kept_KC, anchors, strict=True):
            kept_C[places] = True
        totals_K, sizes = sums_by_step(losses.loss.detach(), kept_KC)
        totals, counts = totals_K.tolist(), acceptance_counts(losses.draft_argmax == losses.verifier_argmax, kept_KC)
        metrics = step_metrics(Count(sum(totals), sum(sizes)), totals, sizes, counts)
        return StepOutput(losses.loss.sum() / sum(sizes), metrics)
