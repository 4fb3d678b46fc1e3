"""Tiny configurations of transformers' own classes: mixtures of experts, latent attention, nested language parts."""

from collections.abc import Callable
from typing import Any

from transformers import (
    BambaConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4Config,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral3Config,
    MixtralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

HIDDEN, LAYERS, VOCAB = 32, 4, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WITHOUT_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 8}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}

TINY: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, rope_parameters=YARN
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: DeepseekV3Config(
        **WITHOUT_HEAD_DIM | LATENT,
        **EXPERTS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm4_moe": lambda: Glm4MoeConfig(**SIZES, **EXPERTS, n_routed_experts=4, first_k_dense_replace=1),
    "qwen3_next": lambda: Qwen3NextConfig(**SIZES, **EXPERTS, **LINEAR, num_experts=4),
    "qwen3_5": lambda: Qwen3_5Config(text_config={**SIZES, **LINEAR}),
    "qwen3_5_moe": lambda: Qwen3_5MoeConfig(
        text_config={**SIZES, **EXPERTS, **LINEAR, "intermediate_size": None, "num_experts": 4}
    ),
    "lfm2": lambda: Lfm2Config(
        **WITHOUT_HEAD_DIM,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    ),
    "lfm2_moe": lambda: Lfm2MoeConfig(
        **WITHOUT_HEAD_DIM,
        **EXPERTS,
        num_experts=4,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
    ),
    "bamba": lambda: BambaConfig(**WITHOUT_HEAD_DIM, **MAMBA, mamba_d_head=16, attn_layer_indices=[1]),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **WITHOUT_HEAD_DIM,
        **MAMBA,
        mamba_d_head=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
    ),
    "falcon_h1": lambda: FalconH1Config(**SIZES, **MAMBA, mamba_d_ssm=32, mamba_d_head=8),
    "falcon_h1_normed": lambda: FalconH1Config(
        **SIZES, **MAMBA, mamba_d_ssm=32, mamba_d_head=8, mamba_rms_norm=True, ssm_in_multiplier=0.7, key_multiplier=0.6
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **SIZES,
        **EXPERTS,
        layer_types=["linear_attention", "full_attention", "linear_attention", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=6,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        n_shared_experts=1,
        moe_shared_expert_intermediate_size=16,
        rope_theta=1e4,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config={
            **WITHOUT_HEAD_DIM,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
        }
    ),
    "gemma3": lambda: Gemma3Config(text_config={**SIZES, "sliding_window": 4}),
    "gemma3_text": lambda: Gemma3TextConfig(**SIZES, sliding_window=4),
    "gemma3n": lambda: Gemma3nTextConfig(**SIZES | {"intermediate_size": [48, 48, 64, 64]}),
    "llama4": lambda: Llama4Config(text_config={**SIZES, "intermediate_size_mlp": 112, "num_local_experts": 2}),
    "mistral3": lambda: Mistral3Config(text_config={**SIZES, "model_type": "mistral"}),
    "ministral3": lambda: Ministral3Config(**SIZES),
    "minimax_m2": lambda: MiniMaxM2Config(**SIZES, num_local_experts=4),
}
