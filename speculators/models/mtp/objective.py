"""FastMTP (arXiv 2509.18362): one block is trained to draft several tokens ahead from its own output.

Step k at position t of a document takes the embedding of token t+k+1 beside the state of step k-1 (the verifier's of
token t at step 0), and is compared with the data's token t+k+2. It counts where that token is one the verifier wrote.
Every step runs over the same positions, those from which the last step still has a token to be compared with. Shape
suffixes: B rows, T tokens, N = B*T positions, C those that are run over, K steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from speculators.models.draft_model import Objective, PackedBatch, StepOutput
from speculators.models.family import Count
from speculators.models.losses import VerifierHead, data_cross_entropy
from speculators.models.mtp.model import MtpModel, MtpSteps, Part
from speculators.models.supervision import acceptance_counts, document_runs, predicted_length, step_metrics


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
    runs_N = document_runs(batch.document_ids)
    reach = num_steps + 1
    index_N = torch.arange(len(runs_N) - reach if len(runs_N) > reach else 0, device=runs_N.device)
    inside_N = (runs_N[index_N] >= 0) & (runs_N[index_N] == runs_N[index_N + reach])
    shifts_K1 = torch.arange(num_steps, device=runs_N.device)[:, None]
    mask_N = batch.loss_mask.flatten()
    counts_N = mask_N[index_N + shifts_K1 + 2].any(0) & inside_N
    last_D = torch.full((int(runs_N.max().clamp(min=0)) + 1,), -1, device=runs_N.device)
    last_D = last_D.scatter_reduce(0, runs_N[index_N[counts_N]], index_N[counts_N], "amax")
    kept_C = index_N[inside_N & (index_N <= last_D[runs_N[index_N].clamp(min=0)])]
    lengths = torch.bincount(runs_N[kept_C], minlength=1).tolist()
    ids_N = batch.input_ids.flatten()
    inputs = MtpSteps(
        states_CH=batch.last_hidden_states.flatten(0, 1)[kept_C],
        positions_C=batch.position_ids.flatten()[kept_C],
        token_ids_KC=ids_N[kept_C + shifts_K1 + 1],
        document_lengths=[length for length in lengths if length],
    )
    return AlignedSteps(inputs, ids_N[kept_C + shifts_K1 + 2], mask_N[kept_C + shifts_K1 + 2])


class MtpObjective(BaseModel, Objective):
    """The knobs of training an MTP draft, and its training step.

    Step k of `num_steps` weighs step_decay^k, divided by the sum of all steps' weights; `step_weights`, one a step, are
    taken instead as they are where they are given. `normed_states` applies the
    verifier's final norm to the stored states, which is what serving feeds; without it the block is trained on the
    states before that norm. `frozen` parts of a mixture of experts are not trained; the load-balancing loss of routers
    and dropout are always off. `chunk_rows` bounds how many rows have logits at a time.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

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
        model = cast(MtpModel, getattr(draft, "module", draft))
        for part in self.frozen:
            for parameter in model.parameters_of(part):
                parameter.requires_grad_(False)
        aligned = align(batch, self.num_steps)
        if not aligned.inputs.document_lengths:
            return self._nothing(model)
        if self.normed_states:
            aligned.inputs.states_CH = verifier_head.norm(aligned.inputs.states_CH)
        states = draft(aligned.inputs)
        hidden_NH = torch.cat([state[mask] for state, mask in zip(states, aligned.counted_KC, strict=True)])
        labels_N = aligned.labels_KC[aligned.counted_KC]
        losses_N, found_N = data_cross_entropy(hidden_NH, verifier_head.head, labels_N, self.chunk_rows)
        sizes = aligned.counted_KC.sum(1).tolist()
        totals = torch.stack([part.sum() for part in losses_N.split(sizes)])
        weights = self._weights(totals)
        loss = (weights * totals / torch.tensor(sizes, device=totals.device).clamp(min=1)).sum()
        hits = (found_N == labels_N).split(sizes)
        counts = acceptance_counts(hits, list(aligned.counted_KC))
        return StepOutput(loss, self._metrics(totals.detach(), sizes, counts))

    def acceptance_length(self, metrics: dict[str, Count]) -> float:
        """1 + the shares of positions that were right at steps 0..k, summed over k: greedy drafting with K = steps."""
        return predicted_length(metrics, self.num_steps)

    def _weights(self, like: Tensor) -> Tensor:
        if self.step_weights is not None:
            return torch.tensor(self.step_weights, dtype=like.dtype, device=like.device)
        decayed = self.step_decay ** torch.arange(self.num_steps, dtype=like.dtype, device=like.device)
        return decayed / decayed.sum()

    def _metrics(self, totals: Tensor, sizes: list[int], counts: list[list[int]]) -> dict[str, Count]:
        weighted = self.num_steps * float((self._weights(totals) * totals).sum())
        losses = [Count(total, size) for total, size in zip(totals.tolist(), sizes, strict=True)]
        return step_metrics(Count(weighted, sum(sizes)), losses, counts)

    def _nothing(self, model: MtpModel) -> StepOutput:
        """A zero that can be differentiated, and empty counts."""
        zero = torch.stack([parameter.sum() for parameter in model.trained_parameters()]).sum() * 0.0
        steps = self.num_steps
        return StepOutput(zero, self._metrics(torch.zeros(steps), [0] * steps, [[0, 0, 0]] * steps))
