"""What a user chooses about a draft of decoder layers, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from speculators.errors import UsageError
from speculators.formats.config import ProposalConfig, SpeculatorsConfig, VerifierConfig
from speculators.formats.decoder import DecoderConfig
from speculators.models.family import VerifierShape

DEFAULT_DRAFT_VOCAB_SIZE = 8192


def speculators_block(algorithm: str, num_speculative_tokens: int, verifier: VerifierShape) -> SpeculatorsConfig:
    """The block that says how a checkpoint speculates: one proposal, for this verifier."""
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[ProposalConfig(speculative_tokens=num_speculative_tokens)],
        verifier=VerifierConfig(name_or_path=verifier.name_or_path, architectures=list(verifier.architectures)),
    )


class DecoderChoices(BaseModel):
    """The shape of a draft's decoder layers. What is None follows the verifier.

    `aux_layer_ids` are capture ids (id i enters decoder layer i, 0 = embeddings, L = last output). `draft_vocab_size`
    at or above the verifier's vocabulary means all of it, as does None. With a `hidden_size` of the draft's own, heads
    keep the verifier's size and grouping, and there are as many as fit the width; the MLP keeps its proportion.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    num_layers: int = Field(default=1, ge=1, le=64)
    layer_type: Literal["llama", "qwen3"] = "llama"
    aux_layer_ids: list[int] | None = None
    draft_vocab_size: int | None = Field(default=DEFAULT_DRAFT_VOCAB_SIZE, gt=0)
    hidden_size: int | None = Field(default=None, gt=0)
    intermediate_size: int | None = Field(default=None, gt=0)
    num_attention_heads: int | None = Field(default=None, gt=0)
    num_key_value_heads: int | None = Field(default=None, gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    rms_norm_eps: float | None = Field(default=None, gt=0)
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int | None = Field(default=None, gt=0)
    sliding_window: int | None = Field(default=None, gt=0)
    attention_bias: bool = False

    def reduced_vocabulary(self, verifier: VerifierShape) -> int:
        """Tokens that the draft can propose."""
        return min(self.draft_vocab_size or verifier.vocab_size, verifier.vocab_size)

    def checked_layer_ids(self, default: list[int], num_layers: int) -> list[int]:
        """The chosen layer ids, or the default; UsageError where they are not ascending ids of the verifier."""
        ids = default if self.aux_layer_ids is None else self.aux_layer_ids
        if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > num_layers:
            raise UsageError(
                f"aux_layer_ids {'defaults to' if self.aux_layer_ids is None else 'is'} {ids}; expected ascending ids, "
                f"each once, from 0 (embeddings) to {num_layers} (the output of the verifier's last layer)"
            )
        return list(ids)

    def decoder(self, verifier: VerifierShape, layer_types: list[str] | None = None) -> DecoderConfig:
        """The layer block; `layer_types` defaults to windows everywhere where `sliding_window` is set, else nowhere."""
        # A part of a head left unturned is the verifier's own business: the draft turns whole heads on both sides.
        rope = {key: value for key, value in verifier.rope_parameters.items() if key != "partial_rotary_factor"}
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        layer_types = layer_types or [kind] * self.num_layers
        width = self.hidden_size or verifier.hidden_size
        heads, shared = self._head_counts(width, verifier)
        return DecoderConfig.model_validate(
            {
                "model_type": self.layer_type,
                "hidden_size": width,
                "intermediate_size": self.intermediate_size
                or -(-verifier.intermediate_size * width // verifier.hidden_size),
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": heads,
                "num_key_value_heads": shared,
                "head_dim": self.head_dim or verifier.head_dim,
                "vocab_size": verifier.vocab_size,
                "rms_norm_eps": self.rms_norm_eps or verifier.rms_norm_eps,
                "max_position_embeddings": self.max_position_embeddings or verifier.max_position_embeddings,
                "rope_parameters": self.rope_parameters or rope,
                "attention_bias": self.attention_bias,
                "layer_types": layer_types,
                "sliding_window": self.sliding_window,
                "use_sliding_window": "sliding_attention" in layer_types,
                "initializer_range": verifier.initializer_range,
                "bos_token_id": verifier.bos_token_id,
                "eos_token_id": verifier.eos_token_id,
                "pad_token_id": verifier.pad_token_id,
            }
        )

    def _head_counts(self, width: int, verifier: VerifierShape) -> tuple[int, int]:
        """Query heads and key heads of a draft of this width."""
        heads, shared = verifier.num_attention_heads, verifier.num_key_value_heads
        if width != verifier.hidden_size:
            group = max(1, heads // shared)
            heads = self.num_attention_heads or max(1, width // (self.head_dim or verifier.head_dim))
            shared = next(count for count in range(max(1, heads // group), 0, -1) if heads % count == 0)
        return self.num_attention_heads or heads, self.num_key_value_heads or shared
