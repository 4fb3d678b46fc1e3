"""Golden cases of dflash and dflash2, computed by ours."""

from typing import Any

from torch import Tensor

from speculators.models import FAMILIES
from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator


def raw_batch(inputs: dict[str, Tensor]) -> PackedBatch:
    """The inputs as they are: one document, raw and unshifted."""
    return PackedBatch(
        input_ids=inputs["input_ids"],
        loss_mask=inputs["loss_mask"].bool(),
        aux_hidden_states=inputs["hidden_states"].float(),
        last_hidden_states=inputs["verifier_last_hidden_states"].float(),
        document_ids=inputs["document_ids"],
        position_ids=inputs["position_ids"],
    )


def knobs(settings: dict[str, Any]) -> dict[str, Any]:
    """Fields of `DFlashObjective` from a case's settings."""
    return {
        "loss": settings["loss_fn"],
        "max_anchors": settings["max_anchors"],
        "position_weights": "dpace" if settings["per_position_loss_weight"] == "dpace" else "exponential",
        "dpace_alpha": float(settings["dpace_alpha"]),
        "decay_gamma": float(settings["dflash_decay_gamma"]),
    }


def compute(
    speculator: Speculator, verifier_head: VerifierHead, inputs: dict[str, Tensor], settings: dict[str, Any]
) -> StepOutput:
    """One training step of the case, not yet differentiated."""
    family, own = speculator.config.speculators_model_type, {}
    if family == "dflash2":
        own = {"selector_weight": float(settings["selector_loss_alpha"])}
    output: StepOutput = (
        FAMILIES[family].objective(**knobs(settings), **own).step(speculator.draft, raw_batch(inputs), verifier_head)
    )
    return output
