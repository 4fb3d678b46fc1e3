"""What MLPSpeculator tells the contract test about itself."""

from torch import Tensor

from speculators.models.draft_model import PackedBatch
from speculators.models.speculator import Speculator
from tests.models.contract import FamilyContract, Flag, Overfit
from tests.models.drafts import verifier_head

DEPTH = 3


def training_logits(speculator: Speculator, document: PackedBatch) -> list[Tensor]:
    """Logits [T - 1 - k, V] of every step, given the data's tokens."""
    draft, tokens = speculator.draft, document.input_ids[0]
    steps, found = draft.config.n_predict, []
    normed = verifier_head().norm(document.last_hidden_states[0])
    after = tokens.new_zeros(len(tokens), steps)
    for step in range(steps):
        after[: len(tokens) - 1 - step, step] = tokens[1 + step :]
    for step, state in enumerate(draft(normed, after)):
        found.append(draft.output_head(step)(state[: len(tokens) - 1 - step]))
    return found


CONTRACT = FamilyContract(
    variants={
        "plain": {},
        "untied": {"tie_weights": False},
        "unscaled": {"scale_input": False},
        "narrow": {"inner_dim": 24, "n_predict": 4, "tie_weights": False, "scale_input": False},
        "inner_dim_follows": {"config": {"inner_dim": 0}},
    },
    training_logits=training_logits,
    depth=DEPTH,
    reads="normed",
    frozen=frozenset(),
    flags=[
        Flag({"tie_weights": False}),
        Flag({"tie_weights": False}, output="trained"),
        Flag({"scale_input": False}),
    ],
    golden={"n_predict": 4, "inner_dim": 48},
    vllm={"method": None, "num_speculative_tokens": 4, "model": "golden/verifier"},
    overfit=Overfit(steps=120, lr=1e-2),
)
