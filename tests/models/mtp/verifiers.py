"""Configurations of tiny verifiers of every kind that an MTP block is known for, as their files say it.

The keys and the places where they stand are those of published checkpoints; sizes are those of `tests.models.drafts`
(hidden size 32, 40 tokens).
"""

from typing import Any

from speculators.models.family import VerifierShape

_DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
}
_QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
_HYBRID = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
_LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}

RAW: dict[str, dict[str, Any]] = {
    "llama_bias": {
        **_DECODER,
        "model_type": "llama",
        "intermediate_size": 48,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "qwen2": {**_DECODER, "model_type": "qwen2", "intermediate_size": 48, "rope_theta": 10000.0},
    "mimo": {
        **_DECODER,
        "model_type": "mimo",
        "intermediate_size": 48,
        "head_dim": 10,
        "attention_bias": True,
        "rope_theta": 640000,
        "num_nextn_predict_layers": 1,
        "sliding_window": 32,
        "use_sliding_window": False,
        "max_window_layers": 4,
    },
    "qwen3": {
        **_DECODER,
        "model_type": "qwen3",
        "intermediate_size": 48,
        "head_dim": 12,
        "attention_bias": False,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 4,
    },
    "qwen3_moe": {
        **_DECODER,
        **_QWEN_EXPERTS,
        "model_type": "qwen3_moe",
        "intermediate_size": 48,
        "head_dim": 8,
        "rope_theta": 1000000.0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
    },
    "qwen3_next": {
        **_DECODER,
        **_HYBRID,
        **_QWEN_EXPERTS,
        "model_type": "qwen3_next",
        "intermediate_size": 48,
        "head_dim": 16,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_next_dense": {
        **_DECODER,
        **_HYBRID,
        **_QWEN_EXPERTS,
        "model_type": "qwen3_next",
        "intermediate_size": 48,
        "head_dim": 8,
        "attention_bias": True,
        # Pitfall 37: index 0 is no full attention; the block is like the last layer that is.
        "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "mlp_only_layers": [2],
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_5": {
        **_DECODER,
        **_HYBRID,
        "model_type": "qwen3_5_text",
        "intermediate_size": 48,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
        "mtp_num_hidden_layers": 1,
    },
    "qwen3_5_moe": {
        **_DECODER,
        **_HYBRID,
        **_QWEN_EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
        "shared_expert_intermediate_size": 20,
    },
    "deepseek": {
        **_DECODER,
        **_DEEPSEEK,
        **_LATENT,
        "model_type": "deepseek_v3",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    },
    "deepseek_dense": {
        **_DECODER,
        **_DEEPSEEK,
        **_LATENT,
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "attention_bias": True,
        "rope_interleave": False,
        "first_k_dense_replace": 5,
        "rope_theta": 10000.0,
    },
    "glm": {
        **_DECODER,
        **_DEEPSEEK,
        "model_type": "glm4_moe",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "n_group": 1,
        "topk_group": 1,
    },
    "glm_plain": {
        **_DECODER,
        **_DEEPSEEK,
        "model_type": "glm4_moe",
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def shape_of(style: str) -> VerifierShape:
    """What a draft inherits from the verifier of this style."""
    return VerifierShape.from_config_dict(RAW[style], f"org/{style}")
