"""Training an MLPSpeculator on the data's tokens: every step is given the true tokens before the one it predicts.

Step i at position t of a document reads the verifier's state of token t and the tokens t+1..t+1+i, and is compared with
token t+2+i. It counts where that token is one the verifier wrote, in the same document. Shape suffixes: N all
positions, R those that count at some step, H hidden, K steps.
"""

from __future__ import annotations

from typing import cast

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from speculators.models.draft_model import Objective, PackedBatch, StepOutput
from speculators.models.family import Count
from speculators.models.losses import Head, VerifierHead, data_cross_entropy
from speculators.models.mlp_speculator.model import MlpSpeculatorModel
from speculators.models.supervision import acceptance_counts, predicted_length, step_metrics, supervised


class MlpSpeculatorObjective(BaseModel, Objective):
    """The knobs of training an MLPSpeculator, and its training step (arXiv 2404.19124).

    Its two stages differ in their data alone, the second being text that the verifier wrote. `chunk_rows` bounds how
    many rows have logits at a time.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    chunk_rows: int = Field(default=128, ge=1)

    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """The loss is the sum over steps of (sum of cross entropies) / N, N the tokens that step 0 predicts.

        Counts: `loss` (that sum and N), `loss_k` (of step k), `full_acc_k` (steps 0..k all right, of the positions that
        count at all of them), `cond_acc_k` (step k right, given steps 0..k-1 were).
        """
        model = cast(MlpSpeculatorModel, getattr(draft, "module", draft))
        steps = model.config.n_predict
        counted_N = [supervised(batch, 2 + step) for step in range(steps)]
        rows_R = torch.nonzero(torch.stack(counted_N).any(0)).squeeze(1)
        tokens_N = batch.input_ids.flatten()
        # What lies beyond a document's end, or a row's, is read by steps alone that do not count there.
        after_RK = (rows_R[:, None] + 1 + torch.arange(steps, device=rows_R.device)).clamp(max=len(tokens_N) - 1)
        states_RH = verifier_head.norm(batch.last_hidden_states.flatten(0, 1).index_select(0, rows_R))
        outputs = draft(states_RH, tokens_N[after_RK])
        total = states_RH.new_zeros(())
        losses, hits, counted = [], [], []
        for step, (hidden_RH, mask_N) in enumerate(zip(outputs, counted_N, strict=True)):
            mask_R = mask_N.index_select(0, rows_R)
            labels_N = tokens_N[rows_R[mask_R] + 2 + step]
            head = Head(model.output_head(step).weight)
            loss_N, best_N = data_cross_entropy(hidden_RH[mask_R], head, labels_N, self.chunk_rows)
            total = total + loss_N.sum()
            losses.append(Count(float(loss_N.detach().sum()), len(labels_N)))
            hits.append(best_N == labels_N)
            counted.append(mask_R)
        size = losses[0].count
        metrics = step_metrics(Count(float(total.detach()), size), losses, acceptance_counts(hits, counted))
        return StepOutput(total / max(size, 1), metrics)

    def acceptance_length(self, metrics: dict[str, Count]) -> float:
        """1 + the shares of positions where steps 0..k were right, summed over k: greedy drafting by all steps."""
        return predicted_length(metrics, sum(name.startswith("full_acc_") for name in metrics))
