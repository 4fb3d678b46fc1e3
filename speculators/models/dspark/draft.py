"""What a user chooses about a DSpark draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from speculators.models.dflash.draft import BlockChoices
from speculators.models.dspark.config import DSparkConfig, MarkovKind
from speculators.models.family import VerifierShape


class DSparkDraft(BlockChoices):
    """The shape of a DSpark draft: `BlockChoices`, and its two heads.

    A layer is causal inside a block exactly where it has a window, so that `sliding_window_non_causal` may be true only
    without one. vLLM loads Markov heads of type vanilla alone.
    """

    algorithm = "dspark"
    config_type = DSparkConfig

    sample_from_anchor: bool = True
    sliding_window_non_causal: bool = False
    markov_rank: int = Field(default=256, gt=0)
    markov_head_type: MarkovKind = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def resolve(self, verifier: VerifierShape) -> DSparkConfig:
        """`BlockChoices.resolve`, as a DSpark config."""
        config = super().resolve(verifier)
        assert isinstance(config, DSparkConfig)
        return config

    def family_keys(self) -> dict[str, Any]:
        """Keys of the config that only this family has."""
        return {
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head_type,
            "enable_confidence_head": self.enable_confidence_head,
            "confidence_head_with_markov": self.confidence_head_with_markov,
        }
