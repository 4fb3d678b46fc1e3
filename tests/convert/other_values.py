"""What keys of configurations say wrongly in mutations."""

from typing import Any

# Values that keys of configurations do not have in any of the checkpoints, whatever they stand in.
OTHER_VALUES: dict[str, list[Any]] = {
    "hidden_size": [48, "64"],
    "intermediate_size": [81],
    "num_hidden_layers": [6],
    "num_attention_heads": [5, 0],
    "num_key_value_heads": [3],
    "head_dim": [20],
    "vocab_size": [300, 385],
    "draft_vocab_size": [95],
    "target_hidden_size": [96],
    "hidden_act": ["gelu"],
    "rms_norm_eps": [-1.0, "small"],
    "rope_scaling": [{"type": "dynamic", "factor": 2.0}],
    "rope_theta": [0, "10000"],
    "max_position_embeddings": [0],
    "mlp_bias": [True],
    "attention_bias": [True],
    "qkv_bias": [True],
    "bias": ["yes"],
    "norm_before_residual": ["no"],
    "norm_before_fc": [True],
    "fc_norm": [True],
    "norm_output": [False],
    "logit_scale": [0.5],
    "num_aux_hidden_states": [2],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}],
    "block_size": [1, 500],
    "markov_rank": [7],
    "markov_head_type": ["other"],
    "mask_token_id": [10_000, -1],
    "ptd_token_id": [10_000],
    "num_target_layers": [9],
    "medusa_num_layers": [5],
    "n_predict": [4],
    "inner_dim": [41],
    "emb_dim": [65],
    "tie_weights": [True],
    "layer_types": [["linear_attention"] * 2],
}
ID_KEYS = (
    "eagle_aux_hidden_state_layer_ids",
    "aux_hidden_states_layer_ids",
    "target_layer_ids",
    "dspark_target_layer_ids",
)
OTHER_IDS: list[Any] = [[99, 100, 101], [1], [-7, 1, 2], "1,2,3", [1.5, 2, 3], []]
