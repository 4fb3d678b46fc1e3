"""What a user chooses about a draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from speculators.errors import UsageError
from speculators.formats.config import ProposalConfig, SpeculatorConfig, SpeculatorsConfig, VerifierConfig
from speculators.formats.decoder import DecoderConfig
from speculators.formats.faults import refused_as_format_error
from speculators.models.family import VerifierShape

DEFAULT_DRAFT_VOCAB_SIZE = 8192

Config = TypeVar("Config", bound=SpeculatorConfig)


def completed(config_type: type[Config], num_speculative_tokens: int, verifier: VerifierShape, **fields: Any) -> Config:
    """The config of a fresh draft for this verifier, whose own keys are `fields`.

    FormatError for what no config can say.
    """
    kind = config_type.model_fields["speculators_model_type"].default
    with refused_as_format_error(_draft_for(verifier)):
        block = SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[ProposalConfig(speculative_tokens=num_speculative_tokens)],
            verifier=VerifierConfig(name_or_path=verifier.name_or_path, architectures=list(verifier.architectures)),
        )
        return config_type(**{"speculators_config": block, "dtype": "bfloat16", **fields})


def _draft_for(verifier: VerifierShape) -> str:
    return f"a draft of this shape for {verifier.name_or_path}"


def reduced_vocabulary(draft_vocab_size: int | None, verifier: VerifierShape) -> int:
    """Tokens that the draft can propose: all of the verifier's unless fewer are asked for."""
    return min(draft_vocab_size or verifier.vocab_size, verifier.vocab_size)


def mask_token(mask_token_id: int | None, verifier: VerifierShape) -> int:
    """The token that stands for unknown ones; by default the last row of the verifier's embeddings.

    UsageError where there is no such row, or where the verifier's configuration has a use for it.
    """
    mask = verifier.vocab_size - 1 if mask_token_id is None else mask_token_id
    if mask >= verifier.vocab_size:
        raise UsageError(f"mask_token_id is {mask}; expected a token of the verifier, 0 to {verifier.vocab_size - 1}")
    ends = verifier.eos_token_id
    uses = {"bos_token_id": [verifier.bos_token_id], "eos_token_id": ends if isinstance(ends, list) else [ends]}
    for use in (use for use, ids in uses.items() if mask in ids):
        raise UsageError(
            f"mask_token_id is {mask}, which is in use as the verifier's {use}; choose a token that no text contains"
        )
    return mask


def tokens_a_step(num_speculative_tokens: int | None, most: int, key: str) -> int:
    """The tokens that a step drafts, by default as many as it can: `most`, the value of option `key`.

    UsageError where more are asked for.
    """
    tokens = num_speculative_tokens or most
    if tokens > most:
        raise UsageError(f"num_speculative_tokens is {tokens} with {key} {most}, the most that can be; raise {key}")
    return tokens


class DraftChoices(BaseModel):
    """A draft's options: strict, known by name, and fixed once they are made."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    # The most layers of such a draft that a verifier's own checkpoint may have.
    most_native_layers: ClassVar[int] = 1

    @classmethod
    def native_layers(cls, verifier: VerifierShape) -> int | None:
        """Layers of such a draft that a verifier's configuration says its own checkpoint has; None: it says nothing."""
        return None


