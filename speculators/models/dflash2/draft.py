"""What a user chooses about a DFlash 2 draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from speculators.errors import UsageError
from speculators.models.dflash.draft import BlockChoices
from speculators.models.dflash2.config import DFlash2Config
from speculators.models.family import VerifierShape


class DFlash2Draft(BlockChoices):
    """The shape of a DFlash 2 draft: `BlockChoices` over the whole vocabulary, convolutions and the selector."""

    algorithm = "dflash2"
    config_type = DFlash2Config

    conv_kernel_size: int = Field(default=2, gt=0)
    conv_group_size: int = Field(default=16, gt=0)
    selector_rank: int = Field(default=256, gt=0)
    selector_top_k: int = Field(default=16, gt=0)

    def resolve(self, verifier: VerifierShape) -> DFlash2Config:
        """`BlockChoices.resolve`, as a DFlash 2 config; UsageError for a part of the vocabulary."""
        if self.reduced_vocabulary(verifier) < verifier.vocab_size:
            raise UsageError(
                f"draft_vocab_size is {self.draft_vocab_size}; a dflash2 draft proposes all {verifier.vocab_size} "
                "tokens, because engines read its candidates as the verifier's ids: leave it out"
            )
        config = super().resolve(verifier)
        assert isinstance(config, DFlash2Config)
        return config

    def family_keys(self) -> dict[str, Any]:
        """Keys of the config that only this family has."""
        return {
            "conv_kernel_size": self.conv_kernel_size,
            "conv_group_size": self.conv_group_size,
            "selector_rank": self.selector_rank,
            "selector_top_k": self.selector_top_k,
        }
