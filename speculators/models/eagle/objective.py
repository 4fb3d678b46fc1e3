"""Training an EAGLE draft to continue the verifier's last states and to predict what its head makes of them.

Position c of a document carries the verifier's state of token c after its final norm and the id of token c+1. Step 0 is
compared with the verifier's state of token c+1 and its distribution over token c+2; later steps (HASS) stand k
positions further on and continue the draft's own states. Step k counts where token c+2+k is one the verifier wrote, in
the same document: EAGLE's own code asks that of token c+k, so that it also trains on the last tokens of a prompt and
not on the last two of an answer. Shape suffixes as in `model`; N compared rows, M verifier rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.eagle.model import EagleModel
from speculators.models.execution import Execution
from speculators.models.family import Count
from speculators.models.loss_choice import LossChoice
from speculators.models.losses import TokenLoss, VerifierHead
from speculators.models.objective import LossTerms, TrainingObjective, unwrapped
from speculators.models.supervision import (
    acceptance_counts,
    counted_states,
    document_runs,
    nothing_to_learn,
    schedule,
    step_metrics,
    sums_by_step,
    supervised,
    up_to_last,
)
from speculators.models.unroll import Unroll

# Length of a document at which the noise on features has the width of the setting.
NOISE_TOKENS = 512
# Of the denominators; EAGLE's.
EPSILON = 1e-5


@dataclass
class AlignedBatch:
    """A batch without padding, shifted for step 0: index c of every field belongs to the prediction of token c+2.

    Documents lie one after another, `document_lengths` positions each. `features_CH` and `targets_CH`: the verifier's
    states after its final norm of a token and of the next one; `token_ids_C` int64, that next token; `positions_C`
    int64, the rotary position; `supervised_C` bool; `tokens_C` int64, how many tokens the whole document has. Step k at
    c takes token, target and mask at c + k.
    """

    features_CH: Tensor
    targets_CH: Tensor
    token_ids_C: Tensor
    positions_C: Tensor
    supervised_C: Tensor
    tokens_C: Tensor
    document_lengths: list[int]


def align(batch: PackedBatch, verifier_head: VerifierHead) -> AlignedBatch:
    """Shift a raw batch, and leave out padding, documents without supervision and what follows the last of it."""
    runs_N, supervised_N = document_runs(batch.document_ids), supervised(batch, 2)
    kept_C, lengths = up_to_last(supervised_N, runs_N)
    tokens_D = torch.bincount(runs_N[runs_N >= 0])
    states_NH = batch.last_hidden_states.flatten(0, 1)
    return AlignedBatch(
        features_CH=verifier_head.norm(states_NH.index_select(0, kept_C)),
        targets_CH=verifier_head.norm(states_NH.index_select(0, kept_C + 1)),
        token_ids_C=batch.input_ids.flatten()[kept_C + 1],
        positions_C=batch.position_ids.flatten()[kept_C],
        supervised_C=supervised_N[kept_C],
        tokens_C=tokens_D[runs_N[kept_C]],
        document_lengths=lengths,
    )


class EagleObjective(TrainingObjective):
    """The knobs of training an EAGLE draft, and its training step (EAGLE, arXiv 2401.15077; HASS, 2408.15766).

    `regression_weight` weighs the smooth L1 distance to the verifier's next state, averaged over its width; `loss` the
    terms of `losses.TERMS` between both distributions. HASS adds `{"top10_ce": 1.0}` in its second phase and takes
    `num_passes` 3: that many steps are trained, each on the states that the one before it left. `feature_noise` is the
    width of the uniform noise on the features of a document of 512 tokens (of T tokens: times 512 / T), in training
    mode only. `chunk_rows` bounds how many verifier rows have logits at a time.
    """

    num_passes: int = Field(default=1, ge=1, le=64)
    regression_weight: float = Field(default=1.0, ge=0)
    loss: LossTerms = Field(default={"soft_ce": 0.1})
    feature_noise: float = Field(default=0.2, ge=0)
    chunk_rows: int = Field(default=128, ge=1)

    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """The loss is the sum over steps of (sum of losses) / (N + 1e-5), N the positions that count at step 0.

        Both sides' distributions are made by the verifier's head, with its scale and softcap. Counts: `loss` (that sum
        and N), `loss_k` (of step k), `full_acc_k` (steps 0..k all right, of the positions that count at all of them),
        `cond_acc_k` (step k right, given steps 0..k-1 were).
        """
        model = unwrapped(draft, EagleModel)
        aligned = align(batch, verifier_head)
        if not aligned.document_lengths:
            return nothing_to_learn(model, self.num_passes)
        slots, counted_KC = schedule(aligned.supervised_C, aligned.document_lengths, self.num_passes)
        features_CH = self._noisy(aligned) if model.training else aligned.features_CH
        inputs = Unroll(features_CH, aligned.token_ids_C, aligned.positions_C, aligned.document_lengths, slots)
        states_NH, places_N = counted_states(draft(inputs), slots, counted_KC)
        token_loss = self._token_loss(model.loss_choice)
        loss_N, hits_N = self._compare(token_loss, states_NH, places_N, aligned, verifier_head)
        totals_K, sizes = sums_by_step(loss_N, counted_KC)
        totals, counts = totals_K.tolist(), acceptance_counts(hits_N, counted_KC)
        metrics = step_metrics(Count(sum(totals), sizes[0]), totals, sizes, counts)
        return StepOutput(totals_K.sum() / (sizes[0] + EPSILON), metrics)

    def require_possible(self, execution: Execution) -> None:
        """Raise UsageError where Triton is asked for `loss` and has no kernel for it."""
        self._token_loss(LossChoice(execution.losses))

    def _token_loss(self, choice: LossChoice) -> TokenLoss:
        return TokenLoss(self.loss, self.chunk_rows, choice=choice)

    def _compare(
        self,
        token_loss: TokenLoss,
        states_NH: Tensor,
        places_N: Tensor,
        aligned: AlignedBatch,
        verifier_head: VerifierHead,
    ) -> tuple[Tensor, Tensor]:
        """Losses [N], and whether both sides' likeliest token is one; row n belongs to the target at `places_N[n]`."""
        rank_C = aligned.supervised_C.cumsum(0) - 1
        targets_MH, rows_N = aligned.targets_CH[aligned.supervised_C], rank_C[places_N]
        head = verifier_head.head
        found = token_loss(states_NH, head, targets_MH, head, rows_N)
        distance_NH = F.smooth_l1_loss(states_NH.float(), targets_MH.index_select(0, rows_N).float(), reduction="none")
        loss_N = self.regression_weight * distance_NH.mean(-1) + found.loss
        return loss_N, found.draft_argmax == found.verifier_argmax

    def _noisy(self, aligned: AlignedBatch) -> Tensor:
        """Features with noise from torch's global generator of the CPU, so that a resumed run draws the same."""
        if not self.feature_noise:
            return aligned.features_CH
        noise_CH = torch.rand(aligned.features_CH.shape).to(aligned.features_CH) - 0.5
        width_C1 = self.feature_noise * NOISE_TOKENS / aligned.tokens_C[:, None]
        return aligned.features_CH + noise_CH * width_C1
