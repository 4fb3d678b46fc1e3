"""The training step of an MTP folder on golden inputs, by the conventions that the golden numbers were made with."""

from typing import Any

from torch import Tensor

from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.losses import VerifierHead
from speculators.models.mtp.objective import MtpObjective
from speculators.models.speculator import Speculator


def compute(
    speculator: Speculator, verifier_head: VerifierHead, inputs: dict[str, Tensor], settings: dict[str, Any]
) -> StepOutput:
    """The inputs are one raw row; the block reads the stored states without the verifier's final norm."""
    batch = PackedBatch(
        input_ids=inputs["input_ids"],
        loss_mask=inputs["loss_mask"].bool(),
        aux_hidden_states=inputs["hidden_states"].float(),
        last_hidden_states=inputs["verifier_last_hidden_states"].float(),
        document_ids=inputs["document_ids"],
        position_ids=inputs["position_ids"],
    )
    weights = settings["step_weights"]
    objective = MtpObjective(
        num_steps=settings["num_speculative_steps"],
        step_decay=float(settings["step_weight_beta"]),
        step_weights=None if weights is None else [float(weight) for weight in weights],
        normed_states=False,
    )
    return objective.step(speculator.draft, batch, verifier_head)
