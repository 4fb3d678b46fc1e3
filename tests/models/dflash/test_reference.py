"""Settings that the golden cases leave out, against numbers that independent software computed in the same way.

Each case of reference.json changes a golden folder's configuration, the loss settings, or makes holes in the loss mask.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from tests.golden.cases_dflash import compute
from tests.golden.settings import read_case

GOLDEN = Path(__file__).parents[2] / "golden"
CASES: dict[str, dict] = json.loads((Path(__file__).parent / "reference.json").read_text(encoding="utf-8"))


def speculator_of(case: dict, folder: Path) -> Speculator:
    """The golden folder with the case's configuration."""
    source = GOLDEN / case["folder"]
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | case["config"]
    tokens = config["block_size"] - (0 if config["sample_from_anchor"] else 1)
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    return Speculator.from_pretrained(folder, dtype=torch.float32)


def inputs_of(case: dict) -> dict[str, Tensor]:
    inputs = load_file(GOLDEN / "golden_inputs.safetensors")
    if case["holes"]:
        inputs["loss_mask"][0, [20, 21, 22, 23, 31, 40, 42, 44, 46]] = 0
    return inputs


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_norms(name: str, tmp_path: Path) -> None:
    case, weights = CASES[name], load_verifier_weights(GOLDEN / "verifier")
    speculator = speculator_of(case, tmp_path / "draft").attach_verifier(weights)
    settings = read_case(f"{name}|{json.dumps(case['settings'])}", case["folder"])
    head = VerifierHead.from_weights(weights).to("cpu", torch.float32)
    output = compute(speculator, head, inputs_of(case), settings)
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-5)
    output.loss.backward()
    parameters = speculator.draft.named_parameters()
    norms = {key: parameter.grad.norm().item() for key, parameter in parameters if parameter.grad is not None}
    assert norms == pytest.approx(case["grad_norms"], rel=1e-4)
