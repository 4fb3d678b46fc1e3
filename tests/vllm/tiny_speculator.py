"""A speculator in a minute: a tiny random verifier answers the prompts, and a draft learns those answers by heart."""

from pathlib import Path

from speculators.models.eagle3.draft import Eagle3Draft
from speculators.train.config import TrainConfig
from speculators.train.recipe import DataConfig, Recipe, RegenerateConfig
from speculators.train.stages import Run
from tests.tiny_models import make_verifier

STAGES = ("regenerate", "prepare-data", "extract", "train")


def train_tiny_speculator(folder: Path, prompts: Path, max_tokens: int) -> Path:
    """Train below `folder` and return the speculator's directory; vLLM on a CPU needs heads of 32 and more."""
    verifier = folder / "verifier"
    if not (verifier / "config.json").is_file():
        make_verifier(verifier, hidden_size=128, num_heads=2, num_kv_heads=1)
    recipe = Recipe(
        name="vllm_check",
        verifier=str(verifier),
        family="eagle3",
        draft=Eagle3Draft(draft_vocab_size=256),
        objective={},
        regenerate=RegenerateConfig(prompts=(str(prompts),), max_new_tokens=max_tokens, dtype="float32"),
        data=DataConfig(validation_rows=0),
        train=TrainConfig(epochs=150, learning_rate=3e-3, measure_prompts=0, compute_dtype="float32"),
        out=str(folder / "run"),
    )
    run = Run(recipe)
    run.run(STAGES)
    return run.outputs.speculator
