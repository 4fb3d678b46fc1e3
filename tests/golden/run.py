"""Compute what a golden case asks for: ``python tests/golden/run.py FOLDER --inputs FILE --case KEY --json OUT``.

FOLDER is a speculator directory with its verifier beside it in ``verifier/``; KEY is a key of golden.json, the folder's
name and its loss settings. OUT gets ``{"loss": ..., "grad_norms": {parameter: L2 norm}}``.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.eagle3.objective import AlignedBatch, Eagle3Objective
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator


def aligned(inputs: dict[str, Tensor]) -> AlignedBatch:
    """The inputs are one document, already aligned for step 0: index c of every tensor belongs to one prediction."""
    return AlignedBatch(
        features_CX=inputs["hidden_states"][0].float(),
        token_ids_C=inputs["input_ids"][0],
        positions_C=inputs["position_ids"][0],
        last_hidden_states_CH=inputs["verifier_last_hidden_states"][0].float(),
        supervised_C=inputs["loss_mask"][0].bool(),
        document_lengths=[inputs["input_ids"].shape[1]],
    )


def compute(folder: Path, inputs: Path, case: str) -> dict[str, object]:
    """Loss and gradient norms of one case in float32."""
    settings = json.loads(case.partition("|")[2])
    weights = load_verifier_weights(folder.parent / "verifier")
    speculator = Speculator.from_pretrained(folder, dtype=torch.float32).attach_verifier(weights)
    objective = Eagle3Objective(
        ttt_steps=settings["ttt_steps"],
        step_decay=settings["ttt_step_loss_decay"],
        loss={settings["loss_fn"]: 1.0},
        windows_from_start=True,
    )
    head = VerifierHead.from_weights(weights).to("cpu", torch.float32)
    output = objective.aligned_step(speculator.draft, aligned(load_file(inputs)), head)
    output.loss.backward()
    parameters = speculator.draft.named_parameters()
    norms = {name: parameter.grad.norm().item() for name, parameter in parameters if parameter.grad is not None}
    return {"loss": output.loss.item(), "grad_norms": norms, "metrics": {k: list(v) for k, v in output.metrics.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--case", required=True)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    found = compute(arguments.folder, arguments.inputs, arguments.case)
    arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
