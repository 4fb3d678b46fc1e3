"""Training an MLPSpeculator: every step is given the data's tokens before the one it predicts, as `lookahead` says.

Step k at position t reads the verifier's state of token t and the tokens t+1..t+1+k, and predicts token t+2+k.
"""

from __future__ import annotations

from pydantic import Field
from torch import nn

from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.lookahead import Lookahead
from speculators.models.losses import Head, VerifierHead
from speculators.models.mlp_speculator.model import MlpSpeculatorModel
from speculators.models.objective import TrainingObjective, unwrapped


class MlpSpeculatorObjective(TrainingObjective):
    """The knobs of training an MLPSpeculator, and its training step (arXiv 2404.19124).

    Its two stages differ in their data alone, the second being text that the verifier wrote. `chunk_rows` bounds how
    many rows have logits at a time.
    """

    chunk_rows: int = Field(default=128, ge=1)

    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """Loss and counts of one raw, unshifted batch; all steps weigh 1, see `Lookahead.step_output`."""
        model = unwrapped(draft, MlpSpeculatorModel)
        steps = range(model.config.n_predict)
        ahead = Lookahead.of(batch, len(steps), verifier_head)
        heads = [Head(model.output_head(step).weight) for step in steps]
        outputs = draft(ahead.states_RH, ahead.token_ids_RP[:, :-1])
        return ahead.step_output(outputs, heads, [1.0] * len(steps), None, self.chunk_rows, model.loss_choice)
