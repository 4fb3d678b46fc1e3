"""What a user chooses about a DSpark draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from pydantic import Field

from speculators.models.dflash.draft import BlockChoices
from speculators.models.dspark.config import DSparkConfig, MarkovKind


class DSparkDraft(BlockChoices):
    """The shape of a DSpark draft: `BlockChoices`, and its two heads.

    A layer is causal inside a block exactly where it has a window, so that `sliding_window_non_causal` may be true only
    without one. vLLM loads Markov heads of type vanilla alone.
    """

    config_type = DSparkConfig

    sample_from_anchor: bool = True
    sliding_window_non_causal: bool = False
    markov_rank: int = Field(default=256, gt=0)
    markov_head_type: MarkovKind = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
