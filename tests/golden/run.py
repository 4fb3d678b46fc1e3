"""Compute what a golden case asks for: ``python tests/golden/run.py FOLDER --inputs FILE --case KEY --json OUT``.

FOLDER is a speculator directory; its verifier is ``verifier/`` beside it, or beside FILE. KEY is ``"<folder>|<settings
as JSON>"`` (see ``settings.py``); the family is what the folder's config.json says, whatever the folder's name. OUT
gets ``{"loss": ..., "grad_norms": {parameter: L2 norm}, "metrics": {name: [sum, count]}}``. Conventions are in
README.md.
"""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from speculators.errors import DataError, SpeculatorsError, UsageError
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator

# The module `cases_<name>` beside this file that knows a family's training step.
CASES = {"eagle3": "eagle3", "dflash": "dflash", "dflash2": "dflash", "dspark": "dspark", "mtp": "mtp"}
INPUTS = {
    "input_ids": torch.int64,
    "hidden_states": torch.float32,
    "verifier_last_hidden_states": torch.float32,
    "document_ids": torch.int64,
    "position_ids": torch.int64,
    "loss_mask": torch.bool,
}
# Frozen everywhere, also where `embed_requires_grad` says that training here would not.
FROZEN = ("embed_tokens.", "lm_head.")


def part(name: str) -> Any:
    """A module beside this file, also where this file runs as a script from any folder."""
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path:
        sys.path.insert(0, root)
    return import_module(f"tests.golden.{name}")


def read_inputs(path: Path) -> dict[str, Tensor]:
    """The tensors of one row, [1, T, ...] each, in the dtypes of INPUTS; DataError names the one that is missing."""
    inputs = load_file(path)
    missing = [name for name in INPUTS if name not in inputs]
    if missing:
        raise DataError(f"{path}: {', '.join(missing)} missing; expected {', '.join(INPUTS)}")
    return {name: inputs[name].to(dtype) for name, dtype in INPUTS.items()}


def find_verifier(folder: Path, inputs: Path) -> Path:
    """The directory `verifier` beside the folder, where a link to it points, or beside the inputs."""
    places = [path.parent / "verifier" for path in (folder.absolute(), folder.resolve(), inputs.resolve())]
    for place in places:
        if place.is_dir():
            return place
    raise UsageError(f"no verifier of {folder}; expected it as {' or '.join(map(str, dict.fromkeys(places)))}")


def compute(folder: Path, inputs: Path, case: str) -> dict[str, Any]:
    """Loss, gradient norms and counts of one case in float32."""
    weights = load_verifier_weights(find_verifier(folder, inputs))
    speculator = Speculator.from_pretrained(folder, dtype=torch.float32).attach_verifier(weights)
    family = speculator.config.speculators_model_type
    if family not in CASES:
        raise UsageError(f"{folder} is a {family}; golden cases are there for {', '.join(CASES)}")
    settings = part("settings").read_case(case, family)
    parameters = list(speculator.draft.named_parameters())
    for name, parameter in parameters:
        parameter.requires_grad_(parameter.requires_grad and not name.startswith(FROZEN))
    head = VerifierHead.from_weights(weights).to("cpu", torch.float32)
    output = part(f"cases_{CASES[family]}").compute(speculator, head, read_inputs(inputs), settings)
    output.loss.backward()
    norms = {name: parameter.grad.norm().item() for name, parameter in parameters if parameter.grad is not None}
    metrics = {name: list(count) for name, count in output.metrics.items()}
    return {"loss": output.loss.item(), "grad_norms": norms, "metrics": metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a speculator directory beside its verifier/")
    parser.add_argument("--inputs", type=Path, required=True, help="safetensors with one row")
    parser.add_argument("--case", required=True, help="<folder>|<settings as JSON>")
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    arguments = parser.parse_args()
    try:
        found = compute(arguments.folder, arguments.inputs, arguments.case)
    except (SpeculatorsError, OSError) as error:
        sys.exit(f"error: {error}")
    arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
