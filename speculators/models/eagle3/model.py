"""The EAGLE-3 network: packed unrolling for training, incremental drafting for serving.

Shape suffixes as in `draft_model`; R context positions of a packed batch that are active at a step.
"""

from __future__ import annotations

from torch import Tensor

from speculators.models.draft_model import DraftContext
from speculators.models.eagle3.config import Eagle3Config
from speculators.models.eagle3.network import FusedDraftModel
from speculators.models.eagle3.unroll import Eagle3Trunk
from speculators.models.proposing import aux_states
from speculators.models.stepwise import StepwiseDraftModel
from speculators.models.unroll import Memory, Unroll


class Eagle3Model(StepwiseDraftModel, FusedDraftModel):
    """An EAGLE-3 draft: each token's state is made from the state before it."""

    config: Eagle3Config

    def forward(self, inputs: Unroll) -> list[Tensor]:
        """Unroll over packed documents and return, per step, the states [R, H] that `lm_head` reads.

        Keys and values of step 0 are made for every context position, queries and all that follows for active ones.
        """
        trunk, memory = Eagle3Trunk(self, inputs), Memory(len(self.layers))
        hidden, steps = trunk.first(self.segment(self.combine, inputs.features_CX), memory), []
        for step in range(len(inputs.slots)):
            if step:
                hidden = trunk.later(hidden, memory, step)
            normed: Tensor = self.norm(hidden)
            steps.append(normed)
            if self.config.norm_output:
                hidden = normed
        return steps

    def first_states(self, context: DraftContext) -> Tensor:
        """The verifier's aux states, fused."""
        return self.combine(aux_states(context, self))

    def layer_inputs(self, token_ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Verifier ids beside the states before them -> the first layer's input [..., 2H] and residual [..., H]."""
        return self.first_layer.join(self.embed(token_ids), states)

    def predict(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The last layer's output [..., H] -> logits [..., D], and the states that the next token is read with."""
        normed: Tensor = self.norm(hidden)
        return self.lm_head(normed), normed if self.config.norm_output else hidden
