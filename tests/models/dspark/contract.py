"""What DSpark tells the contract test about itself."""

from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.models.dflash.model import BlockInputs
from speculators.models.draft_model import PackedBatch
from speculators.models.speculator import Speculator
from tests.models.contract import FamilyContract, Flag, Overfit

# Of four slots, with a window in one layer of two, as a draft for long contexts has it.
BLOCK = {"block_size": 4, "num_layers": 2, "markov_rank": 6}
BONUS = {**BLOCK, "sample_from_anchor": False}
MIXED = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}


@dataclass
class Read:
    """What training makes of one document with a block at every anchor from `first_anchor` on.

    `states_ASH` of all slots; of those that predict, with the document's tokens before them, `logits_AJD` and the
    confidence head's `certainty_AJ`, None without one.
    """

    states_ASH: Tensor
    logits_AJD: Tensor
    certainty_AJ: Tensor | None


def read(speculator: Speculator, document: PackedBatch, first_anchor: int = 1) -> Read:
    """Run the training forward; the last anchor's block ends with the document."""
    draft, ids_T = speculator.draft, document.input_ids[0]
    first, size, drafts = draft.config.first_slot, draft.config.block_size, draft.config.max_speculative_tokens
    anchors_A = torch.arange(first_anchor, len(ids_T) - size + 1)
    features, positions = document.aux_hidden_states[0], document.position_ids[0]
    states_ASH = draft(BlockInputs(features, positions, [len(ids_T)], anchors_A, ids_T[anchors_A]))
    embeds_AJR, vectors_AJR = draft.rank_vectors(states_ASH, ids_T[anchors_A[:, None] + torch.arange(drafts)])
    states_AJH, head = states_ASH[:, first:], draft.confidence_head
    logits_AJD = draft.lm_head(states_AJH) + draft.markov_head.bias(vectors_AJR)
    return Read(states_ASH, logits_AJD, None if head is None else head(states_AJH, embeds_AJR))


def training_logits(speculator: Speculator, document: PackedBatch) -> list[Tensor]:
    """Logits [A, D] of each predicting slot; row t belongs to the block whose anchor is t + 1."""
    return list(read(speculator, document).logits_AJD.unbind(1))


def confidences(speculator: Speculator, document: PackedBatch) -> list[Tensor]:
    """Confidence logits [A] of each predicting slot; none without the head."""
    certainty_AJ = read(speculator, document).certainty_AJ
    return [] if certainty_AJ is None else list(certainty_AJ.unbind(1))


CONTRACT = FamilyContract(
    variants={
        "plain": BLOCK,
        "window": {**BLOCK, "sliding_window": 5},
        "mixed_layers": {**BLOCK, **MIXED},
        "gated": {**BLOCK, "markov_head_type": "gated", "confidence_head_with_markov": False},
        "rnn": {**BLOCK, "markov_head_type": "rnn"},
        "no_confidence_full_vocabulary": {**BLOCK, "enable_confidence_head": False, "draft_vocab_size": None},
        "bonus": BONUS,
        "bonus_rnn_window": {**BONUS, "markov_head_type": "rnn", "sliding_window": 5},
        "own_width": {**BLOCK, "hidden_size": 16},
    },
    training_logits=training_logits,
    # A slot's logits read the anchor, which stands before the first, and the token before it.
    token_reach=lambda step: 1 + step,
    flags=[
        Flag({"sample_from_anchor": False}, BLOCK),
        Flag({"enable_confidence_head": False}, BLOCK, output="trained"),
        Flag({"confidence_head_with_markov": False}, BLOCK, output="confidences"),
        # It says nothing that the layers' types do not: true is refused beside a window (see test_config).
        Flag({"sliding_window_non_causal": True, "sliding_window": None}, {**BLOCK, "sliding_window": 5}),
        Flag({"markov_head_type": "gated"}, BLOCK),
        Flag({"markov_head_type": "rnn"}, BLOCK),
        Flag({"sliding_window": 2}, BLOCK),
        Flag(MIXED, {**BLOCK, "sliding_window": 5}),
        Flag({"mask_token_id": 5}, BLOCK),
        Flag({"block_size": 5}, BLOCK),
    ],
    outputs={"confidences": confidences},
    golden={
        "num_layers": 2,
        "block_size": 8,
        "aux_layer_ids": [2, 4, 5],
        "draft_vocab_size": 32,
        "sliding_window": 128,
    },
    vllm={
        "method": "dspark",
        "parallel_drafting": True,
        "num_speculative_tokens": 8,
        "model": "golden/verifier",
        "architecture": "Qwen3DSparkModel",
        "runner": "V2",
        "capture_layer_ids": [2, 4, 5],
        "num_aux_features": 3,
        "mask_token_id": 127,
        "causal_layers": [True, True],
        "dflash_config": None,
        "draft": {
            "draft_vocab_size": 32,
            "target_hidden_size": None,
            "mask_token_id": 127,
            "block_size": 8,
            "sample_from_anchor": True,
            "dspark_bonus_anchor": False,
            "target_layer_ids": [1, 3, 4],
            "markov_rank": 256,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    },
    overfit=Overfit(options=BLOCK, steps=120, lr=1e-2, objective={"loss": {"ce": 1.0}}),
)
