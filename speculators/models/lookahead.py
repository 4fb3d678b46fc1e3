"""Training of drafts that read one state of the verifier and predict the data's next tokens by a head each.

Step k at position t of a document reads the verifier's state of token t and is compared with token t+2+k. It counts
where that token is one the verifier wrote, in the same document. Shape suffixes: N all positions, R those that count at
some step, L those that count at one step and whose token the draft knows, K steps, P = K + 1 places, H hidden, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.family import Count
from speculators.models.heads import Head, VerifierHead
from speculators.models.loss_choice import LossChoice
from speculators.models.losses import data_cross_entropy
from speculators.models.supervision import acceptance_counts, step_metrics, supervised


@dataclass
class Lookahead:
    """The positions of a batch that count: `states_RH` after the verifier's final norm; `counted_KR` bool, at step k.

    `token_ids_RP` int64: the tokens 1, 2, ... P places further on; those beyond a document's end, or a row's, are read
    by steps alone that do not count there. Step k is compared with the one k + 2 places further on.
    """

    states_RH: Tensor
    counted_KR: Tensor
    token_ids_RP: Tensor

    @classmethod
    def of(cls, batch: PackedBatch, num_steps: int, verifier_head: VerifierHead) -> Lookahead:
        """Find what counts at any of `num_steps` steps."""
        counted_KN = torch.stack([supervised(batch, 2 + step) for step in range(num_steps)])
        rows_R = torch.nonzero(counted_KN.any(0)).squeeze(1)
        tokens_N = batch.input_ids.flatten()
        places = rows_R[:, None] + 1 + torch.arange(num_steps + 1, device=rows_R.device)
        return cls(
            verifier_head.norm(batch.last_hidden_states.flatten(0, 1).index_select(0, rows_R)),
            counted_KN[:, rows_R],
            tokens_N[places.clamp(max=len(tokens_N) - 1)],
        )

    def step_output(
        self,
        outputs: Sequence[Tensor],
        heads: Sequence[Head],
        weights: Sequence[float],
        verifier_ids_D: Tensor | None,
        chunk_rows: int,
        choice: LossChoice,
    ) -> StepOutput:
        """The loss is the sum over steps of weight_k * (sum of cross entropies) / N, N the tokens that step 0 predicts.

        `outputs` are the states [R, H] of each step that its head reads. Tokens outside the draft vocabulary
        (`verifier_ids_D` int64, ascending; None: every token) have no loss and count as wrong. Counts: `loss` (that sum
        and N), `loss_k` (of step k, without weight), `full_acc_k` (steps 0..k all right, of the positions that count at
        all of them), `cond_acc_k` (step k right, given steps 0..k-1 were).
        """
        total = self.states_RH.new_zeros(())
        totals, sizes, hits = [], [], []
        for step, (hidden_RH, head, weight) in enumerate(zip(outputs, heads, weights, strict=True)):
            counted_R = self.counted_KR[step]
            labels, known = _draft_labels(self.token_ids_RP[counted_R, step + 1], verifier_ids_D)
            loss_L, best_L = data_cross_entropy(hidden_RH[counted_R][known], head, labels[known], chunk_rows, choice)
            total = total + weight * loss_L.sum()
            totals.append(float(loss_L.detach().sum()))
            sizes.append(len(loss_L))
            hits.append(torch.zeros_like(known).masked_scatter(known, best_L == labels[known]))
        counts = acceptance_counts(torch.cat(hits), self.counted_KR)
        metrics = step_metrics(Count(float(total.detach()), sizes[0]), totals, sizes, counts)
        return StepOutput(total / max(sizes[0], 1), metrics)


def _draft_labels(token_ids: Tensor, verifier_ids_D: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draft ids of the verifier's tokens, int64, and whether there is one, bool; both of the tokens' shape."""
    if verifier_ids_D is None:
        return token_ids, torch.ones_like(token_ids, dtype=torch.bool)
    at = torch.searchsorted(verifier_ids_D, token_ids).clamp(max=len(verifier_ids_D) - 1)
    return at, verifier_ids_D[at] == token_ids
