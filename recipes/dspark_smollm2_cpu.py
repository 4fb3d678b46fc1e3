"""DSpark: three drafts from the anchor on, each biased by the token before it, with a confidence of its own.

    accelerate launch recipes/dspark_smollm2_cpu.py [stage ...] [key=value ...] [--plan]

For SmolLM2-135M-Instruct on two CPU cores, on the conversations of the EAGLE-3 recipe.
"""

from pathlib import Path

from speculators.models.dspark.draft import DSparkDraft
from speculators.models.dspark.objective import DSparkObjective
from speculators.train.config import TrainConfig
from speculators.train.recipe import DataConfig, EvaluateConfig, Recipe, run

DATA = Path(__file__).resolve().parent / "data"

RECIPE = Recipe(
    name="dspark_smollm2_cpu",
    verifier="smollm2",
    family="dspark",
    draft=DSparkDraft(draft_vocab_size=8192, num_layers=2, block_size=3),
    objective=DSparkObjective(),
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
    evaluate=EvaluateConfig(
        data={"heldout": str(DATA / "prompts-heldout.jsonl")}, limit=80, max_num_seqs=16, dtype="float32"
    ),
)

if __name__ == "__main__":
    run(RECIPE)
