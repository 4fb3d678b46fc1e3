"""EAGLE-3 for SmolLM2-135M-Instruct on two CPU cores, within an hour.

    accelerate launch recipes/eagle3_smollm2_cpu.py [stage ...] [key=value ...] [--plan]

The verifier wrote the shipped conversations itself (recipes/data). Other prompts are measured with
`evaluate evaluate.data.<name>=PROMPTS.jsonl`.
"""

from pathlib import Path

from speculators.models.eagle3.draft import Eagle3Draft
from speculators.models.eagle3.objective import Eagle3Objective
from speculators.train.config import TrainConfig
from speculators.train.recipe import DataConfig, EvaluateConfig, Recipe, run

DATA = Path(__file__).resolve().parent / "data"

RECIPE = Recipe(
    name="eagle3_smollm2_cpu",
    verifier="smollm2",
    family="eagle3",
    draft=Eagle3Draft(
        draft_vocab_size=8192,
        norm_before_fc=True,
        norm_output=True,
        norm_before_residual=True,
        num_speculative_tokens=3,
    ),
    objective=Eagle3Objective(ttt_steps=3),
    data=DataConfig(train=(str(DATA / "conversations-train.jsonl.xz"),), max_length=1024, validation_rows=64),
    train=TrainConfig(
        epochs=3,
        row_length=1024,
        optimizer="muon",
        learning_rate=2e-3,
        warmup_ratio=0.03,
        measure_prompts=16,
        measure_tokens=64,
        checkpoint_every=200,
    ),
    # Float32: identity is exact there.
    evaluate=EvaluateConfig(
        data={"heldout": str(DATA / "prompts-heldout.jsonl")}, limit=80, max_num_seqs=16, dtype="float32"
    ),
)

if __name__ == "__main__":
    run(RECIPE)
