"""What DFlash 2 tells the contract test about itself."""

import torch
from torch import Tensor

from speculators.models.dflash.model import BlockInputs
from speculators.models.dflash2.model import DFlash2Model
from speculators.models.draft_model import PackedBatch
from speculators.models.speculator import Speculator
from tests.models.contract import FamilyContract, Flag, Overfit

BLOCK = {"block_size": 4, "num_layers": 2, "draft_vocab_size": None, "selector_rank": 8, "selector_top_k": 5}
CAUSAL = {"sliding_window_non_causal": False}


def training_logits(speculator: Speculator, document: PackedBatch) -> list[Tensor]:
    """Logits [P, V] of each predicting slot, after the data's token before it; row t is the block with anchor t + 1.

    -inf where a token is no candidate, as in serving.
    """
    draft, ids_T = speculator.draft, document.input_ids[0]
    assert isinstance(draft, DFlash2Model)
    anchors_A = torch.arange(1, len(ids_T))
    features, positions = document.aux_hidden_states[0], document.position_ids[0]
    states = draft(BlockInputs(features, positions, [len(ids_T)], anchors_A, ids_T[anchors_A]))
    found = []
    for step, states_AH in enumerate(states[:, draft.config.first_slot :].unbind(1)):
        known = len(ids_T) - 1 - step
        unary = draft.lm_head(states_AH[:known])
        candidates = unary.topk(draft.config.selector_top_k).indices
        added = draft.candidate_selector(states_AH[:known], ids_T[anchors_A[:known] + step], candidates)
        full = torch.full_like(unary, float("-inf"))
        found.append(full.scatter(1, candidates, unary.gather(1, candidates) + added))
    return found


CONTRACT = FamilyContract(
    variants={
        "plain": BLOCK,
        "causal_window": {**BLOCK, **CAUSAL, "sliding_window": 3},
        "three_taps_groups_of_8": {**BLOCK, "conv_kernel_size": 3, "conv_group_size": 8},
        "more_taps_than_slots": {**BLOCK, "conv_kernel_size": 6, "conv_group_size": 32},
        "from_anchor_biases": {**BLOCK, "sample_from_anchor": True, "attention_bias": True},
    },
    training_logits=training_logits,
    flags=[
        Flag(CAUSAL, BLOCK),
        Flag({"sample_from_anchor": True}, BLOCK),
        Flag({"conv_kernel_size": 3}, BLOCK),
        Flag({"conv_group_size": 8}, BLOCK),
        Flag({"selector_rank": 4}, BLOCK),
        Flag({"selector_top_k": 4}, BLOCK),
    ],
    golden={
        "num_layers": 2,
        "aux_layer_ids": [2, 4, 5],
        "draft_vocab_size": None,
        "sliding_window": 128,
    },
    vllm={
        "method": "dflash",
        "parallel_drafting": True,
        "num_speculative_tokens": 7,
        "architecture": "DFlash2DraftModel",
        "runner": "V2",
        "capture_layer_ids": [2, 4, 5],
        "mask_token_id": 127,
        "causal_layers": [False, False],
        "dflash_config": {
            "mask_token_id": 127,
            "target_layer_ids": [1, 3, 4],
            "sample_from_anchor": False,
            "causal": False,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
        },
        "draft": {"draft_vocab_size": 128, "target_hidden_size": None},
    },
    overfit=Overfit(steps=150, lr=6e-3, options=BLOCK, objective={"loss": {"ce": 1.0}}),
)
