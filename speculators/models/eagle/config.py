"""What a resolved EAGLE speculator is: its keys in `config.json` and the tensors beside it (free of torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, ValidationError

from speculators.formats.config import SpeculatorConfig, TensorSpec, layer_tensors
from speculators.formats.decoder import DecoderConfig, Size, Vocabulary
from speculators.formats.faults import config_faults, shown

# Keys that describe the decoder layers, as Hugging Face's Llama names them.
LAYER_KEYS = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_parameters", "initializer_range",
}  # fmt: skip


class EagleConfig(SpeculatorConfig):
    """EAGLE-1 and what shares its network (EAGLE-2, HASS): llama layers over fc([embedding ; last state]).

    The decoder's keys stand at the top level, as in EAGLE's own files. `bias` (of `fc`) has no default: EAGLE's own
    code takes its absence for true, vLLM for false. `qkv_bias` gives queries, keys and values biases. The norms that
    some checkpoints have are there where their flags say so: `embed_layernorm` on the embedding, and
    `post_embedding_layernorm` on the last layer's output, before the verifier's head.
    """

    architectures: list[str] = Field(default=["EagleDraftModel"], min_length=1)
    speculators_model_type: Literal["eagle"] = Field(default="eagle", description="the speculator's family")
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: int = Field(gt=0, le=1024, description="decoder layers of the draft")
    num_attention_heads: int = Field(gt=0, le=65536)
    num_key_value_heads: int = Field(gt=0, le=65536)
    head_dim: int = Field(gt=0, le=65536)
    vocab_size: Vocabulary
    rms_norm_eps: float = Field(gt=0, lt=1)
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: int = Field(gt=0, le=1 << 31)
    rope_parameters: dict[str, Any]
    initializer_range: float = Field(default=0.02, ge=0, le=1)
    bias: bool = Field(description="whether fc has a bias; readers' defaults differ")
    qkv_bias: bool = False
    embed_layernorm: bool = False
    post_embedding_layernorm: bool = False

    def disagreements(self) -> Iterator[tuple[str, str]]:
        """Yield the fault (its slug and what it says) of every pair of values that cannot both hold."""
        yield from super().disagreements()
        try:
            read = self.decoder().rope_parameters
        except ValidationError as error:
            for problem in config_faults(error, DecoderConfig):
                yield problem.slug, problem.message.removeprefix("transformer_layer_config: ")
        else:
            if read != self.rope_parameters:
                yield "bad-value", f"rope_parameters is {shown(self.rope_parameters)}; expected {shown(read)}"

    def decoder(self) -> DecoderConfig:
        """Return the layers as other families describe theirs; layer 0 has no input norm besides."""
        layers = self.model_dump(include=LAYER_KEYS)
        return DecoderConfig.model_validate({"model_type": "llama", "attention_bias": self.qkv_bias, **layers})

    @property
    def verifier_hidden_size(self) -> int:
        """Width of the verifier's last state, which is the draft's own: the verifier's head reads both."""
        return self.hidden_size

    @property
    def verifier_vocab_size(self) -> int:
        """Rows of the verifier's embedding table, padding included."""
        return self.vocab_size

    def network(self) -> str:
        """Say in a few words what the draft is made of, as for a model card."""
        return self.decoder().words

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Return name, shape and necessity of every tensor, as vLLM's EAGLE loader names and shapes them.

        Embeddings may be left to the verifier. Its head always is: engines refuse a file that has one, and they refuse
        an input norm of layer 0.
        """
        hidden, layers = self.hidden_size, self.decoder()
        norms = [name for name in ("embed_layernorm", "post_embedding_layernorm") if getattr(self, name)]
        tensors = {
            "embed_tokens.weight": TensorSpec((self.vocab_size, hidden), required=False),
            "fc.weight": TensorSpec((hidden, 2 * hidden)),
            **({"fc.bias": TensorSpec((hidden,))} if self.bias else {}),
            **{f"{name}.weight": TensorSpec((hidden,)) for name in norms},
        }
        for index in range(self.num_hidden_layers):
            tensors |= layer_tensors(layers, index, output_bias=False)
        del tensors["layers.0.input_layernorm.weight"]
        return tensors
