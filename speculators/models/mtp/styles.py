"""The decoder layers that an MTP block can be made of, one line a model type (free of torch).

A style says what the layer of that `model_type` in transformers computes, as far as tensors, defaults and engines
depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MoeKind = Literal["none", "sparse_step", "always", "after_dense"]


@dataclass(frozen=True)
class LayerStyle:
    """One kind of full-attention decoder layer.

    `attention`: "plain"; "gated", whose `q_proj` makes an output gate beside the query; "latent", DeepSeek's MLA.
    `biases`: which projections the config's `attention_bias` (True where `fixed_bias`) gives one. `qk_norm`: "no",
    "yes", or "asked" where `use_qk_norm` decides. `moe`: when the MLP is a mixture of experts. `shared_expert`: the
    module of the expert that every token visits. `plus_one`: norms multiply by 1 + weight. `turns_part`: the layer
    knows `partial_rotary_factor`. `zero_first`: engines replace the embedding by zeros at position 0 (vLLM's MTP models
    of DeepSeek, GLM and MiMo). `full_attention_interval` and `defaults`: what transformers' config class takes for keys
    that are not there; only every so many layers attend fully, the others are linear.
    """

    attention: Literal["plain", "gated", "latent"] = "plain"
    biases: frozenset[str] = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
    fixed_bias: bool = False
    qk_norm: Literal["no", "yes", "asked"] = "no"
    moe: MoeKind = "none"
    shared_expert: Literal["shared_expert", "shared_experts"] | None = None
    plus_one: bool = False
    turns_part: bool = False
    zero_first: bool = False
    full_attention_interval: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def required(self) -> tuple[str, ...]:
        """Keys beyond those of every decoder that have to be there."""
        keys: list[str] = []
        if self.attention == "latent":
            keys += ["kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"]
        else:
            keys.append("head_dim")
        if self.moe != "always":
            keys.append("intermediate_size")
        return tuple(keys)

    @property
    def required_of_experts(self) -> tuple[str, ...]:
        """Keys that have to be there where the MLP is a mixture of experts."""
        keys = ["num_experts_per_tok", "moe_intermediate_size"]
        if self.moe == "after_dense":
            keys += ["n_shared_experts", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"]
        elif self.moe == "sparse_step":
            keys.append("norm_topk_prob")
        if self.shared_expert == "shared_expert":
            keys.append("shared_expert_intermediate_size")
        return tuple(keys)


_QKV = frozenset({"q_proj", "k_proj", "v_proj"})
_QWEN2 = LayerStyle(biases=_QKV, fixed_bias=True)
_SPARSE_STEP = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_TURNS_QUARTER = {"attention_bias": False, "partial_rotary_factor": 0.25}

STYLES: dict[str, LayerStyle] = {
    "llama": LayerStyle(defaults={"attention_bias": False, "mlp_bias": False}),
    "qwen2": _QWEN2,
    "mimo": LayerStyle(biases=_QKV, fixed_bias=True, zero_first=True),
    "qwen3": LayerStyle(qk_norm="yes", defaults={"attention_bias": False}),
    "qwen3_moe": LayerStyle(qk_norm="yes", moe="sparse_step", defaults=_SPARSE_STEP | {"attention_bias": False}),
    "qwen3_next": LayerStyle(
        attention="gated",
        qk_norm="yes",
        moe="sparse_step",
        shared_expert="shared_expert",
        plus_one=True,
        turns_part=True,
        full_attention_interval=4,
        defaults=_TURNS_QUARTER | _SPARSE_STEP,
    ),
    "qwen3_5_text": LayerStyle(
        attention="gated",
        qk_norm="yes",
        plus_one=True,
        turns_part=True,
        full_attention_interval=4,
        defaults=_TURNS_QUARTER,
    ),
    "qwen3_5_moe_text": LayerStyle(
        attention="gated",
        qk_norm="yes",
        moe="always",
        shared_expert="shared_expert",
        plus_one=True,
        turns_part=True,
        full_attention_interval=4,
        defaults=_TURNS_QUARTER,
    ),
    "deepseek_v3": LayerStyle(
        attention="latent",
        biases=frozenset({"q_a_proj", "kv_a_proj_with_mqa", "o_proj"}),
        moe="after_dense",
        shared_expert="shared_experts",
        zero_first=True,
        defaults={"attention_bias": False, "rope_interleave": True, "first_k_dense_replace": 3},
    ),
    "glm4_moe": LayerStyle(
        biases=_QKV,
        qk_norm="asked",
        moe="after_dense",
        shared_expert="shared_experts",
        turns_part=True,
        zero_first=True,
        defaults={
            "attention_bias": False,
            "use_qk_norm": False,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
        },
    ),
}
