"""Training of a DSpark draft: DFlash's blocks, each slot's logits biased by the data's token before it.

The confidence head learns how likely the verifier is to accept a token drawn from the draft, which is 1 less the total
variation between the two distributions. Shape suffixes as in `dflash.supervision`; R rank, X = H + R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.models.dflash.objective import DFlashObjective, TokenMeans
from speculators.models.dflash.supervision import Supervision
from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.dspark.model import DSparkModel
from speculators.models.family import Count
from speculators.models.losses import Head, VerifierHead
from speculators.models.objective import unwrapped
from speculators.models.position_weights import exponential_decay

# Keeps a batch in which nothing counts from dividing by zero; the token loss has a larger one.
CONFIDENCE_EPSILON = 1e-8


@dataclass
class _Blocks:
    """What one batch came to: the token losses, and the confidence head's logits of the slots that count."""

    supervision: Supervision
    tokens: TokenMeans
    confidence_N: Tensor | None

    @property
    def accepted_N(self) -> Tensor:
        """How likely the verifier is to accept a token drawn from each slot's distribution; without gradient."""
        assert self.tokens.losses.total_variation is not None
        return 1 - self.tokens.losses.total_variation


@dataclass
class Confidences:
    """What a confidence head said of some blocks, and what came of it; see `calibration.sequential_temperatures`.

    `logits_AJ` float32; `survived_AJ` the probability that the verifier accepts slot j of a block and all before it;
    `counted_AJ` bool, where a slot stands on a token that the verifier wrote.
    """

    logits_AJ: Tensor
    survived_AJ: Tensor
    counted_AJ: Tensor


class DSparkObjective(DFlashObjective):
    """The knobs of training a DSpark draft, and its training step: DFlash's, and `confidence_weight`.

    The confidence head's binary cross entropy weighs exp(-j / `decay_gamma`) by slot, whatever `position_weights` says,
    and `confidence_weight` as a whole. Its gradient flows into the backbone and W1, but not through its target.
    """

    confidence_weight: float = Field(default=1.0, ge=0)

    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """Loss and counts of one raw, unshifted batch.

        The loss is that of DFlash, plus the confidence head's. Counts besides DFlash's, over slots: `confidence_loss`;
        `confidence_abs_error`, |confidence - acceptance|; `confidence_pred_mean`; and `confidence_cumprod_bias`, by how
        much the running product of confidences exceeds that of acceptances.
        """
        model = unwrapped(draft, DSparkModel)
        blocks = self._compare(draft, model, self.supervise(model, batch), verifier_head)
        supervision, loss, found = blocks.supervision, blocks.tokens.loss, {}
        if blocks.confidence_N is not None:
            accepted_N = blocks.accepted_N
            error_N = F.binary_cross_entropy_with_logits(blocks.confidence_N, accepted_N, reduction="none")
            decay_J = exponential_decay(supervision.counted_AJ.shape[1], self.decay_gamma)
            error = supervision.mean(supervision.spread(error_N), decay_J.to(error_N.device), CONFIDENCE_EPSILON)
            loss = loss + self.confidence_weight * error
            found = _confidence_counts(supervision, blocks.confidence_N.detach().sigmoid(), accepted_N, error)
        return StepOutput(loss, self.counts(model, supervision, blocks.tokens, loss) | found)

    @torch.no_grad()
    def confidences(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> Confidences | None:
        """What the confidence head says of one batch, beside what is true; None for a draft without one."""
        model = unwrapped(draft, DSparkModel)
        blocks = self._compare(draft, model, self.supervise(model, batch), verifier_head)
        if blocks.confidence_N is None:
            return None
        spread = blocks.supervision.spread
        accepted_AJ = spread(blocks.accepted_N)
        return Confidences(spread(blocks.confidence_N), accepted_AJ.cumprod(-1), blocks.supervision.counted_AJ)

    def _compare(
        self, draft: nn.Module, model: DSparkModel, supervision: Supervision, verifier_head: VerifierHead
    ) -> _Blocks:
        """Run the backbone and both heads, and compare all slots that count with the verifier.

        Logits are states times the head plus rank vectors times W2: one product of both side by side.
        """
        counted_AJ = supervision.counted_AJ
        states_ASH = draft(supervision.inputs)
        embeds_AJR, vectors_AJR = model.rank_vectors(states_ASH, supervision.previous_ids_AJ)
        states_NH = states_ASH[:, model.config.first_slot :][counted_AJ]
        joined_NX = torch.cat((states_NH, vectors_AJR[counted_AJ]), -1)
        weight = self._teacher.draft_weight(model, verifier_head)
        head = Head(weight, low_rank=model.markov_head.markov_w2.weight)
        tokens = self.token_means(model, supervision, joined_NX, head, verifier_head)
        confidence_head = model.confidence_head
        confidence_N = None if confidence_head is None else confidence_head(states_NH, embeds_AJR[counted_AJ])
        return _Blocks(supervision, tokens, confidence_N)


def _confidence_counts(
    supervision: Supervision, confidence_N: Tensor, accepted_N: Tensor, error: Tensor
) -> dict[str, Count]:
    size = len(confidence_N)
    survival_AJ = supervision.spread(confidence_N).cumprod(-1) - supervision.spread(accepted_N).cumprod(-1)
    sums = ((confidence_N - accepted_N).abs().sum(), confidence_N.sum(), survival_AJ.sum(), error.detach() * size)
    names = ("confidence_abs_error", "confidence_pred_mean", "confidence_cumprod_bias", "confidence_loss")
    return {name: Count(value, size) for name, value in zip(names, torch.stack(sums).tolist(), strict=True)}
