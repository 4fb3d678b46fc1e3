"""What P-EAGLE tells the contract test about itself."""

import torch
from torch import Tensor

from speculators.models.draft_model import PackedBatch
from speculators.models.eagle3.distillation import align
from speculators.models.peagle.parallel import Depths
from speculators.models.speculator import Speculator
from tests.models.contract import FamilyContract, Flag, Overfit

DEPTH = 3


def training_logits(speculator: Speculator, document: PackedBatch) -> list[Tensor]:
    """Logits [T - 2 - d, D] of every anchor that has something to learn at depth d."""
    aligned = align(document)
    anchors = [torch.arange(len(aligned.token_ids_C) - depth) for depth in range(DEPTH)]
    inputs = Depths(aligned.features_CX, aligned.token_ids_C, aligned.positions_C, aligned.document_lengths, anchors)
    return [speculator.draft.lm_head(state) for state in speculator.draft(inputs)]


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
QWEN3 = {"layer_type": "qwen3", "num_layers": 2}

CONTRACT = FamilyContract(
    variants={
        "plain": {"num_layers": 2},
        "four_layers": {},
        "one_layer": {"num_layers": 1, "norm_before_residual": False},
        "qwen3_window": {**QWEN3, "sliding_window": 4},
        "window_below_depth": {**QWEN3, "sliding_window": 2},
        "two_features_biases": {"aux_layer_ids": [1, 8], "attention_bias": True, "norm_before_fc": False},
        "full_vocabulary": {"num_layers": 2, "draft_vocab_size": None},
        "frozen_embeddings": {"num_layers": 2, "embed_requires_grad": False, "mask_token_id": 1},
        "narrower": {"num_layers": 2, "hidden_size": 16},
        "linear_rope": {"num_layers": 2, "rope_parameters": LINEAR},
    },
    training_logits=training_logits,
    depth=DEPTH,
    token_reach=lambda step: 1,
    objective={"down_sample_ratio": 1.0},
    flags=[
        Flag({"norm_before_residual": False}, QWEN3),
        Flag({"norm_before_fc": False}, QWEN3),
        Flag({"embed_requires_grad": False}, QWEN3, output="trained"),
        Flag({"mask_token_id": 1}, QWEN3),
        Flag({"sliding_window": 2}, QWEN3),
        Flag({"attention_bias": True}, QWEN3),
        Flag({"rope_parameters": LINEAR}, QWEN3),
    ],
    golden={
        "layer_type": "qwen3",
        "num_layers": 2,
        "sliding_window": 32,
        "draft_vocab_size": 32,
        "norm_before_fc": False,
    },
    vllm={
        "method": "eagle3",
        "parallel_drafting": True,
        "num_speculative_tokens": 8,
        "model": "golden/verifier",
        "architecture": "PeagleQwen3ForCausalLM",
        "capture_layer_ids": [2, 4, 5],
        "num_aux_features": 3,
        "draft": {
            "draft_vocab_size": 32,
            "target_hidden_size": None,
            "norm_before_residual": True,
            "norm_before_fc": False,
            "mask_token_id": 127,
        },
    },
    # The verifier's law is flat: by its divergence alone a draft takes longer to put the likeliest token first.
    overfit=Overfit(
        steps=150, lr=6e-3, options={"num_layers": 2}, objective={"num_depths": DEPTH, "loss": {"ce": 1.0}}
    ),
)
