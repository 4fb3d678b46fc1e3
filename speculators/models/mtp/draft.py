"""What a user chooses about an MTP draft, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from speculators.errors import UsageError
from speculators.formats.config import MAX_SPECULATIVE_TOKENS
from speculators.models.choices import DraftChoices, completed
from speculators.models.family import VerifierShape
from speculators.models.mtp.config import MOST_BLOCKS, MtpConfig, NativeMtpConfig
from speculators.models.mtp.styles import STYLES

# What a shape that was put together by hand says about a dense layer.
_SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rope_parameters",
    "rms_norm_eps",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# By what a verifier's configuration says how many blocks its checkpoint has.
_LAYER_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


class MtpDraft(DraftChoices):
    """An MTP draft is a layer of its verifier's kind, so that only the number of drafted tokens is left to choose."""

    most_native_layers: ClassVar[int] = MOST_BLOCKS
    num_speculative_tokens: int = Field(default=3, gt=0, le=MAX_SPECULATIVE_TOKENS)

    @classmethod
    def native_layers(cls, verifier: VerifierShape) -> int | None:
        """MTP blocks of the verifier's own; UsageError where its configuration gives no whole number."""
        for key in _LAYER_COUNTS:
            count = verifier.raw.get(key)
            if count is None:
                continue
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise UsageError(f"verifier {verifier.name_or_path!r}: {key} is {count!r}; expected a whole number")
            return count
        return None

    def resolve_native(self, verifier: VerifierShape, count: int) -> MtpConfig:
        """The configuration of `count` blocks of the verifier's own; errors are those of `resolve`."""
        return self._completed(NativeMtpConfig, verifier, num_nextn_predict_layers=count)

    def resolve(self, verifier: VerifierShape) -> MtpConfig:
        """Complete the choice with the verifier's configuration.

        Raises UsageError for a verifier whose layers no MTP block is known for, FormatError where its configuration
        lacks what the block needs.
        """
        return self._completed(MtpConfig, verifier)

    def _completed(self, kind: type[MtpConfig], verifier: VerifierShape, **fields: Any) -> MtpConfig:
        if verifier.model_type not in STYLES:
            raise UsageError(
                f"verifier {verifier.name_or_path!r} is of type {verifier.model_type!r}; MTP blocks are known for "
                f"{', '.join(STYLES)}: choose another family of drafts"
            )
        layer: Mapping[str, Any] = verifier.raw or {key: getattr(verifier, key) for key in _SHAPE_KEYS}
        given = {**layer, "model_type": verifier.model_type}
        return completed(kind, self.num_speculative_tokens, verifier, transformer_layer_config=given, **fields)
