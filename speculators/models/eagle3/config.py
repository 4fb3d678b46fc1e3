"""What a resolved EAGLE-3 speculator is: its keys in `config.json` and the tensors beside it (free of torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from speculators.formats.config import DecoderDraftConfig, LayerIds, TensorSpec, layer_tensors

# How many auxiliary layers vLLM assumes for llama-type layers when the layer block does not say.
LLAMA_DEFAULT_AUX_LAYERS = 3


class FusedDraftConfig(DecoderDraftConfig):
    """One or more decoder layers over [embedding ; fused auxiliary states]: what EAGLE-3 and its descendants share.

    `norm_before_residual` has no default on purpose: readers take its absence for true or for false.
    `embed_requires_grad` says that the embeddings are the draft's own, trained from the verifier's or, where the draft
    is of another width, from random ones.
    """

    layer_ids_key: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"

    eagle_aux_hidden_state_layer_ids: LayerIds = Field(
        description="ascending depths of the verifier, which engines else guess"
    )
    norm_before_residual: bool = Field(description="whether layer 0 adds the normed state; readers' defaults differ")
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    embed_requires_grad: bool = False

    def disagreements(self) -> Iterator[tuple[str, str]]:
        """Yield the fault (its slug and what it says) of every pair of values that cannot both hold."""
        yield from super().disagreements()
        layer, ids = self.transformer_layer_config, self.aux_layer_ids
        for key in ("num_aux_hidden_states", "num_aux_layers"):
            count = getattr(layer, key)
            if count is not None and count != len(ids):
                text = f"transformer_layer_config.{key} is {count}; expected {len(ids)}, the number of layer ids"
                yield "num-aux-hidden-states", text
        if self.norm_before_fc and self.fc_norm:
            yield "norms-before-fc", "norm_before_fc and fc_norm are both true; set at most one of them"

    def to_json(self) -> dict[str, Any]:
        """Return what `config.json` holds; llama layers get the feature count that vLLM cannot infer otherwise."""
        written = super().to_json()
        layer = written["transformer_layer_config"]
        if layer["model_type"] == "llama" and len(self.aux_layer_ids) != LLAMA_DEFAULT_AUX_LAYERS:
            layer["num_aux_hidden_states"] = len(self.aux_layer_ids)
        return written

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Return name, shape and necessity of every tensor, as vLLM's EAGLE-3 loader names and shapes them.

        Embeddings and a full-vocabulary head may be left to the verifier where they are its own. `d2t` is there exactly
        when the draft vocabulary is reduced.
        """
        layer = self.transformer_layer_config
        hidden, features = layer.hidden_size, self.num_features
        tensors = {
            "fc.weight": TensorSpec((hidden, features)),
            "norm.weight": TensorSpec((hidden,)),
            "layers.0.hidden_norm.weight": TensorSpec((hidden,)),
            **self.vocabulary_tensors(own_embeddings=self.has_own_width or self.embed_requires_grad),
        }
        if self.norm_before_fc:
            tensors["input_norm.weight"] = TensorSpec((features,))
        if self.fc_norm:
            width = (self.verifier_hidden_size,)
            tensors |= {f"fc_norm.{index}.weight": TensorSpec(width) for index in range(len(self.aux_layer_ids))}
        for index in range(layer.num_hidden_layers):
            read = 2 * hidden if index == 0 else hidden
            tensors |= layer_tensors(layer, index, output_bias=self.output_bias, attention_input=read)
        return tensors


class Eagle3Config(FusedDraftConfig):
    """EAGLE-3: drafts one token after another, recycling its own output."""

    architectures: list[str] = Field(default=["Eagle3DraftModel"], min_length=1)
    speculators_model_type: Literal["eagle3"] = Field(default="eagle3", description="the speculator's family")
