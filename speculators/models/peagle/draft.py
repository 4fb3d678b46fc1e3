"""What a user chooses about a P-EAGLE draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from pydantic import Field

from speculators.models.choices import completed, mask_token
from speculators.models.eagle3.draft import FusedChoices
from speculators.models.family import VerifierShape
from speculators.models.peagle.config import PEagleConfig


class PEagleDraft(FusedChoices):
    """The shape of a P-EAGLE draft: `FusedChoices`, and what stands for tokens that are not known yet.

    `mask_token_id` defaults to the last row of the verifier's embedding table, which is padding or a reserved token in
    most vocabularies. `embed_requires_grad` trains the embeddings, that of the mask token among them, from the
    verifier's on.
    """

    num_layers: int = Field(default=4, ge=1, le=64)
    embed_requires_grad: bool = True
    mask_token_id: int | None = Field(default=None, ge=0)
    num_speculative_tokens: int = Field(default=8, gt=0)

    def resolve(self, verifier: VerifierShape) -> PEagleConfig:
        """Complete the choices with the verifier's shape.

        Raises UsageError for a choice that contradicts the verifier or another choice, FormatError for what no config
        can say, such as a rotation of the verifier's that no draft can follow (give `rope_parameters` then).
        """
        return completed(
            PEagleConfig,
            self.num_speculative_tokens,
            verifier,
            mask_token_id=mask_token(self.mask_token_id, verifier),
            **self.fused_fields(verifier, self.embed_requires_grad),
        )
