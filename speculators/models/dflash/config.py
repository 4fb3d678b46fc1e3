"""What a resolved block drafter is: its keys in `config.json` and the tensors beside it (free of torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from speculators.formats.config import (
    MAX_SPECULATIVE_TOKENS,
    DecoderDraftConfig,
    LayerIds,
    TensorSpec,
    layer_tensors,
    mask_token_problem,
)


class BlockDraftConfig(DecoderDraftConfig):
    """A draft that fills blocks of `block_size` slots: an anchor, which is the last known token, and mask tokens.

    Slot k stands at the anchor's position + k. It predicts the token of its own position, so that slot 0 predicts
    nothing; with `sample_from_anchor` it predicts the token after its own, and no slot is without a prediction.
    `sliding_window_non_causal` says for every layer, with a window or without, whether the slots of a block see each
    other (true) or those before them alone (false): that is how vLLM reads it. It has no default, because readers
    disagree about one.
    """

    layer_ids_key: ClassVar[str] = "aux_hidden_state_layer_ids"

    aux_hidden_state_layer_ids: LayerIds = Field(
        description="ascending depths of the verifier whose states the draft reads"
    )
    block_size: int = Field(ge=2, le=MAX_SPECULATIVE_TOKENS + 1, description="slots of a block, the anchor included")
    mask_token_id: int = Field(ge=0, le=1 << 24, description="the token that stands for one still to be predicted")
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = Field(description="whether the slots of a block see each other")

    def disagreements(self) -> Iterator[tuple[str, str]]:
        """Yield the fault (its slug and what it says) of every pair of values that cannot both hold."""
        yield from super().disagreements()
        layer = self.transformer_layer_config
        if layer.model_type != "qwen3":
            text = f"transformer_layer_config.model_type is {layer.model_type!r}; a block drafter's layers are qwen3"
            yield "layer-model-type", text
        yield from mask_token_problem(self.mask_token_id, layer.vocab_size)
        if layer.is_causal and self.sliding_window_non_causal:
            text = "transformer_layer_config.is_causal contradicts sliding_window_non_causal; engines heed the first"
            yield "contradiction", f"{text}: remove it"
        most = self.max_speculative_tokens
        if self.num_speculative_tokens > most:
            slots = f"a block of {self.block_size}" + (
                "" if self.sample_from_anchor else ", whose first is the anchor,"
            )
            text = f"speculative_tokens is {self.num_speculative_tokens}; {slots} predicts {most} tokens"
            yield "tokens-exceed-block", f"{text}: write {most} or fewer"

    @property
    def first_slot(self) -> int:
        """The first slot that predicts a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def max_speculative_tokens(self) -> int:
        """The slots of a block that predict a token."""
        return self.block_size - self.first_slot

    def is_causal(self, layer: int) -> bool:
        """Whether a slot sees, in this layer, only the slots of its block up to itself: one policy for all layers."""
        return not self.sliding_window_non_causal

    @property
    def output_bias(self) -> bool:
        """Whether `attention_bias` gives the attention's output projection a bias too, as in vLLM's block drafters."""
        return True

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Return name, shape and necessity of every tensor, as vLLM's DFlash loader names and shapes them.

        Embeddings, and the head of a full vocabulary, are the verifier's unless the draft is of another width.
        """
        layer = self.transformer_layer_config
        hidden = layer.hidden_size
        tensors = {
            "fc.weight": TensorSpec((hidden, self.num_features)),
            "hidden_norm.weight": TensorSpec((hidden,)),
            "norm.weight": TensorSpec((hidden,)),
            **self.vocabulary_tensors(own_embeddings=self.has_own_width),
        }
        for index in range(layer.num_hidden_layers):
            tensors |= layer_tensors(layer, index, output_bias=self.output_bias)
        return tensors


class DFlashConfig(BlockDraftConfig):
    """DFlash: block drafting without anything between the slots but attention."""

    architectures: list[str] = Field(default=["DFlashDraftModel"], min_length=1)
    speculators_model_type: Literal["dflash"] = Field(default="dflash", description="the speculator's family")
