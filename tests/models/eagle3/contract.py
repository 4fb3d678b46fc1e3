"""What EAGLE-3 tells the contract test about itself."""

import torch
from torch import Tensor

from speculators.models.draft_model import PackedBatch
from speculators.models.eagle3.distillation import align
from speculators.models.speculator import Speculator
from speculators.models.unroll import Unroll
from tests.models.contract import FamilyContract, Flag, Overfit

DEPTH = 3


def training_logits(speculator: Speculator, document: PackedBatch) -> list[Tensor]:
    """Logits [T - 2 - k, D] at every step; the last position with a target is T - 3."""
    aligned = align(document)
    slots = [torch.arange(len(aligned.token_ids_C) - step) for step in range(DEPTH)]
    inputs = Unroll(aligned.features_CX, aligned.token_ids_C, aligned.positions_C, aligned.document_lengths, slots)
    return [speculator.draft.lm_head(state) for state in speculator.draft(inputs)]


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
QWEN3 = {"layer_type": "qwen3"}

CONTRACT = FamilyContract(
    variants={
        "plain": {},
        "qwen3_window": {**QWEN3, "sliding_window": 4},
        "three_layers": {"num_layers": 3, "norm_output": False},
        "two_features_biases": {"aux_layer_ids": [1, 8], "attention_bias": True, "norm_before_residual": False},
        "four_features": {"aux_layer_ids": [0, 2, 5, 8]},
        "fc_norm_full_vocabulary": {"fc_norm": True, "norm_before_fc": False, "draft_vocab_size": None},
        "llama3_rope": {"rope_parameters": LLAMA3},
        "yarn_rope": {"rope_parameters": YARN},
        "trained_embeddings": {"embed_requires_grad": True},
        "narrower": {"hidden_size": 16},
        "narrower_full_vocabulary": {**QWEN3, "hidden_size": 24, "num_layers": 2, "draft_vocab_size": None},
    },
    training_logits=training_logits,
    depth=DEPTH,
    flags=[
        Flag({"norm_before_residual": False}, QWEN3),
        Flag({"norm_before_fc": False}, QWEN3),
        Flag({"norm_before_fc": False, "fc_norm": True}, {**QWEN3, "norm_before_fc": False}),
        Flag({"norm_output": False}, QWEN3),
        Flag({"sliding_window": 2}, QWEN3),
        Flag({"attention_bias": True}, QWEN3),
        Flag({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, QWEN3),
        Flag({"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}, QWEN3),
        Flag({"rope_parameters": LLAMA3}, QWEN3),
        Flag({"rope_parameters": YARN}, QWEN3),
        Flag({"embed_requires_grad": True}, output="trained"),
    ],
    golden={"draft_vocab_size": 32},
    vllm={
        "method": "eagle3",
        "parallel_drafting": False,
        "num_speculative_tokens": 3,
        "model": "golden/verifier",
        "architecture": "Eagle3LlamaForCausalLM",
        "capture_layer_ids": [2, 4, 5],
        "num_aux_features": 3,
        "draft": {
            "draft_vocab_size": 32,
            "target_hidden_size": None,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "fc_norm": False,
            "norm_output": True,
        },
    },
    # The verifier's law is flat: by its divergence alone a draft takes longer to put the likeliest token first.
    overfit=Overfit(steps=150, lr=6e-3, objective={"loss": {"ce": 1.0}}),
)
