"""The recipe behind `speculators quickstart`: SmolLM2 and the shipped conversations, in minutes on two CPU cores."""

from pathlib import Path

from speculators.models import FAMILIES
from speculators.train.config import TrainConfig
from speculators.train.recipe import DataConfig, EvaluateConfig, Recipe

CONVERSATIONS = "conversations-train.jsonl.xz"
HELD_OUT = "prompts-heldout.jsonl"


def shipped_data() -> Path:
    """The folder with the shipped prompts and answers: in the package where it is installed, else in the repository."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent / "recipes" / "data"


# The first family of the table, with its own defaults.
RECIPE = Recipe(
    name="quickstart",
    verifier="smollm2",
    family=next(iter(FAMILIES)),
    data=DataConfig(train=(str(shipped_data() / CONVERSATIONS),), limit=1100, max_length=512, validation_rows=24),
    train=TrainConfig(
        epochs=2,
        row_length=1024,
        accumulation=2,
        learning_rate=1e-3,
        warmup_ratio=0.05,
        measure_prompts=8,
        measure_tokens=48,
        checkpoint_every=100,
    ),
    evaluate=EvaluateConfig(data={"heldout": str(shipped_data() / HELD_OUT)}, limit=16),
)
