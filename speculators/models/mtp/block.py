"""The MTP block: transformers' own decoder layer of the verifier's kind, with the norms and the projection before it.

The four further modules sit on the layer itself, so that names in its `state_dict()` are the file's.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from speculators.models.attention_interface import ATTENTION_NAME
from speculators.models.layers import SkinnyLinear, use_skinny_linears
from speculators.models.mtp.layer_config import MtpLayerConfig


class LayerClasses(NamedTuple):
    """What transformers builds a model type of."""

    config: type[PretrainedConfig]
    layer: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]


_QWEN2 = LayerClasses(
    Qwen2Config, modeling_qwen2.Qwen2DecoderLayer, modeling_qwen2.Qwen2RMSNorm, modeling_qwen2.Qwen2RotaryEmbedding
)
LAYER_CLASSES: dict[str, LayerClasses] = {
    "llama": LayerClasses(
        LlamaConfig,
        modeling_llama.LlamaDecoderLayer,
        modeling_llama.LlamaRMSNorm,
        modeling_llama.LlamaRotaryEmbedding,
    ),
    "qwen2": _QWEN2,
    # MiMo's layer is that of Qwen2, of which its own configuration class is a subclass.
    "mimo": _QWEN2,
    "qwen3": LayerClasses(
        Qwen3Config,
        modeling_qwen3.Qwen3DecoderLayer,
        modeling_qwen3.Qwen3RMSNorm,
        modeling_qwen3.Qwen3RotaryEmbedding,
    ),
    "qwen3_moe": LayerClasses(
        Qwen3MoeConfig,
        modeling_qwen3_moe.Qwen3MoeDecoderLayer,
        modeling_qwen3_moe.Qwen3MoeRMSNorm,
        modeling_qwen3_moe.Qwen3MoeRotaryEmbedding,
    ),
    "qwen3_next": LayerClasses(
        Qwen3NextConfig,
        modeling_qwen3_next.Qwen3NextDecoderLayer,
        modeling_qwen3_next.Qwen3NextRMSNorm,
        modeling_qwen3_next.Qwen3NextRotaryEmbedding,
    ),
    "qwen3_5_text": LayerClasses(
        Qwen3_5TextConfig,
        modeling_qwen3_5.Qwen3_5DecoderLayer,
        modeling_qwen3_5.Qwen3_5RMSNorm,
        modeling_qwen3_5.Qwen3_5TextRotaryEmbedding,
    ),
    "qwen3_5_moe_text": LayerClasses(
        Qwen3_5MoeTextConfig,
        modeling_qwen3_5_moe.Qwen3_5MoeDecoderLayer,
        modeling_qwen3_5_moe.Qwen3_5MoeRMSNorm,
        modeling_qwen3_5_moe.Qwen3_5MoeTextRotaryEmbedding,
    ),
    "deepseek_v3": LayerClasses(
        DeepseekV3Config,
        modeling_deepseek_v3.DeepseekV3DecoderLayer,
        modeling_deepseek_v3.DeepseekV3RMSNorm,
        modeling_deepseek_v3.DeepseekV3RotaryEmbedding,
    ),
    "glm4_moe": LayerClasses(
        Glm4MoeConfig,
        modeling_glm4_moe.Glm4MoeDecoderLayer,
        modeling_glm4_moe.Glm4MoeRMSNorm,
        modeling_glm4_moe.Glm4MoeRotaryEmbedding,
    ),
}
# Keys that say where in the verifier a layer stands; the block is alone, so that they get values of its own or none.
_PLACE = {
    "model_type",
    "num_hidden_layers",
    "layer_types",
    "full_attention_interval",
    "sliding_window",
    "max_window_layers",
    "mlp_only_layers",
    "decoder_sparse_step",
}
# Of the whole model; what configuration classes take by default may be outside a small vocabulary.
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


class MtpBlock(Protocol):
    """A decoder layer of any kind with the modules that make it an MTP block."""

    token_layernorm: nn.Module
    hidden_layernorm: nn.Module
    input_proj: nn.Linear
    final_layernorm: nn.Module

    def __call__(self, hidden_states: Tensor, **options: Any) -> Tensor: ...


def alone(layer: MtpLayerConfig) -> PretrainedConfig:
    """The configuration of a model whose one layer, of index 0, is the block's."""
    values = {key: getattr(layer, key) for key in type(layer).model_fields if key not in _PLACE}
    given = {key: value for key, value in values.items() if value is not None or key == "q_lora_rank"}
    if layer.style.attention == "latent":
        given.pop("head_dim", None)
    dense = not layer.num_routed_experts
    if layer.style.moe == "sparse_step":
        given |= {"mlp_only_layers": [0] if dense else [], "decoder_sparse_step": 1}
    elif layer.style.moe == "after_dense":
        given |= {"first_k_dense_replace": 1 if dense else 0}
    elif layer.style.moe == "none":
        given.pop("num_experts", None)
    if layer.layer_types is not None:
        given["layer_types"] = ["full_attention" if layer.window is None else "sliding_attention"]
    given |= {"num_hidden_layers": 1, "use_sliding_window": layer.window is not None} | _NO_TOKENS
    if layer.window is not None:
        given["sliding_window"] = layer.window
    given |= {"attn_implementation": ATTENTION_NAME, "experts_implementation": "eager"}
    return LAYER_CLASSES[layer.model_type].config(**given)


def build_block(layer: MtpLayerConfig, place: int = 0) -> nn.Module:
    """A block, with transformers' initial values (experts without any); see `MtpBlock` for what it offers.

    `place` is the layer of a cache that its keys go to.
    """
    classes, config = LAYER_CLASSES[layer.model_type], alone(layer)
    hidden, eps = layer.hidden_size, layer.rms_norm_eps
    block = classes.layer(config, 0)
    cast(Any, block).self_attn.layer_idx = place
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        block.add_module(name, classes.norm(hidden, eps=eps))
    block.add_module("input_proj", SkinnyLinear(2 * hidden, hidden, bias=False))
    use_skinny_linears(block)
    return block


def build_rotary(layer: MtpLayerConfig) -> nn.Module:
    """What makes cos and sin of positions for the block; it has no tensors of a checkpoint."""
    return LAYER_CLASSES[layer.model_type].rotary(alone(layer))


def cache_argument(block: nn.Module) -> str:
    """What this version of transformers calls a layer's cache."""
    return "cache" if "cache" in inspect.signature(cast(Any, block.forward)).parameters else "past_key_values"
