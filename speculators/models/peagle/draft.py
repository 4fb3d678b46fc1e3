"""What a user chooses about a P-EAGLE draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from pydantic import Field

from speculators.errors import UsageError
from speculators.formats.faults import refused_as_format_error
from speculators.models.decoder_choices import DecoderChoices, speculators_block
from speculators.models.eagle3.draft import fused_fields
from speculators.models.family import VerifierShape
from speculators.models.peagle.config import PEagleConfig


class PEagleDraft(DecoderChoices):
    """The shape of a P-EAGLE draft. What is None follows the verifier.

    `aux_layer_ids` and `draft_vocab_size` are those of an EAGLE-3 draft, `sliding_window` needs layers of type qwen3.
    `mask_token_id` stands for tokens that are not known yet; the default is the last row of the verifier's embedding
    table, which is padding or a reserved token in most vocabularies. `embed_requires_grad` trains the embeddings, that
    of the mask token among them, from the verifier's on.
    """

    num_layers: int = Field(default=4, ge=1, le=64)
    norm_before_residual: bool = True
    norm_before_fc: bool = True
    embed_requires_grad: bool = True
    mask_token_id: int | None = Field(default=None, ge=0)
    num_speculative_tokens: int = Field(default=8, gt=0)

    def resolve(self, verifier: VerifierShape) -> PEagleConfig:
        """Complete the choices with the verifier's shape.

        Raises UsageError for a choice that contradicts the verifier or another choice, FormatError for what no config
        can say, such as a rotation of the verifier's that no draft can follow (give `rope_parameters` then).
        """
        mask = verifier.vocab_size - 1 if self.mask_token_id is None else self.mask_token_id
        if mask >= verifier.vocab_size:
            raise UsageError(
                f"mask_token_id is {mask}; expected a token of the verifier, 0 to {verifier.vocab_size - 1}"
            )
        with refused_as_format_error(f"a draft of this shape for {verifier.name_or_path}"):
            return PEagleConfig(
                speculators_config=speculators_block("peagle", self.num_speculative_tokens, verifier),
                norm_before_residual=self.norm_before_residual,
                norm_before_fc=self.norm_before_fc,
                mask_token_id=mask,
                **fused_fields(self, verifier, self.embed_requires_grad),
            )
