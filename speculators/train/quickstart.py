"""Recipes for SmolLM2 and the shipped conversations on two CPU cores: minutes of one field, or an hour of all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from speculators.models import DEFAULT_FAMILY
from speculators.models.choices import DraftChoices
from speculators.train.config import TrainConfig
from speculators.train.recipe import DataConfig, EvaluateConfig, Recipe

CONVERSATIONS = "conversations-train.jsonl.xz"
HELD_OUT = "prompts-heldout.jsonl"


def shipped_data() -> Path:
    """The folder with the shipped prompts and answers: in the package where it is installed, else in the repository."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent / "recipes" / "data"


def on_held_out_prompts(**options: Any) -> EvaluateConfig:
    """The evaluation on the shipped prompts whose subjects no training prompt has; `options` are EvaluateConfig's."""
    return EvaluateConfig(data={"heldout": str(shipped_data() / HELD_OUT)}, **options)


# A few minutes teach a draft one field, not all of them: code, tables, series and calculations by steps.
FIELD = "structured"
# Conversations that two cores take in within a quarter of an hour, with instructions for bfloat16 and without.
ROWS, ROWS_IN_FLOAT32 = 850, 380


def quickstart_recipe(bfloat16: bool) -> Recipe:
    """The recipe for a machine that has instructions for bfloat16 products, or for one that has none."""
    # A smaller draft vocabulary is cheaper in training and serving, and loses 3 tokens in 100.
    draft = DEFAULT_FAMILY.draft(draft_vocab_size=4096)
    rows = ROWS if bfloat16 else ROWS_IN_FLOAT32
    return minutes_recipe(draft, DEFAULT_FAMILY.objective(), DEFAULT_FAMILY.name, name="quickstart", rows=rows)


def minutes_recipe(
    draft: DraftChoices,
    objective: BaseModel,
    family: str,
    *,
    name: str = "",
    rows: int = ROWS,
    train: Mapping[str, Any] | None = None,
) -> Recipe:
    """The recipe `<family>_smollm2_cpu` of some ten minutes: one field's conversations, twice.

    `train` are settings of training that differ from the quickstart's.
    """
    return Recipe(
        name=name or f"{family}_smollm2_cpu",
        verifier="smollm2",
        family=family,
        draft=draft,
        objective=objective,
        data=DataConfig(
            train=(str(shipped_data() / CONVERSATIONS),),
            limit=rows,
            match=FIELD,
            max_length=512,
            validation_rows=16,
        ),
        train=_training(epochs=2, measure_prompts=4, measure_tokens=48, **(train or {})),
        # Float32: identity is exact there.
        evaluate=on_held_out_prompts(limit=16, match=FIELD, max_new_tokens=96, dtype="float32"),
    )


def hour_recipe(draft: DraftChoices, objective: BaseModel, family: str) -> Recipe:
    """The recipe `<family>_smollm2_cpu`: all conversations, three times."""
    return Recipe(
        name=f"{family}_smollm2_cpu",
        verifier="smollm2",
        family=family,
        draft=draft,
        objective=objective,
        data=DataConfig(train=(str(shipped_data() / CONVERSATIONS),), max_length=1024, validation_rows=64),
        train=_training(epochs=3, measure_prompts=16, measure_tokens=64),
        # Float32: identity is exact there.
        evaluate=on_held_out_prompts(limit=80, max_num_seqs=16, dtype="float32"),
    )


def _training(**settings: Any) -> TrainConfig:
    shared = {"row_length": 1024, "optimizer": "muon", "learning_rate": 2e-3, "warmup_ratio": 0.03}
    return TrainConfig(**{**shared, "checkpoint_every": 200, **settings})
