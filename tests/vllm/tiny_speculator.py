"""A speculator in a minute: a tiny random verifier answers the prompts, and a draft learns those answers by heart."""

import json
from collections.abc import Sequence
from pathlib import Path

from speculators.models.eagle3.draft import Eagle3Draft
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.train.config import TrainConfig
from speculators.train.recipe import DataConfig, Recipe
from speculators.train.stages import Run
from tests.tiny_models import make_verifier

STAGES = ("prepare-data", "extract", "train")


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


def train_tiny_speculator(folder: Path, prompts: Sequence[str], max_tokens: int) -> Path:
    """Train below `folder` and return the speculator's directory; vLLM on a CPU needs heads of 32 and more."""
    verifier, rows = folder / "verifier", folder / "rows.jsonl"
    make_verifier(verifier, hidden_size=128, num_heads=2, num_kv_heads=1)
    write_answers(verifier, prompts, max_tokens, rows)
    recipe = Recipe(
        name="vllm_check",
        verifier=str(verifier),
        family="eagle3",
        draft=Eagle3Draft(draft_vocab_size=256),
        objective={},
        data=DataConfig(train=(str(rows),), validation_rows=0),
        train=TrainConfig(epochs=120, learning_rate=3e-3, measure_prompts=0, compute_dtype="float32"),
        out=str(folder / "run"),
    )
    run = Run(recipe)
    run.run(STAGES)
    return run.outputs.speculator
