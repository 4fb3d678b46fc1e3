"""What the slots of training blocks are compared with, how much they weigh, and how often they were right.

Of a block with anchor a, predicting slot j (from 0) predicts token a + j + 1, as the verifier did at token a + j. Shape
suffixes: C context positions, A blocks, J predicting slots of a block, N those of all blocks that count, M verifier
states that they are compared with, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.models.dflash.anchors import Positions
from speculators.models.dflash.config import BlockDraftConfig
from speculators.models.dflash.model import BlockInputs
from speculators.models.family import Count
from speculators.models.losses import Head, TokenLoss, TokenLosses, VerifierHead
from speculators.models.supervision import acceptance_counts, acceptance_metrics

# Keeps a batch in which nothing counts from dividing by zero.
EPSILON = 1e-5


@dataclass
class Supervision:
    """Blocks of a batch: where they stand, and which of their predicting slots count.

    `before_AJ` int64: the context position of the token before the one that slot j predicts, where the verifier
    predicted it. `counted_AJ` bool: slot j stands on a token that the verifier wrote.
    """

    positions: Positions
    anchors_A: Tensor
    before_AJ: Tensor
    counted_AJ: Tensor

    @classmethod
    def of(cls, positions: Positions, anchors_A: Tensor, config: BlockDraftConfig) -> Supervision:
        """The slots of blocks at these anchors; every block lies within its document, with a token after it."""
        slots_J = torch.arange(config.max_speculative_tokens, device=anchors_A.device)
        before_AJ = anchors_A[:, None] + slots_J
        return cls(positions, anchors_A, before_AJ, positions.supervised_C[before_AJ + config.first_slot])

    @property
    def inputs(self) -> BlockInputs:
        """What the model's forward takes."""
        rows = self.positions
        anchor_ids_A = rows.token_ids_C[self.anchors_A]
        return BlockInputs(rows.features_CX, rows.positions_C, rows.document_lengths, self.anchors_A, anchor_ids_A)

    @property
    def previous_ids_AJ(self) -> Tensor:
        """int64: the data's token before the one that each slot predicts, an id of the verifier's."""
        return self.positions.token_ids_C[self.before_AJ]

    def teacher_rows(self) -> tuple[Tensor, Tensor]:
        """Context positions [M] of the verifier's states that count, and which of them each counted slot has [N]."""
        places_M, rows_N = self.before_AJ[self.counted_AJ].unique(return_inverse=True)
        return places_M, rows_N

    def spread(self, values_N: Tensor) -> Tensor:
        """Values of the slots that count as [A, J], with 0 (false) in the others; differentiable."""
        full_AJ = values_N.new_zeros(self.counted_AJ.shape)
        return full_AJ.masked_scatter(self.counted_AJ, values_N)

    def mean(self, values_AJ: Tensor, weights: Tensor, epsilon: float = EPSILON) -> Tensor:
        """sum of weights * values over the slots that count, by their number + `epsilon` (not by the weights' sum)."""
        counted_AJ = self.counted_AJ.to(values_AJ.dtype)
        return (values_AJ * weights * counted_AJ).sum() / (counted_AJ.sum() + epsilon)


def compare(
    loss: TokenLoss, supervision: Supervision, states_NH: Tensor, draft_head: Head, teacher: tuple[VerifierHead, Head]
) -> TokenLosses:
    """Compare states of the slots that count, in order, with the verifier's distributions there.

    `teacher` is the verifier's end and its head over the draft vocabulary.
    """
    verifier_head, head = teacher
    places_M, rows_N = supervision.teacher_rows()
    teacher_MH = verifier_head.norm(supervision.positions.last_hidden_states_CH[places_M].to(states_NH.dtype))
    return loss(states_NH, draft_head, teacher_MH, head, rows_N)


def prefix_lengths(accepted_AJ: Tensor) -> Tensor:
    """Expected tokens a verification of each block would emit, [A]: 1 + sum over j of accepted_0 ... accepted_j."""
    return 1 + accepted_AJ.cumprod(-1).sum(-1)


def block_metrics(supervision: Supervision, losses: TokenLosses, first_slot: int) -> dict[str, Count]:
    """Counts of one batch from the losses of the slots that count.

    `position_acc` and `position_k_acc`: slots (of number k in their block) whose likeliest token is the verifier's, of
    those that count. `accept_rate`: the same for drafts drawn from the draft's distribution, which a verifier accepts
    with probability 1 - total variation, and `accept_len`: tokens that a verification of a block of such drafts emits.
    `greedy_metrics` has the counts of greedy drafts.
    """
    assert losses.total_variation is not None
    counted_AJ, hits_N = supervision.counted_AJ, losses.draft_argmax == losses.verifier_argmax
    accepted_AJ = supervision.spread(1 - losses.total_variation.float())
    by_slot = torch.cat((counted_AJ.sum(0), supervision.spread(hits_N).sum(0))).tolist()
    accepted, accept_len = torch.stack((accepted_AJ.sum(), prefix_lengths(accepted_AJ).sum())).tolist()
    slots = len(by_slot) // 2
    pairs = list(zip(by_slot[slots:], by_slot[:slots], strict=True))
    size = sum(by_slot[:slots])
    found = {
        "accept_rate": Count(accepted, size),
        "accept_len": Count(accept_len, len(counted_AJ)),
        "position_acc": Count(sum(by_slot[slots:]), size),
    }
    by_position = {f"position_{slot}_acc": Count(*pair) for slot, pair in enumerate(pairs, first_slot)}
    return found | by_position | greedy_metrics(supervision, hits_N)


def greedy_metrics(supervision: Supervision, hits_N: Tensor) -> dict[str, Count]:
    """Counts of greedy drafts, of which `hits_N` bool says whether a slot that counts proposes the verifier's token.

    `full_acc_j` and `cond_acc_j` as of `supervision.acceptance_metrics`, j counting the slots that predict from 0.
    `eal`: expected accepted length over blocks, one more than a block's first right slots; a slot that does not count
    ends them.
    """
    counted_JA, hits_AJ = supervision.counted_AJ.T, supervision.spread(hits_N)
    counts = acceptance_counts(hits_AJ.T[counted_JA], counted_JA)
    eal = Count(float(prefix_lengths(hits_AJ.long()).sum()), len(hits_AJ))
    return {"eal": eal} | acceptance_metrics(counts)
