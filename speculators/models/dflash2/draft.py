"""What a user chooses about a DFlash 2 draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from pydantic import Field

from speculators.errors import UsageError
from speculators.models.choices import reduced_vocabulary
from speculators.models.dflash.config import BlockDraftConfig
from speculators.models.dflash.draft import BlockChoices
from speculators.models.dflash2.config import DFlash2Config
from speculators.models.family import VerifierShape


class DFlash2Draft(BlockChoices):
    """The shape of a DFlash 2 draft: `BlockChoices` over the whole vocabulary, convolutions and the selector."""

    config_type = DFlash2Config

    conv_kernel_size: int = Field(default=2, gt=0)
    conv_group_size: int = Field(default=16, gt=0)
    selector_rank: int = Field(default=256, gt=0)
    selector_top_k: int = Field(default=16, gt=0)

    def resolve(self, verifier: VerifierShape) -> BlockDraftConfig:
        """`BlockChoices.resolve`; UsageError for a part of the vocabulary."""
        if reduced_vocabulary(self.draft_vocab_size, verifier) < verifier.vocab_size:
            raise UsageError(
                f"draft_vocab_size is {self.draft_vocab_size}; a dflash2 draft proposes all {verifier.vocab_size} "
                "tokens, because engines read its candidates as the verifier's ids: leave it out"
            )
        return super().resolve(verifier)
