"""What training EAGLE-3 and its descendants has in common: aligned batches, and the comparison with the verifier.

Shape suffixes: C context positions, N compared rows, M verifier rows, H hidden, X features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import Field, PrivateAttr
from torch import Tensor, nn

from speculators.models.draft_model import PackedBatch, SampleSource
from speculators.models.eagle3.closed_form import closed_form_start
from speculators.models.eagle3.network import FusedDraftModel
from speculators.models.execution import Execution
from speculators.models.loss_choice import LossChoice
from speculators.models.losses import Head, TokenLoss, TokenLosses, VerifierHead
from speculators.models.objective import LossTerms, TeacherHead, TrainingObjective
from speculators.models.supervision import document_runs, supervised, up_to_last


@dataclass
class AlignedBatch:
    """A batch without padding, shifted for step 0: index c of every field belongs to the prediction of token c+2.

    Documents lie one after another, `document_lengths` positions each. `features_CX`; `token_ids_C` int64, the token
    after the features'; `positions_C` int64, the rotary position; `last_hidden_states_CH`, the verifier's state (before
    its final norm) at that token; `supervised_C` bool. Step k at c takes token, state and mask at c + k.
    """

    features_CX: Tensor
    token_ids_C: Tensor
    positions_C: Tensor
    last_hidden_states_CH: Tensor
    supervised_C: Tensor
    document_lengths: list[int]


def align(batch: PackedBatch) -> AlignedBatch:
    """Shift a raw batch, and leave out padding, documents without supervision and what follows the last of it."""
    supervised_N = supervised(batch, 2)
    kept_C, lengths = up_to_last(supervised_N, document_runs(batch.document_ids))

    def rows(tensor: Tensor, shift: int) -> Tensor:
        return tensor.flatten(0, 1).index_select(0, kept_C + shift)

    return AlignedBatch(
        features_CX=rows(batch.aux_hidden_states, 0),
        token_ids_C=rows(batch.input_ids, 1),
        positions_C=rows(batch.position_ids, 0),
        last_hidden_states_CH=rows(batch.last_hidden_states, 1),
        supervised_C=supervised_N[kept_C],
        document_lengths=lengths,
    )


class FusedObjective(TrainingObjective):
    """The knobs that such objectives share.

    `loss` weighs the terms of `losses.TERMS`. `chunk_rows` bounds how many verifier rows have logits at a time.
    `closed_form_rows` positions are regressed on before the first step (see `closed_form`; 0: start at random).
    """

    loss: LossTerms = Field(default={"kl_div": 1.0})
    chunk_rows: int = Field(default=128, ge=1)
    closed_form_rows: int = Field(default=32_768, ge=0)

    _teacher: TeacherHead = PrivateAttr(default_factory=TeacherHead)

    def begin(self, draft: nn.Module, samples: SampleSource, verifier_head: VerifierHead) -> None:
        """Start from the linear regression of `closed_form`."""
        assert isinstance(draft, FusedDraftModel)
        if self.closed_form_rows:
            closed_form_start(draft, samples, verifier_head, self.closed_form_rows)

    def for_trained_draft(self) -> Self:
        """The same without `closed_form_rows`, whose regression would replace what the draft has learnt."""
        return self.model_copy(update={"closed_form_rows": 0})

    def require_possible(self, execution: Execution) -> None:
        """Raise UsageError where Triton is asked for `loss` and has no kernel for it."""
        TokenLoss(self.loss, choice=LossChoice(execution.losses))

    def compare(
        self,
        model: FusedDraftModel,
        batch: AlignedBatch,
        verifier_head: VerifierHead,
        hidden_NH: Tensor,
        places_N: Tensor,
    ) -> TokenLosses:
        """Losses of draft states, which `lm_head` reads, against the verifier's at supervised context positions [N]."""
        rank_C = batch.supervised_C.cumsum(0) - 1
        teacher_MH = verifier_head.norm(batch.last_hidden_states_CH[batch.supervised_C].to(hidden_NH.dtype))
        head = self._teacher.over_draft_vocabulary(model, verifier_head)
        loss = TokenLoss(self.loss, self.chunk_rows, choice=model.loss_choice)
        draft_head = Head(self._teacher.draft_weight(model, verifier_head))
        return loss(hidden_NH, draft_head, teacher_MH, head, rank_C[places_N])
