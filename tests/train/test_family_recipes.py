"""A recipe of every family, from rows of tokens to a speculator: what its log reports, and that it is served."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.models import FAMILIES
from speculators.models.speculator import Speculator
from speculators.train.config import TrainConfig
from speculators.train.metrics import read_metrics
from speculators.train.recipe import DataConfig, EvaluateConfig, Recipe
from speculators.train.stages import Run
from tests.models.contract import contract_of
from tests.tiny_models import SENTENCES


def make_recipe(family: str, verifier: Path, folder: Path) -> Recipe:
    """Ten rows of random tokens, two of them held back; drafts as small as the contract test's."""
    rows, generator = folder / "rows.jsonl", torch.Generator().manual_seed(3)
    with rows.open("w", encoding="utf-8") as file:
        for length in (40, 22, 31, 18, 27, 36, 20, 29, 33, 24):
            ids = torch.randint(3, 380, (length,), generator=generator).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [int(t >= 6) for t in range(length)]}) + "\n")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": SENTENCES[0]}) + "\n", encoding="utf-8")
    options = {key: value for key, value in contract_of(family).variants["plain"].items() if key != "verifier"}
    if "draft_vocab_size" in FAMILIES[family].draft.model_fields and family != "dflash2":
        options["draft_vocab_size"] = 128
    return Recipe(
        name="tiny",
        verifier=str(verifier),
        family=family,
        draft=options,
        data=DataConfig(train=(str(rows),), validation_rows=2),
        train=TrainConfig(epochs=4, row_length=64, learning_rate=3e-3, measure_prompts=1, measure_tokens=4),
        evaluate=EvaluateConfig(data={"prompts": str(prompts)}, max_new_tokens=6, dtype="float32"),
        out=str(folder / "out"),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_reports_its_positions_and_serves(family: str, tiny_verifier: Path, tmp_path: Path) -> None:
    recipe = make_recipe(family, tiny_verifier, tmp_path)
    run = Run(recipe, progress=False)
    run.run(("prepare-data", "extract", "train", "evaluate", "card"))
    lines = list(read_metrics(Path(recipe.out) / "metrics.jsonl"))
    objective: Any = recipe.objective
    config = run.speculator_config
    trained = {"eagle": "num_passes", "eagle3": "ttt_steps", "mtp": "num_steps", "peagle": "num_depths"}.get(family)
    depth = config.max_speculative_tokens if trained is None else getattr(objective, trained)
    for line in lines:
        shares = [position["sum"] / position["count"] if position["count"] else 0 for position in line["per_position"]]
        counts = [position["count"] for position in line["per_position"]]
        assert len(shares) == depth
        assert counts[0] > 0
        assert sorted(counts, reverse=True) == counts
        assert line["expected_acceptance_length"] == pytest.approx(1 + sum(shares))
        assert line["tokens"] > 0
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["validation_loss"] > 0
    assert 1 <= lines[-1]["validation_acceptance_length"] <= 1 + depth
    assert 1 <= lines[-1]["measured_acceptance_length"] <= 1 + config.num_speculative_tokens
    evaluation = json.loads((Path(recipe.out) / "evaluation.json").read_text(encoding="utf-8"))
    assert evaluation["identity"]["identical"] is True
    assert evaluation["num_speculative_tokens"] == config.num_speculative_tokens
    saved = Speculator.from_pretrained(run.outputs.speculator)
    assert saved.config.speculators_model_type == family
    assert f"Family `{family}`" in (run.outputs.speculator / "README.md").read_text(encoding="utf-8")
