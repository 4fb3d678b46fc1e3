"""What MTP tells the contract test about itself."""

from torch import Tensor

from speculators.models.draft_model import PackedBatch
from speculators.models.mtp.objective import align
from speculators.models.speculator import Speculator
from tests.models.contract import FamilyContract, Flag, Overfit
from tests.models.drafts import verifier_head
from tests.models.mtp.verifiers import RAW

DEPTH = 3


def training_logits(speculator: Speculator, document: PackedBatch) -> list[Tensor]:
    """Logits [T - DEPTH - 1, D] at every step."""
    inputs = align(document, DEPTH).inputs
    inputs.states_CH = verifier_head().norm(inputs.states_CH)
    return [speculator.draft.lm_head(state) for state in speculator.draft(inputs)]


def of_style(style: str) -> dict:
    """Options that make the contract's verifier one of this style."""
    return {"verifier": {"model_type": RAW[style]["model_type"], "raw": RAW[style]}}


CONTRACT = FamilyContract(
    variants={"plain": {}} | {style: of_style(style) for style in RAW},
    training_logits=training_logits,
    depth=DEPTH,
    reads="normed",
    # What the verifier decides, since a draft has no flags of its own.
    flags=[
        Flag({"verifier": {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}}),
        Flag({"verifier": {"model_type": "mimo"}}, {"verifier": {"model_type": "qwen2"}}),
        Flag({"verifier": {"model_type": "qwen3"}}, {"verifier": {"model_type": "llama"}}),
    ],
    # At later steps training attends to that step's keys of earlier positions, serving to those of step 0.
    overfit=Overfit(steps=100, lr=1e-2, depth=1),
    golden={},
    vllm={"served": False, "method": None, "num_speculative_tokens": 3, "model": "golden/verifier"},
)
