"""Drafts in a minute: a tiny random verifier answers the prompts, and speculators learn those answers by heart."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculators.models import FAMILIES
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.train.config import TrainConfig
from speculators.train.recipe import DataConfig, Recipe
from speculators.train.stages import Run
from tests.tiny_models import make_verifier

STAGES = ("prepare-data", "extract", "train")


@dataclass(frozen=True)
class Choice:
    """A family, the choices about its draft and its objective, and how long the answers are learnt."""

    family: str
    draft: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    epochs: int = 120


def write_answers(verifier: Path, prompts: Sequence[str], max_tokens: int, path: Path) -> None:
    """Rows of token ids: what a random model says need not survive being text."""
    llm = LLM(str(verifier), dtype="float32")
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    with path.open("w", encoding="utf-8") as file:
        for output in outputs:
            asked, answered = output.prompt_token_ids, output.outputs[0].token_ids
            mask = [0] * len(asked) + [1] * len(answered)
            file.write(json.dumps({"input_ids": asked + answered, "loss_mask": mask}) + "\n")


def make_lesson(folder: Path, prompts: Sequence[str], max_tokens: int) -> tuple[Path, Path]:
    """A verifier that vLLM serves on a CPU (heads of 32 and more), and the rows of its answers."""
    verifier, rows = folder / "verifier", folder / "rows.jsonl"
    make_verifier(verifier, hidden_size=128, num_heads=2, num_kv_heads=1)
    write_answers(verifier, prompts, max_tokens, rows)
    return verifier, rows


def disturbed(folder: Path, verifier: Path, noise: float) -> Path:
    """A verifier's own weights with that much noise on each, as a model that drafts for it."""
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(verifier).save_pretrained(folder)
    return folder


def make_stranger(folder: Path) -> Path:
    """A model of the lesson's vocabulary, and of other sizes and weights than its verifier."""
    return make_verifier(folder, hidden_size=64, num_layers=2, seed=1)


def learn(folder: Path, verifier: Path, rows: Path, choice: Choice) -> Path:
    """Train a draft on the rows below `folder` and return the speculator's directory."""
    recipe = Recipe(
        name=folder.name,
        verifier=str(verifier),
        family=choice.family,
        draft=FAMILIES[choice.family].draft(**choice.draft),
        objective=choice.objective,
        data=DataConfig(train=(str(rows),), validation_rows=0),
        train=TrainConfig(epochs=choice.epochs, learning_rate=3e-3, measure_prompts=0, compute_dtype="float32"),
        out=str(folder),
    )
    run = Run(recipe)
    run.run(STAGES)
    return run.outputs.speculator


def train_tiny_speculator(folder: Path, prompts: Sequence[str], max_tokens: int) -> Path:
    """An EAGLE-3 speculator of the lesson's verifier."""
    verifier, rows = make_lesson(folder, prompts, max_tokens)
    return learn(folder / "run", verifier, rows, Choice("eagle3", {"draft_vocab_size": 256}))
