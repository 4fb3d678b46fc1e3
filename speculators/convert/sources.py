"""The table of layouts that are read: a name, and the module whose `plan` makes a speculator of it."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan
from speculators.convert.source import SourceCheckpoint


class SourceLayout(Protocol):
    """What a module of the table has."""

    def plan(self, source: SourceCheckpoint, verifier: ConversionVerifier, options: ConvertOptions) -> CheckpointPlan:
        """Account for every tensor of the source; FormatError says what is wrong with it. Reads no large tensor."""
        ...


SOURCES: dict[str, str] = {
    "eagle3": "speculators.convert.from_eagle3",
    "eagle": "speculators.convert.from_eagle",
    "peagle": "speculators.convert.from_peagle",
    "medusa": "speculators.convert.from_medusa",
    "mlp_speculator": "speculators.convert.from_mlp_speculator",
    "dflash": "speculators.convert.from_dflash",
    "dflash2": "speculators.convert.from_dflash2",
    "dspark": "speculators.convert.from_dspark",
    "pard": "speculators.convert.from_pard",
    "mtp": "speculators.convert.from_mtp",
    "speculators": "speculators.convert.from_speculators",
}


def source_layout(name: str) -> SourceLayout:
    """The module that reads a layout."""
    module: SourceLayout = import_module(SOURCES[name])
    return module
