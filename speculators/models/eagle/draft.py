"""What a user chooses about an EAGLE draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from speculators.formats.faults import refused_as_format_error
from speculators.models.decoder_choices import speculators_block
from speculators.models.eagle.config import EagleConfig
from speculators.models.family import VerifierShape


class EagleDraft(BaseModel):
    """The shape of an EAGLE draft. What is None follows the verifier, whose width and vocabulary it always has.

    `bias` gives `fc` one, as EAGLE's and HASS's own checkpoints have it; vLLM's EAGLE has none and drops it without a
    word, so the default is false. `qkv_bias`, `embed_layernorm` and `post_embedding_layernorm` as in the config.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    num_layers: int = Field(default=1, ge=1, le=64)
    intermediate_size: int | None = Field(default=None, gt=0)
    num_attention_heads: int | None = Field(default=None, gt=0)
    num_key_value_heads: int | None = Field(default=None, gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    rms_norm_eps: float | None = Field(default=None, gt=0)
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int | None = Field(default=None, gt=0)
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
        # A part of a head left unturned is the verifier's own business: the draft turns whole heads on both sides.
        rope = {key: value for key, value in verifier.rope_parameters.items() if key != "partial_rotary_factor"}
        with refused_as_format_error(f"a draft of this shape for {verifier.name_or_path}"):
            return EagleConfig(
                speculators_config=speculators_block("eagle", self.num_speculative_tokens, verifier),
                dtype="bfloat16",
                hidden_size=verifier.hidden_size,
                intermediate_size=self.intermediate_size or verifier.intermediate_size,
                num_hidden_layers=self.num_layers,
                num_attention_heads=self.num_attention_heads or verifier.num_attention_heads,
                num_key_value_heads=self.num_key_value_heads or verifier.num_key_value_heads,
                head_dim=self.head_dim or verifier.head_dim,
                vocab_size=verifier.vocab_size,
                rms_norm_eps=self.rms_norm_eps or verifier.rms_norm_eps,
                max_position_embeddings=self.max_position_embeddings or verifier.max_position_embeddings,
                rope_parameters=self.rope_parameters or rope,
                initializer_range=verifier.initializer_range,
                bias=self.bias,
                qkv_bias=self.qkv_bias,
                embed_layernorm=self.embed_layernorm,
                post_embedding_layernorm=self.post_embedding_layernorm,
            )
