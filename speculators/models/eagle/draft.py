"""What a user chooses about an EAGLE draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from pydantic import Field

from speculators.models.choices import LayerChoices, completed
from speculators.models.eagle.config import EagleConfig
from speculators.models.family import VerifierShape


class EagleDraft(LayerChoices):
    """The shape of an EAGLE draft. What is None follows the verifier, whose width and vocabulary it always has.

    `bias` gives `fc` one, as EAGLE's and HASS's own checkpoints have it; vLLM's EAGLE has none and drops it without a
    word, so the default is false. `qkv_bias`, `embed_layernorm` and `post_embedding_layernorm` as in the config.
    """

    bias: bool = False
    qkv_bias: bool = False
    embed_layernorm: bool = False
    post_embedding_layernorm: bool = False
    num_speculative_tokens: int = Field(default=3, gt=0)

    def resolve(self, verifier: VerifierShape) -> EagleConfig:
        """Complete the choices with the verifier's shape.

        Raises FormatError for what no config can say, such as a rotation of the verifier's that no draft can follow
        (give `rope_parameters` then).
        """
        return completed(
            EagleConfig,
            self.num_speculative_tokens,
            verifier,
            **self.layer_fields(verifier),
            bias=self.bias,
            qkv_bias=self.qkv_bias,
            embed_layernorm=self.embed_layernorm,
            post_embedding_layernorm=self.post_embedding_layernorm,
        )
