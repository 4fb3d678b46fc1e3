"""FastMTP (arXiv 2509.18362): one block is trained to draft several tokens ahead from its own output.

Step k at position t of a document takes the embedding of token t+k+1 beside the state of step k-1 (the verifier's of
token t at step 0), and is compared with the data's token t+k+2. It counts where that token is one the verifier wrote.
Every step runs over the same positions, those from which the last step still has a token to be compared with. Shape
suffixes: B rows, T tokens, N = B*T positions, C those that are run over, K steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.family import Count
from speculators.models.losses import VerifierHead, data_cross_entropy
from speculators.models.mtp.model import MtpModel, MtpSteps, Part
from speculators.models.objective import TrainingObjective, unwrapped
from speculators.models.position_weights import step_decay
from speculators.models.supervision import (
    acceptance_counts,
    document_runs,
    nothing_to_learn,
    step_metrics,
    sums_by_step,
    up_to_last,
)


@dataclass
class AlignedSteps:
    """A batch without padding, shifted for every step.

    `inputs`: what the model reads. `labels_KC` int64: the token that step k is compared with; `counted_KC` bool:
    whether the verifier wrote it.
    """

    inputs: MtpSteps
    labels_KC: Tensor
    counted_KC: Tensor


def align(batch: PackedBatch, num_steps: int) -> AlignedSteps:
    """Shift a raw batch for `num_steps` steps.

    A document of T tokens has T - num_steps - 1 positions; those after the last that counts at any step are left out.
    """
    runs_N, mask_N, ids_N = document_runs(batch.document_ids), batch.loss_mask.flatten(), batch.input_ids.flatten()
    reach = num_steps + 1
    index_N = torch.arange(len(runs_N) - reach if len(runs_N) > reach else 0, device=runs_N.device)
    shifts_K1 = torch.arange(num_steps, device=runs_N.device)[:, None]
    counts_N = torch.zeros_like(mask_N)
    counts_N[index_N] = mask_N[index_N + shifts_K1 + 2].any(0) & (runs_N[index_N] == runs_N[index_N + reach])
    kept_C, lengths = up_to_last(counts_N & (runs_N >= 0), runs_N)
    inputs = MtpSteps(
        states_CH=batch.last_hidden_states.flatten(0, 1)[kept_C],
        positions_C=batch.position_ids.flatten()[kept_C],
        token_ids_KC=ids_N[kept_C + shifts_K1 + 1],
        document_lengths=lengths,
    )
    return AlignedSteps(inputs, ids_N[kept_C + shifts_K1 + 2], mask_N[kept_C + shifts_K1 + 2])


class MtpObjective(TrainingObjective):
    """The knobs of training an MTP draft, and its training step.

    Step k of `num_steps` weighs step_decay^k, divided by the sum of all steps' weights; `step_weights`, one a step, are
    taken instead as they are where they are given. `normed_states` applies the verifier's final norm to the stored
    states, which is what serving feeds; without it the block is trained on the states before that norm. `frozen` parts
    of a mixture of experts are not trained; the load-balancing loss of routers and dropout are always off. `chunk_rows`
    bounds how many rows have logits at a time.
    """

    num_steps: int = Field(default=3, ge=1, le=64)
    step_decay: float = Field(default=0.6, gt=0, le=1)
    step_weights: list[Annotated[float, Field(ge=0, le=1e6)]] | None = None
    normed_states: bool = True
    frozen: list[Part] = Field(default=[])
    chunk_rows: int = Field(default=128, ge=1)

    @model_validator(mode="after")
    def _a_weight_a_step(self) -> Self:
        if self.step_weights is not None and len(self.step_weights) != self.num_steps:
            raise ValueError(f"step_weights has {len(self.step_weights)} entries; num_steps is {self.num_steps}")
        return self

    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """The loss is the sum over steps of weight_k * (mean cross entropy over the labels that count at step k).

        Counts: `loss_k` (cross entropies at step k, labels), `full_acc_k` (steps 0..k all right, of the positions that
        count at all of them), `cond_acc_k` (step k right, given steps 0..k-1 were), and `loss` (weighted so that its
        rate is the loss where every step counts as many labels, and of all steps' labels the count).
        """
        model = unwrapped(draft, MtpModel)
        for part in self.frozen:
            for parameter in model.parameters_of(part):
                parameter.requires_grad_(False)
        aligned = align(batch, self.num_steps)
        if not aligned.inputs.document_lengths:
            return nothing_to_learn(model, self.num_steps)
        if self.normed_states:
            aligned.inputs.states_CH = verifier_head.norm(aligned.inputs.states_CH)
        states = draft(aligned.inputs)
        hidden_NH = torch.cat([state[mask] for state, mask in zip(states, aligned.counted_KC, strict=True)])
        labels_N = aligned.labels_KC[aligned.counted_KC]
        losses_N, found_N = data_cross_entropy(
            hidden_NH, verifier_head.head, labels_N, self.chunk_rows, model.loss_choice
        )
        totals_K, sizes = sums_by_step(losses_N, aligned.counted_KC)
        weights_K = self._weights(totals_K)
        loss = (weights_K * totals_K / torch.tensor(sizes, device=totals_K.device).clamp(min=1)).sum()
        weighted = Count(self.num_steps * float((weights_K * totals_K.detach()).sum()), sum(sizes))
        counts = acceptance_counts(found_N == labels_N, aligned.counted_KC)
        return StepOutput(loss, step_metrics(weighted, totals_K.tolist(), sizes, counts))

    def _weights(self, like: Tensor) -> Tensor:
        if self.step_weights is not None:
            return torch.tensor(self.step_weights, dtype=like.dtype, device=like.device)
        decayed = step_decay(self.num_steps, self.step_decay).to(like)
        return decayed / decayed.sum()
