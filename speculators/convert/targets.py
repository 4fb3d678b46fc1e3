"""The table of layouts that are written: a name, and the module whose `plan` makes it of a speculator."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from speculators.convert.plan import CheckpointPlan
from speculators.convert.source import SourceCheckpoint
from speculators.formats.config import SpeculatorConfig


class TargetLayout(Protocol):
    """What a module of the table has."""

    def plan(self, speculator: SourceCheckpoint, config: SpeculatorConfig, layout: str) -> CheckpointPlan:
        """Account for every tensor of a speculator; FormatError names what the layout cannot say."""
        ...


TARGETS: dict[str, str] = {
    "safeailab-eagle3": "speculators.convert.to_eagle3",
    "sglang": "speculators.convert.to_eagle3",
    "modelopt-eagle3": "speculators.convert.to_eagle3",
    "safeailab-eagle": "speculators.convert.to_eagle",
    "vllm-eagle": "speculators.convert.to_eagle",
    "z-lab-dflash": "speculators.convert.to_dflash",
    "modelopt-dflash": "speculators.convert.to_dflash",
    "deepspec-dspark": "speculators.convert.to_dspark",
    "modelopt-dspark": "speculators.convert.to_dspark",
    "medusa": "speculators.convert.to_medusa",
    "vllm-medusa": "speculators.convert.to_medusa",
    "ibm-mlp-speculator": "speculators.convert.to_mlp_speculator",
    "native-mtp": "speculators.convert.to_mtp",
}


def target_layout(name: str) -> TargetLayout:
    """The module that writes a layout."""
    module: TargetLayout = import_module(TARGETS[name])
    return module
