"""What `train_compare.py` gives each family's two trainers: the same shape of draft, and each its own ways to train it.

Shapes are those of the table in PyPI's own measurement on SmolLM2: 3 steps of training-time test; 2 layers and blocks
of 8; a Markov head of rank 64 and a confidence head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from speculators.extract.store import HiddenStatesStore

ROW_LENGTH = 1024
AUX_LAYERS = (2, 15, 27)
TTT_STEPS, BLOCK_SIZE, MARKOV_RANK = 3, 8, 64
# The peer counts anchors by packed row alone, this project by document, too, of which a row has five on average.
ANCHORS_A_ROW = 128
# The trainer's recommendation for SmolLM2, as in the recipes.
TRAIN = {"optimizer": "muon", "learning_rate": 2e-3, "warmup_ratio": 0.03, "schedule": "cosine"}


@dataclass(frozen=True)
class Comparison:
    """One family: this project's options of draft, objective and training, the peer's flags, and what should be found.

    `speed` is the least ratio of tokens per second, `memory` the largest of peak memories.
    """

    speed: float
    memory: float
    draft: dict[str, Any]
    objective: dict[str, Any]
    peer: dict[str, Any]
    positions: int
    train: dict[str, Any] = field(default_factory=lambda: TRAIN)
    blocks: bool = False
    shape: dict[str, Any] = field(default_factory=dict)


_BLOCKS: dict[str, Any] = {"num_layers": 2, "block_size": BLOCK_SIZE}
# Of small drafts, Muon takes a third of the time.
_TRAIN_BLOCKS = TRAIN | {"orthogonalisation": "polar_express", "ns_steps": 4, "learning_rate": 3e-3}
_PEER_BLOCKS = {
    "draft-attn-impl": "sdpa",
    "num-layers": 2,
    "block-size": BLOCK_SIZE,
    "max-anchors": ANCHORS_A_ROW,
}

FAMILIES = {
    "eagle3": Comparison(
        speed=2.0,
        memory=1 / 2,
        draft={},
        objective={"ttt_steps": TTT_STEPS},
        peer={"draft-attn-impl": "eager", "ttt-steps": TTT_STEPS},
        positions=TTT_STEPS,
        shape={"layers": 1, "ttt_steps": TTT_STEPS},
    ),
    "dflash": Comparison(
        speed=1.5,
        memory=3 / 4,
        # The slots of a block see those before them: so the peer trains layers with a window, and all have one there.
        draft=_BLOCKS | {"sliding_window_non_causal": False},
        objective={
            "max_anchors": 27,
            "max_blocks": ANCHORS_A_ROW,
            "loss": {"ce": 1.0},
            "position_weights": "dpace",
            "dpace_alpha": 0.6,
        },
        train=_TRAIN_BLOCKS,
        peer=_PEER_BLOCKS,
        positions=BLOCK_SIZE - 1,
        blocks=True,
        shape={"layers": 2, "block_size": BLOCK_SIZE},
    ),
    "dspark": Comparison(
        speed=1.5,
        memory=3 / 4,
        draft=_BLOCKS | {"markov_rank": MARKOV_RANK},
        # Its heads make up for a fifth of the blocks, which it needs time for.
        objective={"max_anchors": 22, "max_blocks": 104},
        train=_TRAIN_BLOCKS,
        peer=_PEER_BLOCKS | {"markov-rank": MARKOV_RANK},
        positions=BLOCK_SIZE,
        blocks=True,
        shape={"layers": 2, "block_size": BLOCK_SIZE, "markov_rank": MARKOV_RANK, "confidence_head": True},
    ),
}


def blocks_a_row(store: HiddenStatesStore, rows: Sequence[Sequence[int]], objective: Mapping[str, Any]) -> float:
    """How many blocks packed rows have on average, given the documents of each of them."""
    wanted = [sum(min(_room(store, document), objective["max_anchors"]) for document in row) for row in rows]
    return sum(min(blocks, objective["max_blocks"]) for blocks in wanted) / len(rows)


def _room(store: HiddenStatesStore, document: int) -> int:
    mask_T = store[document].loss_mask[:ROW_LENGTH]
    return int(torch.count_nonzero(mask_T[: max(len(mask_T) - BLOCK_SIZE, 0)]))


def peer_flags(options: dict[str, Any]) -> Sequence[str]:
    """Flags and values as words."""
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]
