"""What the slots of training blocks are compared with, how much they weigh, and how often they were right.

Of a block with anchor a, predicting slot j (from 0) predicts token a + j + 1, as the verifier did at token a + j. Shape
suffixes: C context positions, A blocks, J predicting slots of a block, N those of all blocks that count, M verifier
states that they are compared with, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speculators.models.dflash.anchors import Positions
from speculators.models.dflash.config import BlockDraftConfig
from speculators.models.dflash.model import BlockInputs, DFlashModel
from speculators.models.family import Count
from speculators.models.losses import Head, TokenLoss, TokenLosses, VerifierHead

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

    def mean(self, values_AJ: Tensor, weights: Tensor) -> Tensor:
        """sum of weights * values over the slots that count, divided by their number (not by the weights' sum)."""
        counted_AJ = self.counted_AJ.to(values_AJ.dtype)
        return (values_AJ * weights * counted_AJ).sum() / (counted_AJ.sum() + EPSILON)


class TeacherHead:
    """The verifier's head over the draft vocabulary, cut out once for all steps."""

    def __init__(self) -> None:
        self._known: tuple[VerifierHead, Tensor, Head] | None = None

    def over_draft_vocabulary(self, model: DFlashModel, verifier_head: VerifierHead) -> Head:
        """The head to compare with; the draft's own frozen weight where it is the same numbers, to keep one copy."""
        own = model.lm_head.weight
        if self._known is not None and self._known[0] is verifier_head and self._known[1] is own:
            return self._known[2]
        ids_D = model.verifier_ids_D
        head = verifier_head.head if ids_D is None else verifier_head.restricted(ids_D).head
        if not own.requires_grad and torch.equal(head.weight.to(own.dtype), own):
            head = replace(head, weight=own.detach())
        self._known = verifier_head, own, head
        return head


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

    `full_acc` and `position_k_acc`: slots (of number k in their block) whose likeliest token is the verifier's, of
    those that count. `eal`: expected accepted length for greedy drafts, one more than a block's first right slots, over
    blocks. `accept_rate` and `accept_len`: the same for drafts drawn from the draft's distribution, which a verifier
    accepts with probability 1 - total variation.
    """
    assert losses.total_variation is not None
    counted_AJ = supervision.counted_AJ
    hits_AJ = supervision.spread((losses.draft_argmax == losses.verifier_argmax).float())
    accepted_AJ = supervision.spread(1 - losses.total_variation.float())
    blocks = len(counted_AJ)
    sums = [hits_AJ.sum(), accepted_AJ.sum(), prefix_lengths(accepted_AJ).sum(), prefix_lengths(hits_AJ).sum()]
    totals = torch.cat((torch.stack(sums), counted_AJ.sum(0), hits_AJ.sum(0))).tolist()
    (hits, accepted, accept_len, eal), by_slot = totals[:4], totals[4:]
    slots = len(by_slot) // 2
    size = sum(by_slot[:slots])
    found = {
        "accept_rate": Count(accepted, size),
        "accept_len": Count(accept_len, blocks),
        "eal": Count(eal, blocks),
        "full_acc": Count(hits, size),
    }
    return found | _by_slot(by_slot[slots:], by_slot[:slots], first_slot)


def _by_slot(sums: Sequence[float], counts: Sequence[float], first_slot: int) -> dict[str, Count]:
    pairs = enumerate(zip(sums, counts, strict=True), first_slot)
    return {f"position_{slot}_acc": Count(right, count) for slot, (right, count) in pairs}
