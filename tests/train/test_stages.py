"""Whole recipes on a tiny random verifier: every stage is real, and so is every interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.errors import TrainingError, UsageError
from speculators.extract.prepared import PreparedData
from speculators.models.speculator import Speculator
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.train.config import TrainConfig
from speculators.train.recipe import DataConfig, EvaluateConfig, ExtractConfig, Recipe, RegenerateConfig
from speculators.train.stages import STAGES, Run
from tests.tiny_models import SENTENCES


def write_prompts(path: Path) -> str:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in SENTENCES), encoding="utf-8")
    return str(path)


def make_recipe(verifier: Path, folder: Path, **changes: Any) -> Recipe:
    prompts = write_prompts(folder / "prompts.jsonl")
    settings: dict[str, Any] = {
        "name": "tiny",
        "verifier": str(verifier),
        "family": "eagle3",
        "draft": {"draft_vocab_size": 128},
        "regenerate": RegenerateConfig(prompts=(prompts,), max_new_tokens=12, max_num_seqs=4),
        "data": DataConfig(max_length=128, validation_rows=2),
        "extract": ExtractConfig(store_dtype="float32"),
        "train": TrainConfig(
            epochs=2, row_length=128, learning_rate=1e-3, measure_prompts=2, measure_tokens=4, checkpoint_every=1
        ),
        "evaluate": EvaluateConfig(data={"heldout": prompts}, limit=2, max_new_tokens=6),
        "out": str(folder / "out"),
    }
    return Recipe(**{**settings, **changes})


@pytest.fixture(scope="module")
def finished(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    recipe = make_recipe(tiny_verifier, tmp_path_factory.mktemp("run"))
    Run(recipe, progress=False).run(list(STAGES))
    return recipe


def modified(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_recipe_leaves_a_speculator_and_its_numbers(finished: Recipe, tiny_verifier: Path) -> None:
    out = Path(finished.out)
    files = {path.name for path in out.iterdir()}
    assert files >= {"conversations.jsonl", "evaluation.json", "evaluation.png", "curves.png", "recipe.json"}
    report = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    assert report["identity"]["identical"] is True
    assert report["num_prompts"] == 2
    training = json.loads((out / "training.json").read_text(encoding="utf-8"))
    prepared = json.loads((out / "prepared" / "manifest.json").read_text(encoding="utf-8"))
    assert training["rows"] == prepared["rows"] - 2
    measured = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    best = max(line["measured_acceptance_length"] or 0.0 for line in measured)
    assert training["measured_acceptance_length"] == best >= 1
    card = (out / "speculator" / "README.md").read_text(encoding="utf-8")
    assert "acceptance length" in card
    timings = json.loads((out / "timings.json").read_text(encoding="utf-8"))
    assert list(timings) == list(STAGES)
    assert all(seconds > 0 for seconds in timings.values())
    config = json.loads((out / "speculator" / "config.json").read_text(encoding="utf-8"))
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tiny_verifier.resolve())


def test_the_saved_speculator_is_the_chosen_checkpoint(finished: Recipe, tiny_verifier: Path) -> None:
    from safetensors.torch import load_file

    best = load_file(Path(finished.out) / "checkpoints" / "best-acceptance" / "parameters.safetensors")
    saved = Speculator.from_pretrained(Path(finished.out) / "speculator").draft.state_dict()
    for name, tensor in best.items():
        assert torch.equal(saved[name], tensor.to(torch.bfloat16)), name


def test_the_speculator_serves(finished: Recipe) -> None:
    llm = LLM(Path(finished.out) / "speculator")
    output = llm.generate(SENTENCES[0], SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)
    assert len(output[0].outputs[0].token_ids) == 5


def test_complete_stages_are_skipped(finished: Recipe) -> None:
    out = Path(finished.out)
    before = modified(out)
    Run(finished, progress=False).run(list(STAGES))
    after = modified(out)
    assert {path for path in after if before.get(path) != after[path]} <= {str(out / "recipe.json")}


def test_a_changed_stage_and_what_depends_on_it_are_run_again(finished: Recipe) -> None:
    out = Path(finished.out)
    before = modified(out)
    measured = {"max_new_tokens": 5, "max_num_seqs": 2, "match": "3$"}
    changed = finished.model_copy(update={"evaluate": finished.evaluate.model_copy(update=measured)})
    Run(changed, progress=False).run(list(STAGES))
    after = modified(out)
    touched = {Path(path).relative_to(out).parts[0] for path in after if before.get(path) != after[path]}
    assert touched == {"recipe.json", "evaluation.json", "evaluation.png", "speculator", "stages", "timings.json"}
    report = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    assert (report["max_new_tokens"], report["max_num_seqs"], report["num_prompts"]) == (5, 2, 1)


def test_other_training_settings_are_refused_in_the_same_folder(finished: Recipe) -> None:
    changed = finished.model_copy(update={"train": finished.train.model_copy(update={"learning_rate": 5e-3})})
    with pytest.raises(TrainingError, match="made with other settings: train was"):
        Run(changed, progress=False).run(["train"])


def test_a_card_needs_measurements(tiny_verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run the stage evaluate before"):
        Run(make_recipe(tiny_verifier, tmp_path), progress=False).run(["card"])


def test_a_missing_file_is_named(tiny_verifier: Path, tmp_path: Path) -> None:
    recipe = make_recipe(
        tiny_verifier, tmp_path, regenerate=RegenerateConfig(), data=DataConfig(train=("nowhere.jsonl",))
    )
    with pytest.raises(UsageError, match=r"nowhere\.jsonl cannot be read"):
        Run(recipe, progress=False).run(["prepare-data"])


def test_a_killed_script_goes_on_where_it_was(tiny_verifier: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tiny_verifier, tmp_path, train=TrainConfig(epochs=500, row_length=64, measure_prompts=0))
    Run(recipe, progress=False).run(["regenerate", "prepare-data", "extract"])
    script = tmp_path / "recipe.py"
    script.write_text(
        f"from speculators.train.recipe import Recipe, run\nrun(Recipe(**{recipe.model_dump()!r}))\n", encoding="utf-8"
    )
    log = Path(recipe.out) / "metrics.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), "train"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (log.exists() and log.read_text(encoding="utf-8").count("\n") > 2):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, errors
    newest = max((Path(recipe.out) / "checkpoints").glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    lines = log.read_text(encoding="utf-8").splitlines()
    assert state["run"]["step"] == len(lines)
    assert json.loads((Path(recipe.out) / "stages" / "train.json").read_text(encoding="utf-8"))["complete"] is False


def test_rows_come_from_folders_and_in_shares(tiny_verifier: Path, tmp_path: Path) -> None:
    talks = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Nobody knows."}]
    for name, count in (("folder/deep/a.jsonl", 6), ("b.jsonl", 8)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        rows = [json.dumps({"messages": talks, "id": f"{name}-{i}"}) + "\n" for i in range(count)]
        (tmp_path / name).write_text("".join(rows), encoding="utf-8")
    sources = (str(tmp_path / "folder"), f"{tmp_path / 'b.jsonl'}@0.5")
    recipe = make_recipe(tiny_verifier, tmp_path, regenerate=RegenerateConfig(), data=DataConfig(train=sources))
    run = Run(recipe, progress=False)
    run.run(["prepare-data"])
    assert len(PreparedData(run.outputs.prepared)) == 10
    marker = Path(recipe.out) / "stages" / "prepare-data.json"
    before = marker.read_text(encoding="utf-8")
    run.run(["prepare-data"])
    assert marker.read_text(encoding="utf-8") == before
    (tmp_path / "folder" / "c.jsonl").write_text(json.dumps({"messages": talks}) + "\n", encoding="utf-8")
    run.run(["prepare-data"])
    assert len(PreparedData(run.outputs.prepared)) == 11
