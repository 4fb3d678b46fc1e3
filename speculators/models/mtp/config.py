"""What a resolved MTP speculator is: its keys in `config.json` and the tensors beside it (free of torch)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from speculators.errors import FormatError
from speculators.formats.config import SpeculatorConfig, TensorSpec
from speculators.models.mtp.layer_config import MtpLayerConfig

PREFIX = "mtp_layers.0."
MOST_BLOCKS = 16

Shapes = dict[str, tuple[int, ...]]


class MtpConfig(SpeculatorConfig):
    """Multi-token prediction: one decoder layer of the verifier's kind over [embedding ; state], applied repeatedly.

    Embeddings and output head are the verifier's and are not written.
    """

    architectures: list[str] = Field(default=["MTPDraftModel"], min_length=1)
    speculators_model_type: Literal["mtp"] = Field(default="mtp", description="the speculator's family")
    transformer_layer_config: MtpLayerConfig
    num_nextn_predict_layers: int = Field(default=1, ge=1, le=1, description="blocks, of which only one is known")

    def to_json(self) -> dict[str, Any]:
        """Return what `config.json` holds, the layer block as it is written."""
        return super().to_json() | {"transformer_layer_config": self.transformer_layer_config.to_json()}

    @property
    def verifier_hidden_size(self) -> int:
        """Width of the verifier's last state, and of everything here."""
        return self.transformer_layer_config.hidden_size

    @property
    def verifier_vocab_size(self) -> int:
        """Rows of the verifier's embedding table, padding included."""
        return self.transformer_layer_config.vocab_size

    def network(self) -> str:
        """Say in a few words what the draft is made of, as for a model card."""
        layer = self.transformer_layer_config
        experts = f" with {layer.num_routed_experts} experts" if layer.num_routed_experts else ""
        return f"1 `{layer.model_type}` layer{experts} of width {layer.hidden_size}"

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Return name, shape and necessity of every tensor; the layer's own names are those of transformers' layer.

        Experts are fused as transformers holds them: `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I].
        """
        layer = self.transformer_layer_config
        hidden, vocab = layer.hidden_size, layer.vocab_size
        shapes: Shapes = {
            "token_layernorm.weight": (hidden,),
            "hidden_layernorm.weight": (hidden,),
            "input_proj.weight": (hidden, 2 * hidden),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "final_layernorm.weight": (hidden,),
        }
        shapes |= {f"self_attn.{name}": shape for name, shape in _attention_shapes(layer).items()}
        shapes |= {f"mlp.{name}": shape for name, shape in _mlp_shapes(layer).items()}
        specs = {name: TensorSpec(shape) for name, shape in shapes.items()}
        if layer.style.moe == "after_dense" and layer.num_routed_experts:
            # Rounded to half precision, these offsets would choose other experts.
            specs["mlp.gate.e_score_correction_bias"] = TensorSpec((layer.num_routed_experts,), "float32")
        blocks = range(self.num_nextn_predict_layers)
        tensors = {f"mtp_layers.{block}.{name}": spec for block in blocks for name, spec in specs.items()}
        return tensors | {
            "embed_tokens.weight": TensorSpec((vocab, hidden), required=False),
            "lm_head.weight": TensorSpec((vocab, hidden), required=False),
        }


class NativeMtpConfig(MtpConfig):
    """Several MTP blocks of a verifier's own checkpoint, of which block i drafts token i of a step.

    It is never written: a speculator's directory has one block, as its format says.
    """

    num_nextn_predict_layers: int = Field(default=1, ge=1, le=MOST_BLOCKS)

    def to_json(self) -> dict[str, Any]:
        """Return what `config.json` holds; FormatError where that would be more than one block."""
        count = self.num_nextn_predict_layers
        if count != 1:
            raise FormatError(
                f"{count} MTP blocks: a speculator's config.json says num_nextn_predict_layers 1; serve these from the "
                "verifier's own checkpoint (method 'mtp' without a model)"
            )
        return super().to_json()

    def network(self) -> str:
        """Say in a few words what the draft is made of."""
        return f"{self.num_nextn_predict_layers} blocks, each of {super().network()}"


def _attention_shapes(layer: MtpLayerConfig) -> Shapes:
    linear = _latent_shapes(layer) if layer.style.attention == "latent" else _head_shapes(layer)
    shapes: Shapes = {f"{name}.weight": shape for name, shape in linear.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linear.items() if layer.bias_of(name)}
    if layer.style.attention == "latent":
        shapes["kv_a_layernorm.weight"] = (layer.kv_lora_rank or 0,)
        if layer.q_lora_rank is not None:
            shapes["q_a_layernorm.weight"] = (layer.q_lora_rank,)
    elif layer.has_qk_norm:
        shapes |= {"q_norm.weight": (layer.head_dim or 0,), "k_norm.weight": (layer.head_dim or 0,)}
    return shapes


def _head_shapes(layer: MtpLayerConfig) -> Shapes:
    hidden, size = layer.hidden_size, layer.head_dim or 0
    wide, narrow = layer.num_attention_heads * size, layer.num_key_value_heads * size
    return {
        "q_proj": (2 * wide if layer.style.attention == "gated" else wide, hidden),
        "k_proj": (narrow, hidden),
        "v_proj": (narrow, hidden),
        "o_proj": (hidden, wide),
    }


def _latent_shapes(layer: MtpLayerConfig) -> Shapes:
    hidden, heads = layer.hidden_size, layer.num_attention_heads
    turned, still, values = layer.qk_rope_head_dim or 0, layer.qk_nope_head_dim or 0, layer.v_head_dim or 0
    rank, query = layer.kv_lora_rank or 0, heads * (turned + still)
    shapes: Shapes = {
        "kv_a_proj_with_mqa": (rank + turned, hidden),
        "kv_b_proj": (heads * (still + values), rank),
        "o_proj": (hidden, heads * values),
    }
    if layer.q_lora_rank is None:
        return shapes | {"q_proj": (query, hidden)}
    return shapes | {"q_a_proj": (layer.q_lora_rank, hidden), "q_b_proj": (query, layer.q_lora_rank)}


def _mlp_shapes(layer: MtpLayerConfig) -> Shapes:
    hidden, experts, width = layer.hidden_size, layer.num_routed_experts, layer.moe_intermediate_size or 0
    if not experts:
        dense = _gated_shapes(layer.intermediate_size or 0, hidden)
        biases = {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in dense.items()}
        return dense | biases if layer.mlp_bias else dense
    shapes: Shapes = {
        "gate.weight": (experts, hidden),
        "experts.gate_up_proj": (experts, 2 * width, hidden),
        "experts.down_proj": (experts, hidden, width),
    }
    shared = layer.style.shared_expert
    if shared == "shared_expert":
        shapes["shared_expert_gate.weight"] = (1, hidden)
        shapes |= _gated_shapes(layer.shared_expert_intermediate_size or 0, hidden, f"{shared}.")
    elif shared == "shared_experts":
        shapes |= _gated_shapes(width * (layer.n_shared_experts or 0), hidden, f"{shared}.")
    return shapes


def _gated_shapes(width: int, hidden: int, prefix: str = "") -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }
