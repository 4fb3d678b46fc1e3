"""What a resolved block drafter is: its keys in `config.json` and the tensors beside it (free of torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from speculators.formats.config import MAX_SPECULATIVE_TOKENS, DecoderDraftConfig, TensorSpec

LayerId = Annotated[int, Field(ge=0, le=4096)]


class BlockDraftConfig(DecoderDraftConfig):
    """A draft that fills blocks of `block_size` slots: an anchor, which is the last known token, and mask tokens.

    Slot k stands at the anchor's position + k. It predicts the token of its own position, so that slot 0 predicts
    nothing; with `sample_from_anchor` it predicts the token after its own, and no slot is without a prediction.
    `sliding_window_non_causal` says for every layer, with a window or without, whether the slots of a block see each
    other (true) or those before them alone (false): that is how vLLM reads it. It has no default, because readers
    disagree about one.
    """

    aux_hidden_state_layer_ids: list[LayerId] = Field(
        min_length=1, max_length=1024, description="ascending depths of the verifier whose states the draft reads"
    )
    block_size: int = Field(ge=2, le=MAX_SPECULATIVE_TOKENS + 1, description="slots of a block, the anchor included")
    mask_token_id: int = Field(ge=0, le=1 << 24, description="the token that stands for one still to be predicted")
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = Field(description="whether the slots of a block see each other")

    def disagreements(self) -> Iterator[tuple[str, str]]:
        """Yield the fault (its slug and what it says) of every pair of values that cannot both hold."""
        yield from super().disagreements()
        layer, ids = self.transformer_layer_config, self.aux_hidden_state_layer_ids
        if ids != sorted(set(ids)):
            order = f"expected {sorted(set(ids))}, the order in which engines concatenate the states"
            yield "layer-ids", f"aux_hidden_state_layer_ids is {ids}; {order}"
        if layer.model_type != "qwen3":
            text = f"transformer_layer_config.model_type is {layer.model_type!r}; a block drafter's layers are qwen3"
            yield "layer-model-type", text
        if self.mask_token_id >= layer.vocab_size:
            text = f"mask_token_id {self.mask_token_id} has no embedding; expected an id below {layer.vocab_size}"
            yield "mask-token-id", text
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
    def aux_layer_ids(self) -> list[int]:
        """Depths of the verifier whose residual streams feed the draft, ascending."""
        return self.aux_hidden_state_layer_ids

    @property
    def has_own_width(self) -> bool:
        """Whether the verifier's embeddings and head do not fit the draft, so that it has both of its own."""
        return self.transformer_layer_config.hidden_size != self.verifier_hidden_size

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
        hidden, features = layer.hidden_size, len(self.aux_layer_ids) * self.verifier_hidden_size
        own = self.has_own_width
        tensors = {
            "embed_tokens.weight": TensorSpec((layer.vocab_size, hidden), required=own),
            "fc.weight": TensorSpec((hidden, features)),
            "hidden_norm.weight": TensorSpec((hidden,)),
            "norm.weight": TensorSpec((hidden,)),
            **self.vocabulary_tensors(),
        }
        head = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = head._replace(required=head.required or own)
        for index in range(layer.num_hidden_layers):
            tensors |= self.layer_tensors(index)
        return tensors


class DFlashConfig(BlockDraftConfig):
    """DFlash: block drafting without anything between the slots but attention."""

    architectures: list[str] = Field(default=["DFlashDraftModel"], min_length=1)
    speculators_model_type: Literal["dflash"] = Field(default="dflash", description="the speculator's family")
