"""Training a Medusa draft: every head learns the data's token so many places ahead, as `lookahead` says."""

from __future__ import annotations

from pydantic import Field
from torch import nn

from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.lookahead import Lookahead
from speculators.models.losses import Head, VerifierHead
from speculators.models.medusa.model import MedusaModel
from speculators.models.objective import TrainingObjective, unwrapped


class MedusaObjective(TrainingObjective):
    """The knobs of training a Medusa draft, and its training step (Medusa-1 of arXiv 2401.10774: the verifier frozen).

    Head k weighs `head_decay ** k`. `chunk_rows` bounds how many rows have logits at a time.
    """

    head_decay: float = Field(default=0.8, gt=0, le=1)
    chunk_rows: int = Field(default=128, ge=1)

    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """Loss and counts of one raw, unshifted batch, step k being head k; see `Lookahead.step_output`."""
        model = unwrapped(draft, MedusaModel)
        steps = range(model.config.medusa_num_heads)
        ahead = Lookahead.of(batch, len(steps), verifier_head)
        heads = [Head(model.output_head(step).weight) for step in steps]
        weights = [self.head_decay**step for step in steps]
        outputs, ids_D = draft(ahead.states_RH), model.verifier_ids_D
        return ahead.step_output(outputs, heads, weights, ids_D, self.chunk_rows, model.loss_choice)
