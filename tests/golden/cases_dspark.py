"""Golden cases of dspark, computed by ours."""

from typing import Any

from torch import Tensor

from speculators.models.draft_model import StepOutput
from speculators.models.dspark.objective import DSparkObjective
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from tests.golden.cases_dflash import knobs, raw_batch


def compute(
    speculator: Speculator, verifier_head: VerifierHead, inputs: dict[str, Tensor], settings: dict[str, Any]
) -> StepOutput:
    """One training step of the case, not yet differentiated."""
    weight = settings.get("confidence_head_alpha", 1.0)
    objective = DSparkObjective(**knobs(settings), confidence_weight=weight)
    return objective.step(speculator.draft, raw_batch(inputs), verifier_head)
