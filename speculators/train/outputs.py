"""The files and folders of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outputs:
    """Where a run writes."""

    out: Path

    @property
    def conversations(self) -> Path:
        """The verifier's answers, JSON lines."""
        return self.out / "conversations.jsonl"

    @property
    def prepared(self) -> Path:
        """Token ids and loss masks."""
        return self.out / "prepared"

    @property
    def states(self) -> Path:
        """The hidden-states store."""
        return self.out / "states"

    @property
    def training(self) -> Path:
        """How the training ended: steps, tokens, tokens per second, the checkpoint that was chosen."""
        return self.out / "training.json"

    @property
    def speculator(self) -> Path:
        """The finished speculator."""
        return self.out / "speculator"

    def evaluation(self, name: str, alone: bool) -> Path:
        """The measurement on one file of prompts."""
        return self.out / ("evaluation.json" if alone else f"evaluation_{name}.json")
