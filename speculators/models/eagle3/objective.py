"""Training-time test: an EAGLE-3 draft is trained on the states it will see in serving, its own.

Position c of a document carries the features of token c and the id of token c+1. At step k it takes token c+1+k beside
its own state of step k-1, and its prediction is compared with the verifier's distribution over token c+2+k. It counts
where that token is one the verifier wrote, in the same document. Shape suffixes as in `supervision`.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.eagle3.distillation import AlignedBatch, FusedObjective, align
from speculators.models.eagle3.model import Eagle3Model
from speculators.models.family import Count
from speculators.models.losses import VerifierHead
from speculators.models.objective import unwrapped
from speculators.models.position_weights import step_decay
from speculators.models.supervision import (
    acceptance_counts,
    counted_states,
    nothing_to_learn,
    schedule,
    step_metrics,
    sums_by_step,
)
from speculators.models.unroll import Unroll

# Keeps a step at which nothing counts from dividing by zero.
EPSILON = 1e-5


class Eagle3Objective(FusedObjective):
    """The knobs of training an EAGLE-3 draft, and its training step; `FusedObjective` has the others.

    `ttt_steps` steps are unrolled; step k weighs `step_decay ** k`. `windows_from_start` is for drafts with attention
    windows (see `Unroll`): servers count windows from the query, so leave it false to train what is served. With
    `mean_per_step`, a step's losses are averaged over the positions that count at it, not over those of step 0.
    """

    ttt_steps: int = Field(default=3, ge=1, le=64)
    step_decay: float = Field(default=0.8, gt=0, le=1)
    windows_from_start: bool = False
    mean_per_step: bool = False

    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """Loss and counts of one raw, unshifted batch."""
        return self.aligned_step(draft, align(batch), verifier_head)

    def aligned_step(self, draft: nn.Module, batch: AlignedBatch, verifier_head: VerifierHead) -> StepOutput:
        """The loss is sum over steps of step_decay^k * (sum of losses) / N, N the positions that count at step 0.

        Counts: `loss` (that sum and N), `loss_k` (losses at step k, without decay), `full_acc_k` (steps 0..k all right,
        of the positions that count at all of them), `cond_acc_k` (step k right, given steps 0..k-1 were).
        """
        model = unwrapped(draft, Eagle3Model)
        if not batch.document_lengths:
            return nothing_to_learn(model, self.ttt_steps)
        slots, counted_KC = schedule(batch.supervised_C, batch.document_lengths, self.ttt_steps)
        inputs = Unroll(
            batch.features_CX,
            batch.token_ids_C,
            batch.positions_C,
            batch.document_lengths,
            slots,
            self.windows_from_start,
        )
        hidden_NH, places_N = counted_states(draft(inputs), slots, counted_KC)
        losses = self.compare(model, batch, verifier_head, hidden_NH, places_N)
        totals_K, sizes = sums_by_step(losses.loss, counted_KC)
        decay_K = step_decay(self.ttt_steps, self.step_decay).to(totals_K.device)
        if self.mean_per_step:
            decay_K = decay_K * sizes[0] / (torch.tensor(sizes, device=totals_K.device) + EPSILON)
        loss = (decay_K * totals_K).sum()
        total, *totals = torch.cat((loss.detach()[None], totals_K.detach())).tolist()
        counts = acceptance_counts(losses.draft_argmax == losses.verifier_argmax, counted_KC)
        return StepOutput(loss / max(sizes[0], 1), step_metrics(Count(total, sizes[0]), totals, sizes, counts))
