"""What Medusa tells the contract test about itself."""

from torch import Tensor

from speculators.models.draft_model import PackedBatch
from speculators.models.speculator import Speculator
from tests.models.contract import FamilyContract, Flag, Overfit
from tests.models.drafts import verifier_head


def training_logits(speculator: Speculator, document: PackedBatch) -> list[Tensor]:
    """Logits [T, D] of every head at every position."""
    draft = speculator.draft
    states = draft(verifier_head().norm(document.last_hidden_states[0]))
    return [draft.output_head(head)(state) for head, state in enumerate(states)]


CONTRACT = FamilyContract(
    variants={
        "plain": {"num_heads": 3},
        "full_vocabulary": {"num_heads": 4, "draft_vocab_size": None},
        "two_layers_no_bias": {"num_heads": 3, "num_layers": 2, "bias": False},
        "shared_head": {"num_heads": 3, "shared_lm_head": True, "draft_vocab_size": None},
        "shared_truncated_head": {"num_heads": 3, "shared_lm_head": True},
    },
    training_logits=training_logits,
    token_reach=lambda head: None,
    reads="normed",
    flags=[
        Flag({"bias": False}, {"num_heads": 3}),
        Flag({"shared_lm_head": True}, {"num_heads": 3}),
        Flag({"shared_lm_head": True}, {"num_heads": 3}, output="trained"),
        Flag({"num_layers": 2}, {"num_heads": 3}),
    ],
    golden={"num_heads": 4, "draft_vocab_size": 32},
    vllm={"method": None, "num_speculative_tokens": 4, "model": "golden/verifier"},
    overfit=Overfit(steps=150, lr=1e-2, options={"num_heads": 3}),
)
