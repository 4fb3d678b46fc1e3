"""Training a P-EAGLE draft: every depth of every anchor is compared with the verifier in one pass.

The element (a, d) stands for the slot d behind position a, which serving fills when token a is the last whose states
are known and token a+1 has just been chosen. Its prediction is compared with the verifier's distribution over token
a+2+d. It counts where that token is one the verifier wrote, in the same document, as are those of the depths before.
Shape suffixes as in `depths`.
"""

from __future__ import annotations

from typing import cast

import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator
from torch import Tensor, nn

from speculators.models.draft_model import Objective, PackedBatch, SampleSource, StepOutput
from speculators.models.eagle3.closed_form import closed_form_start
from speculators.models.eagle3.objective import (
    Distillation,
    acceptance_counts,
    align,
    counted_positions,
    named_counts,
    nothing_to_learn,
)
from speculators.models.family import Count
from speculators.models.losses import TokenLoss, VerifierHead
from speculators.models.peagle.depths import sample_anchors
from speculators.models.peagle.model import PEagleModel
from speculators.models.peagle.parallel import Depths


class PEagleObjective(BaseModel, Objective):
    """The knobs of training a P-EAGLE draft, and its training step.

    `num_depths` slots are trained at once, the last verified position and those behind it. Of a document's n elements
    that could be, depth d keeps int((n - d) * max(down_sample_ratio^d, down_sample_ratio_min)) while training, and all
    of them in evaluation. `loss` weighs the terms of `losses.TERMS`. `chunk_rows` bounds how many verifier rows have
    logits at a time. `closed_form_rows` positions are regressed on before the first step (see `eagle3.closed_form`; 0:
    start at random).
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    num_depths: int = Field(default=8, ge=1, le=64)
    down_sample_ratio: float = Field(default=0.7, gt=0, le=1)
    down_sample_ratio_min: float = Field(default=0.2, ge=0, le=1)
    loss: dict[str, float] = Field(default={"kl_div": 1.0})
    chunk_rows: int = Field(default=128, ge=1)
    closed_form_rows: int = Field(default=32_768, ge=0)

    _distillation: Distillation = PrivateAttr(default_factory=Distillation)

    @field_validator("loss")
    @classmethod
    def _known_terms(cls, value: dict[str, float]) -> dict[str, float]:
        TokenLoss(value)
        return value

    def begin(self, draft: nn.Module, samples: SampleSource, verifier_head: VerifierHead) -> None:
        """Start from the linear regression of `eagle3.closed_form`."""
        if self.closed_form_rows:
            closed_form_start(cast(PEagleModel, draft), samples, verifier_head, self.closed_form_rows)

    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """Loss and counts of one batch; the loss is the mean over all elements that were kept.

        Counts: `loss` (sum and number of elements), `loss_d` (those of depth d), `full_acc_d` (the depths 0..d all
        right, of the anchors kept at depth d), `cond_acc_d` (depth d right, given the depths 0..d-1 were).
        """
        model = cast(PEagleModel, getattr(draft, "module", draft))
        aligned = align(batch)
        if not aligned.document_lengths:
            return nothing_to_learn(model, self.num_depths)
        counted = counted_positions(aligned.supervised_C, aligned.document_lengths, self.num_depths)
        ratio = self.down_sample_ratio if draft.training else 1.0
        anchors = sample_anchors(counted, aligned.document_lengths, ratio, self.down_sample_ratio_min)
        states = draft(
            Depths(aligned.features_CX, aligned.token_ids_C, aligned.positions_C, aligned.document_lengths, anchors)
        )
        places_N = torch.cat([places + depth for depth, places in enumerate(anchors)])
        loss = TokenLoss(self.loss, self.chunk_rows)
        losses = self._distillation.compare(loss, model, aligned, verifier_head, torch.cat(states), places_N)
        sizes = [len(places) for places in anchors]
        sums = torch.stack([part.sum() for part in torch.split(losses.loss.detach(), sizes)]).tolist()
        hits = torch.split(losses.draft_argmax == losses.verifier_argmax, sizes)
        kept = [_marked(places, aligned.supervised_C) for places in anchors]
        counts = acceptance_counts(list(hits), kept).tolist()
        total = losses.loss.sum()
        metrics = named_counts([total.item(), *sums], counts, sizes) | {"loss": Count(sum(sums), sum(sizes))}
        return StepOutput(total / sum(sizes), metrics)

    def acceptance_length(self, metrics: dict[str, Count]) -> float:
        """1 + the shares of anchors that were right at depths 0..d, summed over d: greedy drafting of all depths."""
        return 1.0 + sum(metrics[f"full_acc_{depth}"].rate for depth in range(self.num_depths))


def _marked(places: Tensor, like_C: Tensor) -> Tensor:
    return torch.zeros_like(like_C).index_fill(0, places, True)