class LayerChoices(DraftChoices):
    """The shape of a draft's decoder layers. What is None follows the verifier."""

    num_layers: int = Field(default=1, ge=1, le=64)
    intermediate_size: int | None = Field(default=None, gt=0)
    num_attention_heads: int | None = Field(default=None, gt=0)
    num_key_value_heads: int | None = Field(default=None, gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    rms_norm_eps: float | None = Field(default=None, gt=0)
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int | None = Field(default=None, gt=0)

    def layer_fields(self, verifier: VerifierShape) -> dict[str, Any]:
        """Keys of a layer block, as Hugging Face's Llama names them, in the verifier's width."""
        # A part of a head left unturned is the verifier's own business: the draft turns whole heads on both sides.
        rope = {key: value for key, value in verifier.rope_parameters.items() if key != "partial_rotary_factor"}
        return {
            "hidden_size": verifier.hidden_size,
            "intermediate_size": self.intermediate_size or verifier.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads or verifier.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads or verifier.num_key_value_heads,
            "head_dim": self.head_dim or verifier.head_dim,
            "vocab_size": verifier.vocab_size,
            "rms_norm_eps": self.rms_norm_eps or verifier.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings or verifier.max_position_embeddings,
            "rope_parameters": self.rope_parameters or rope,
            "initializer_range": verifier.initializer_range,
        }


class DecoderChoices(LayerChoices):
    """The shape of a draft of decoder layers that read auxiliary states. What is None follows the verifier.

    `aux_layer_ids` are capture ids (id i enters decoder layer i, 0 = embeddings, L = last output). `draft_vocab_size`
    at or above the verifier's vocabulary means all of it, as does None. With a `hidden_size` of the draft's own, heads
    keep the verifier's size and grouping, and there are as many as fit the width; the MLP keeps its proportion.
    """

    layer_type: Literal["llama", "qwen3"] = "llama"
    aux_layer_ids: list[int] | None = None
    draft_vocab_size: int | None = Field(default=DEFAULT_DRAFT_VOCAB_SIZE, gt=0)
    hidden_size: int | None = Field(default=None, gt=0)
    sliding_window: int | None = Field(default=None, gt=0)
    attention_bias: bool = False

    def has_own_width(self, verifier: VerifierShape) -> bool:
        """Whether the verifier's embeddings and head do not fit the draft."""
        return self.hidden_size not in (None, verifier.hidden_size)

    def checked_layer_ids(self, default: list[int], verifier: VerifierShape) -> list[int]:
        """The chosen layer ids, or the default; UsageError where they are not ascending ids of the verifier."""
        ids = default if self.aux_layer_ids is None else self.aux_layer_ids
        last = verifier.num_hidden_layers
        if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > last:
            raise UsageError(
                f"aux_layer_ids {'defaults to' if self.aux_layer_ids is None else 'is'} {ids}; expected ascending ids, "
                f"each once, from 0 (embeddings) to {last} (the output of the verifier's last layer)"
            )
        return list(ids)

    def decoder_fields(self, verifier: VerifierShape, layer_types: list[str] | None = None) -> dict[str, Any]:
        """The keys that every family of `DecoderDraftConfig` has but for the layer ids; see `decoder`."""
        return {
            "transformer_layer_config": self.decoder(verifier, layer_types),
            "target_hidden_size": verifier.hidden_size if self.has_own_width(verifier) else None,
            "draft_vocab_size": reduced_vocabulary(self.draft_vocab_size, verifier),
        }

    def decoder(self, verifier: VerifierShape, layer_types: list[str] | None = None) -> DecoderConfig:
        """The layer block; `layer_types` defaults to windows everywhere where `sliding_window` is set, else nowhere."""
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        layer_types = layer_types or [kind] * self.num_layers
        with refused_as_format_error(_draft_for(verifier)):
            return DecoderConfig.model_validate(
                {
                    **self.layer_fields(verifier),
                    **self._own_width(verifier),
                    "model_type": self.layer_type,
                    "attention_bias": self.attention_bias,
                    "layer_types": layer_types,
                    "sliding_window": self.sliding_window,
                    "use_sliding_window": "sliding_attention" in layer_types,
                    "bos_token_id": verifier.bos_token_id,
                    "eos_token_id": verifier.eos_token_id,
                    "pad_token_id": verifier.pad_token_id,
                }
            )

    def _own_width(self, verifier: VerifierShape) -> dict[str, int]:
        """Sizes of a draft of another width, where none are chosen."""
        width = self.hidden_size
        if width is None or width == verifier.hidden_size:
            return {}
        group = max(1, verifier.num_attention_heads // verifier.num_key_value_heads)
        heads = self.num_attention_heads or max(1, width // (self.head_dim or verifier.head_dim))
        shared = next(count for count in range(max(1, heads // group), 0, -1) if heads % count == 0)
        wide = -(-verifier.intermediate_size * width // verifier.hidden_size)
        return {
            "hidden_size": width,
            "intermediate_size": self.intermediate_size or wide,
            "num_attention_heads": heads,
            "num_key_value_heads": self.num_key_value_heads or shared,
        }
