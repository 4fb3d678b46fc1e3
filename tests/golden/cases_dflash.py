"""Golden cases of dflash and dflash2, computed by ours."""

from typing import Any

from torch import Tensor

from speculators.models import FAMILIES
from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator


def raw_batch(inputs: dict[str, Tensor]) -> PackedBatch:
    """The inputs as they are, raw and unshifted."""
    return PackedBatch(
        input_ids=inputs["input_ids"],
        loss_mask=inputs["loss_mask"],
        aux_hidden_states=inputs["hidden_states"],
        last_hidden_states=inputs["verifier_last_hidden_states"],
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


class _FullLayersSeeBlocks:
    """A configuration whose layers without a window are bidirectional inside a block, whatever the flag says."""

    def is_causal(self, layer: int) -> bool:
        windows = self.transformer_layer_config.layer_types[layer] == "sliding_attention"
        return windows and super().is_causal(layer)


def trained_causality(speculator: Speculator) -> None:
    """Read the causal flag as the golden numbers do: for layers with a window. (Servers read it for all.)"""
    kind = type(speculator.config)
    config = type(kind.__name__, (_FullLayersSeeBlocks, kind), {}).from_json(speculator.config.to_json())
    speculator.draft.config = config


def compute(
    speculator: Speculator, verifier_head: VerifierHead, inputs: dict[str, Tensor], settings: dict[str, Any]
) -> StepOutput:
    """One training step of the case, not yet differentiated."""
    trained_causality(speculator)
    family, own = speculator.config.speculators_model_type, {}
    if family == "dflash2":
        own = {"selector_weight": float(settings["selector_loss_alpha"])}
    output: StepOutput = (
        FAMILIES[family].objective(**knobs(settings), **own).step(speculator.draft, raw_batch(inputs), verifier_head)
    )
    return output
