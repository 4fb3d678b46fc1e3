"""What DFlash tells the contract test about itself."""

import torch
from torch import Tensor

from speculators.models.dflash.model import BlockInputs
from speculators.models.draft_model import PackedBatch
from speculators.models.speculator import Speculator
from tests.models.contract import FamilyContract, Flag, Overfit

BLOCK = {"block_size": 4, "num_layers": 2}
FULL = {"draft_vocab_size": None}
CAUSAL = {"sliding_window_non_causal": False}
MIXED = {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def training_logits(speculator: Speculator, document: PackedBatch) -> list[Tensor]:
    """Logits [T - 1, D] of each predicting slot; row t belongs to the block whose anchor is t + 1."""
    draft, ids_T = speculator.draft, document.input_ids[0]
    anchors_A = torch.arange(1, len(ids_T))
    features, positions = document.aux_hidden_states[0], document.position_ids[0]
    states = draft(BlockInputs(features, positions, [len(ids_T)], anchors_A, ids_T[anchors_A]))
    return list(draft.lm_head(states[:, draft.config.first_slot :]).unbind(1))


CONTRACT = FamilyContract(
    variants={
        "plain": BLOCK,
        "causal": {**BLOCK, **CAUSAL},
        "window_full_vocabulary": {**BLOCK, **FULL, "sliding_window": 3},
        "causal_window": {**BLOCK, **CAUSAL, "sliding_window": 3},
        "mixed_layers": {**BLOCK, **MIXED},
        "from_anchor": {**BLOCK, "sample_from_anchor": True},
        "one_layer_biases_six_features": {
            "block_size": 4,
            "num_layers": 1,
            "attention_bias": True,
            "aux_layer_ids": [0, 1, 3, 5, 7, 8],
        },
        "own_width": {**BLOCK, "hidden_size": 16},
        "largest_block": {**BLOCK, "block_size": 6, "rope_parameters": LINEAR},
    },
    training_logits=training_logits,
    # Whatever the step, a block reads its anchor alone.
    token_reach=lambda step: 1,
    flags=[
        Flag(CAUSAL, BLOCK),
        Flag(CAUSAL, {**BLOCK, **MIXED}),
        Flag({"sample_from_anchor": True}, BLOCK),
        Flag({"sliding_window": 2}, BLOCK),
        Flag(MIXED, {**BLOCK, "sliding_window": 3}),
        Flag({"mask_token_id": 5}, BLOCK),
        Flag({"block_size": 5}, BLOCK),
        Flag({"attention_bias": True}, BLOCK),
        Flag({"rope_parameters": LINEAR}, BLOCK),
        Flag({"hidden_size": 16}, BLOCK, output="trained"),
    ],
    golden={
        "num_layers": 2,
        "block_size": 16,
        "aux_layer_ids": [2, 4, 5],
        "draft_vocab_size": None,
        "sliding_window": 128,
        "sliding_window_non_causal": False,
    },
    vllm={
        "method": "dflash",
        "parallel_drafting": True,
        "num_speculative_tokens": 15,
        "model": "golden/verifier",
        "architecture": "DFlashDraftModel",
        "runner": "V1 or V2",
        "capture_layer_ids": [2, 4, 5],
        "num_aux_features": 3,
        "mask_token_id": 127,
        "causal_layers": [True, True],
        "dflash_config": {
            "mask_token_id": 127,
            "target_layer_ids": [1, 3, 4],
            "sample_from_anchor": False,
            "causal": True,
        },
        "draft": {"draft_vocab_size": 128, "target_hidden_size": None},
    },
    overfit=Overfit(steps=150, lr=6e-3, options=BLOCK, objective={"loss": {"ce": 1.0}}),
)
