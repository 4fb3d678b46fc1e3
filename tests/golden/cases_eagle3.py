"""Golden cases of EAGLE-3: the inputs are aligned for step 0 already, so no shift is made here."""

from typing import Any

import torch
from torch import Tensor

from speculators.models.draft_model import StepOutput
from speculators.models.eagle3.distillation import AlignedBatch
from speculators.models.eagle3.objective import Eagle3Objective
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from speculators.models.supervision import document_runs


def aligned(inputs: dict[str, Tensor]) -> AlignedBatch:
    """The row without its padding; index c of every tensor belongs to one prediction."""
    runs_N = document_runs(inputs["document_ids"])
    kept = runs_N >= 0
    return AlignedBatch(
        features_CX=inputs["hidden_states"][0, kept],
        token_ids_C=inputs["input_ids"][0, kept],
        positions_C=inputs["position_ids"][0, kept],
        last_hidden_states_CH=inputs["verifier_last_hidden_states"][0, kept],
        supervised_C=inputs["loss_mask"][0, kept],
        document_lengths=torch.bincount(runs_N[kept]).tolist(),
    )


def compute(
    speculator: Speculator, verifier_head: VerifierHead, inputs: dict[str, Tensor], settings: dict[str, Any]
) -> StepOutput:
    """One training step of the case, not yet differentiated."""
    objective = Eagle3Objective(
        ttt_steps=settings["ttt_steps"],
        step_decay=float(settings["ttt_step_loss_decay"]),
        loss=settings["loss_fn"],
        windows_from_start=True,
        mean_per_step=True,
    )
    return objective.aligned_step(speculator.draft, aligned(inputs), verifier_head)
