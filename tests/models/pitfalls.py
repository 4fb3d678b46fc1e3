"""What the tests of known faults share: drafts of every family in a small shape of their contract.

Tools for speculative decoding share faults, which a list of their users' reports numbers: 1 to 13 are about the
teacher's signal and numerics, 14 to 28 about the alignment of training, 29 to 39 about vocabulary maps and files. A
test that would fail if one were made again names it: `grep -rE 'pitfall 17\\b' tests`.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.models import FAMILIES
from speculators.models.draft_model import Objective
from speculators.models.speculator import Speculator
from tests.models.contract import contract_of
from tests.models.drafts import random_speculator

BLOCKS = ("dflash", "dflash2", "dspark")
AUXILIARY = ("eagle3", "peagle", *BLOCKS)
every_family = pytest.mark.parametrize("family", FAMILIES)
block_families = pytest.mark.parametrize("family", BLOCKS)
auxiliary_families = pytest.mark.parametrize("family", AUXILIARY)


def options_of(family: str, **options: Any) -> dict[str, Any]:
    """The smallest variant of the family's contract, changed."""
    return {**contract_of(family).variants["plain"], **options}


def whole_vocabulary(family: str) -> dict[str, Any]:
    """The option that keeps every token, where the family has one."""
    return {"draft_vocab_size": None} if "draft_vocab_size" in FAMILIES[family].draft.model_fields else {}


def draft_of(family: str, **options: Any) -> Speculator:
    """A random draft of that shape."""
    return random_speculator(family, **options_of(family, **options))


def objective_of(family: str, **knobs: Any) -> Objective:
    """The training step with the knobs that keep chance out of it."""
    objective: Objective = FAMILIES[family].objective(**contract_of(family).objective, **knobs)
    return objective


class Watched(torch.nn.Module):
    """A draft as an objective sees it, whose outputs are kept with their gradients."""

    def __init__(self, speculator: Speculator) -> None:
        super().__init__()
        self.module = speculator.draft
        self.outputs: list[Tensor] = []

    def forward(self, *inputs: Any) -> Any:
        found = self.module(*inputs)
        self.outputs = [found] if isinstance(found, Tensor) else list(found)
        for output in self.outputs:
            output.retain_grad()
        return found


def rope_of(written: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation that a config.json says, wherever the family keeps its layers."""
    rope: dict[str, Any] = written.get("transformer_layer_config", written)["rope_parameters"]
    return rope
