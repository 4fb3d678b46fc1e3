"""What a user chooses about a block drafter, and how the verifier completes it (free of torch)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from speculators.errors import UsageError
from speculators.formats.config import MAX_SPECULATIVE_TOKENS
from speculators.models.choices import DecoderChoices, completed, mask_token
from speculators.models.dflash.config import BlockDraftConfig, DFlashConfig
from speculators.models.family import VerifierShape

LayerType = Literal["full_attention", "sliding_attention"]


def spread_layer_ids(num_draft_layers: int, num_layers: int) -> list[int]:
    """Capture ids of as many verifier layers as the draft has, spread evenly over its depth.

    In the numbering of layer outputs: the middle one for one draft layer, else round(1 + i (L - 4) / (n - 1)) for
    i = 0..n-1, as DFlash's authors choose them; a capture id is one more. In a shallow verifier some coincide.
    """
    if num_draft_layers == 1:
        outputs = [num_layers // 2]
    else:
        outputs = [round(1 + i * (num_layers - 4) / (num_draft_layers - 1)) for i in range(num_draft_layers)]
    return sorted({min(max(output + 1, 0), num_layers) for output in outputs})


class BlockChoices(DecoderChoices):
    """The shape of a block drafter. What is None follows the verifier.

    `mask_token_id` defaults to the last row of the verifier's embeddings, which in most verifiers no text contains.
    `layer_types` says for each layer whether it has the window `sliding_window`; by default all have it where it is
    set. The number of speculative tokens follows from `block_size` and `sample_from_anchor`. A family's further options
    are keys of its config, of the same names.
    """

    config_type: ClassVar[type[BlockDraftConfig]]

    num_layers: int = Field(default=5, ge=1, le=64)
    layer_type: Literal["qwen3"] = "qwen3"
    layer_types: list[LayerType] | None = None
    draft_vocab_size: int | None = Field(default=None, gt=0)
    block_size: int = Field(default=8, ge=2, le=MAX_SPECULATIVE_TOKENS + 1)
    mask_token_id: int | None = Field(default=None, ge=0)
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = True

    def resolve(self, verifier: VerifierShape) -> BlockDraftConfig:
        """Complete the choices with the verifier's shape.

        Raises UsageError for a choice that contradicts the verifier or another choice, FormatError for what no config
        can say, such as a rotation of the verifier's that no draft can follow (give `rope_parameters` then).
        """
        default = spread_layer_ids(self.num_layers, verifier.num_hidden_layers)
        return completed(
            self.config_type,
            self.block_size - (0 if self.sample_from_anchor else 1),
            verifier,
            **self.decoder_fields(verifier, self._checked_layer_types()),
            aux_hidden_state_layer_ids=self.checked_layer_ids(default, verifier),
            block_size=self.block_size,
            mask_token_id=mask_token(self.mask_token_id, verifier),
            sample_from_anchor=self.sample_from_anchor,
            sliding_window_non_causal=self.sliding_window_non_causal,
            **self.model_dump(exclude=set(BlockChoices.model_fields)),
        )

    def _checked_layer_types(self) -> list[str] | None:
        if self.layer_types is None:
            return None
        if len(self.layer_types) != self.num_layers:
            raise UsageError(f"layer_types has {len(self.layer_types)} entries; expected num_layers, {self.num_layers}")
        if ("sliding_attention" in self.layer_types) is (self.sliding_window is None):
            raise UsageError(
                f"layer_types is {self.layer_types} and sliding_window {self.sliding_window}; a window needs a layer "
                "of type sliding_attention, and such a layer a window"
            )
        return list(self.layer_types)


class DFlashDraft(BlockChoices):
    """The shape of a DFlash draft: `BlockChoices`, and nothing besides."""

    config_type = DFlashConfig
