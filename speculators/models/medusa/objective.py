"""Training a Medusa draft: every head learns the data's token so many places ahead.

Head k at position t of a document reads the verifier's state of token t and is compared with token t+2+k. It counts
where that token is one the verifier wrote, in the same document. Shape suffixes: N all positions, R those that count
for some head, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from speculators.models.draft_model import Objective, PackedBatch, StepOutput
from speculators.models.family import Count
from speculators.models.losses import Head, VerifierHead, data_cross_entropy
from speculators.models.medusa.model import MedusaModel
from speculators.models.supervision import acceptance_counts, predicted_length, step_metrics, supervised


class MedusaObjective(BaseModel, Objective):
    """The knobs of training a Medusa draft, and its training step (Medusa-1 of arXiv 2401.10774: the verifier frozen).

    Head k weighs `head_decay ** k`. `chunk_rows` bounds how many rows have logits at a time.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    head_decay: float = Field(default=0.8, gt=0, le=1)
    chunk_rows: int = Field(default=128, ge=1)

    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """The loss is sum over heads of head_decay^k * (sum of cross entropies) / N, N the tokens that head 0 predicts.

        Tokens outside a truncated vocabulary have no loss and count as wrong. Counts: `loss` (that sum and N), `loss_k`
        (of head k, without decay), `full_acc_k` (heads 0..k all right, of the positions that count for all of them),
        `cond_acc_k` (head k right, given heads 0..k-1 were).
        """
        model = cast(MedusaModel, getattr(draft, "module", draft))
        heads = model.config.medusa_num_heads
        counted_N = [supervised(batch, 2 + head) for head in range(heads)]
        rows_R = torch.nonzero(torch.stack(counted_N).any(0)).squeeze(1)
        states_R = verifier_head.norm(batch.last_hidden_states.flatten(0, 1).index_select(0, rows_R))
        outputs = draft(states_R)
        tokens_N = batch.input_ids.flatten()
        total = states_R.new_zeros(())
        losses, hits, counted = [], [], []
        for head, (hidden_RH, mask_N) in enumerate(zip(outputs, counted_N, strict=True)):
            mask_R = mask_N.index_select(0, rows_R)
            labels, known = _draft_labels(tokens_N[rows_R[mask_R] + 2 + head], model.verifier_ids_D)
            hidden_NH = hidden_RH[mask_R][known]
            weight = model.output_head(head).weight
            loss_N, best_N = data_cross_entropy(hidden_NH, Head(weight), labels[known], self.chunk_rows)
            hit = torch.zeros_like(known)
            hit[known] = best_N == labels[known]
            total = total + self.head_decay**head * loss_N.sum()
            losses.append(Count(float(loss_N.detach().sum()), int(known.sum())))
            hits.append(hit)
            counted.append(mask_R)
        size = losses[0].count
        loss = Count(float(total.detach()), size)
        metrics = step_metrics(loss, losses, acceptance_counts(hits, counted))
        return StepOutput(total / max(size, 1), metrics)

    def acceptance_length(self, metrics: dict[str, Count]) -> float:
        """1 + the shares of positions where heads 0..k were right, summed over k: greedy drafting by all heads."""
        return predicted_length(metrics, sum(name.startswith("full_acc_") for name in metrics))


def _draft_labels(token_ids_N: Tensor, verifier_ids_D: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draft ids of the verifier's tokens, int64 [N], and whether there is one, bool [N]."""
    if verifier_ids_D is None:
        return token_ids_N, torch.ones_like(token_ids_N, dtype=torch.bool)
    at_N = torch.searchsorted(verifier_ids_D, token_ids_N).clamp(max=len(verifier_ids_D) - 1)
    return at_N, verifier_ids_D[at_N] == token_ids_N
