"""What EAGLE tells the contract test about itself."""

import torch
from torch import Tensor

from speculators.models.draft_model import PackedBatch
from speculators.models.eagle.objective import align
from speculators.models.speculator import Speculator
from speculators.models.unroll import Unroll
from tests.models.contract import FamilyContract, Flag, Overfit
from tests.models.drafts import verifier_head

DEPTH = 3


def training_logits(speculator: Speculator, document: PackedBatch) -> list[Tensor]:
    """Logits [T - 2 - k, V] at every step; the last position with a target is T - 3."""
    aligned = align(document, verifier_head())
    slots = [torch.arange(len(aligned.token_ids_C) - step) for step in range(DEPTH)]
    inputs = Unroll(aligned.features_CH, aligned.token_ids_C, aligned.positions_C, aligned.document_lengths, slots)
    return [speculator.draft.lm_head(state) for state in speculator.draft(inputs)]


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

CONTRACT = FamilyContract(
    variants={
        "plain": {},
        "biases_norms_two_layers": {
            "num_layers": 2,
            "bias": True,
            "qkv_bias": True,
            "embed_layernorm": True,
            "post_embedding_layernorm": True,
        },
        "narrow_heads": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6, "bias": True},
        "llama3_rope": {"rope_parameters": LLAMA3, "embed_layernorm": True},
    },
    training_logits=training_logits,
    depth=DEPTH,
    reads="normed",
    # Noise on features depends on how documents lie together.
    objective={"feature_noise": 0.0, "num_passes": DEPTH},
    flags=[
        Flag({"bias": True}),
        Flag({"qkv_bias": True}),
        Flag({"embed_layernorm": True}),
        Flag({"post_embedding_layernorm": True}),
        Flag({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        Flag({"rope_parameters": LLAMA3}),
    ],
    golden={"bias": True, "qkv_bias": True},
    vllm={"method": None, "num_speculative_tokens": 3, "model": "golden/verifier"},
    overfit=Overfit(steps=200, lr=1e-2, objective={"num_passes": DEPTH, "feature_noise": 0.0}),
)
