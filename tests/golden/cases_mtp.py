"""The training step of an MTP folder on golden inputs, by the conventions that the golden numbers were made with."""

from typing import Any

from torch import Tensor

from speculators.errors import UsageError
from speculators.models.draft_model import StepOutput
from speculators.models.losses import VerifierHead
from speculators.models.mtp.objective import MtpObjective
from speculators.models.speculator import Speculator
from tests.golden.cases_dflash import raw_batch


def compute(
    speculator: Speculator, verifier_head: VerifierHead, inputs: dict[str, Tensor], settings: dict[str, Any]
) -> StepOutput:
    """The inputs are one raw row; the block reads the stored states without the verifier's final norm."""
    weights, steps = settings["step_weights"], settings["num_speculative_steps"]
    if steps is None:
        steps = speculator.config.num_speculative_tokens if weights is None else len(weights)
    if weights is not None and len(weights) != steps:
        raise UsageError(f"step_weights has {len(weights)} entries; expected {steps}, as num_speculative_steps says")
    objective = MtpObjective(
        num_steps=steps,
        step_decay=float(settings["step_weight_beta"]),
        step_weights=None if weights is None else [float(weight) for weight in weights],
        normed_states=False,
    )
    return objective.step(speculator.draft, raw_batch(inputs), verifier_head)
