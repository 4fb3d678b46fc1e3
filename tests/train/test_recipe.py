import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from speculators.errors import UsageError
from speculators.models import FAMILIES
from speculators.train.__main__ import load_recipe
from speculators.train.config import TrainConfig
from speculators.train.overrides import apply_overrides
from speculators.train.quickstart import quickstart_recipe
from speculators.train.recipe import DataConfig, Recipe, run

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe(**changes: Any) -> Recipe:
    settings = {"name": "tiny", "verifier": "none", "family": "eagle3", "data": DataConfig(train=("rows.jsonl",))}
    return Recipe(**{**settings, **changes})


def test_overrides_are_applied_in_order_and_leave_the_rest() -> None:
    before = recipe(train=TrainConfig(epochs=5))
    after = apply_overrides(
        before,
        [
            "train.learning_rate=1e-4",
            "train.learning_rate=3e-4",
            "train.betas=[0.8, 0.9]",
            "train.max_steps=7",
            "train.prefetch=false",
            "draft.draft_vocab_size=none",
            "objective.ttt_steps=5",
            "data.train=other.jsonl",
        ],
    )
    assert after.train == TrainConfig(epochs=5, learning_rate=3e-4, betas=(0.8, 0.9), max_steps=7, prefetch=False)
    assert after.draft.model_dump()["draft_vocab_size"] is None
    assert isinstance(after.draft, FAMILIES["eagle3"].draft)
    assert after.objective.model_dump()["ttt_steps"] == 5
    assert after.data.train == ("other.jsonl",)
    assert before.train.learning_rate == 1e-4
    assert apply_overrides(after, ["train.max_steps=null"]).train.max_steps is None


def test_a_map_takes_new_names() -> None:
    after = apply_overrides(recipe(), ["evaluate.data.mine=prompts.jsonl", "data.template_options.thinking=false"])
    assert after.evaluate.data == {"mine": "prompts.jsonl"}
    assert after.data.template_options == {"thinking": False}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rte=1", r"no setting train\.learning_rte; did you mean train\.learning_rate\?"),
        ("trian.epochs=1", r"no setting trian\.epochs; did you mean train\?"),
        ("draft.draft_vocab=9", r"no setting draft\.draft_vocab; did you mean draft\.draft_vocab_size\?"),
        ("objective.ttt_step=9", r"did you mean objective\.ttt_steps\?"),
        ("train=3", r"train is a section; set one of accumulation"),
        ("train.epochs.x=3", r"train\.epochs is a single value"),
        ("train.epochs", r"expected name=value"),
        ("=3", r"expected name=value"),
        ("train.epochs=many", r"train\.epochs=many: .*valid integer"),
        ("train.epochs=1.5", r"train\.epochs=1\.5: .*integer"),
        ("train.epochs=0", r"train\.epochs=0: .*greater than or equal to 1"),
        ("train.learning_rate=NaN", r"train\.learning_rate=NaN: "),
        ("train.learning_rate=Infinity", r"train\.learning_rate=Infinity: "),
        ("train.prefetch=1", r"train\.prefetch=1: .*valid boolean"),
        ("train.optimizer=sgd", r"train\.optimizer=sgd: .*'adamw' or 'muon'"),
        ("train.betas=[0.9]", r"train\.betas=\[0\.9\]: "),
        ("train.betas=[0.9, 1.0]", r"train: .*both must lie in \[0, 1\)"),
        ("draft.norm_output=maybe", r"draft\.norm_output=maybe: .*valid boolean"),
        ("data.match=(", r"data\.match=\(: .*no regular expression"),
        ("train.ns_steps=0", r"train\.ns_steps=0: .*greater than or equal to 1"),
        ("data.train=[1]", r"data\.train=\[1\]: .*valid string"),
        ("data.train=[]", r"neither data\.train nor regenerate\.prompts"),
        ("family=other", r"family is 'other'; expected one of"),
    ],
)
def test_a_wrong_override_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        apply_overrides(recipe(), [override])


def test_every_wrong_override_is_named_at_once() -> None:
    with pytest.raises(UsageError, match=r"draft\.num_layers=y: .*; train\.epochs=x: .*; out=\[3\]: ") as raised:
        apply_overrides(recipe(), ["train.epochs=x", "out=[3]", "draft.num_layers=y"])
    assert raised.value.exit_code == 2


def test_text_that_reads_as_a_number_stays_text_where_text_is_expected() -> None:
    after = apply_overrides(recipe(), ["out=2024", "name=7", "verifier=1e3", "data.train=12"])
    assert (after.out, after.name, after.verifier, after.data.train) == ("2024", "7", "1e3", ("12",))


def test_a_recipe_is_strict() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        recipe(learning_rate=1.0)
    with pytest.raises(ValidationError, match="valid integer"):
        TrainConfig.model_validate({"epochs": "3"})
    with pytest.raises(ValidationError, match="valid integer"):
        TrainConfig.model_validate({"epochs": True})
    with pytest.raises(ValidationError, match="takes Eagle3Draft"):
        recipe(draft=TrainConfig())
    with pytest.raises(ValidationError, match="frozen"):
        recipe().train.epochs = 3


def test_options_of_the_family_may_be_plain() -> None:
    draft = FAMILIES["eagle3"].draft(num_layers=2)
    assert recipe(draft={"num_layers": 2}) == recipe(draft=draft)
    assert recipe().out == "out/tiny"


def test_settings_survive_json() -> None:
    before = recipe(train=TrainConfig(betas=(0.1, 0.2)))
    assert apply_overrides(before, []) == before
    assert json.loads(before.model_dump_json())["draft"]["draft_vocab_size"] == 8192


def test_the_plan_reads_only_the_verifiers_config(tmp_path: Path, tiny_verifier: Path, capsys: Any) -> None:
    verifier = tmp_path / "verifier"
    verifier.mkdir()
    (verifier / "config.json").write_bytes((tiny_verifier / "config.json").read_bytes())
    out = tmp_path / "out"
    run(recipe(verifier=str(verifier), out=str(out)), ["train", "--plan", "train.epochs=9", "evaluate"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["stages"] == ["train", "evaluate"]
    assert plan["recipe"]["train"]["epochs"] == 9
    assert plan["speculator"]["transformer_layer_config"]["hidden_size"] == 64
    assert plan["speculator"]["speculators_config"]["verifier"]["name_or_path"] == str(verifier.resolve())
    assert not out.exists()


def test_the_plan_of_a_verifier_elsewhere_has_no_speculator(capsys: Any) -> None:
    run(recipe(verifier="owner/name"), ["--plan"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["speculator"] is None
    assert plan["stages"] == ["regenerate", "prepare-data", "extract", "train", "evaluate", "card"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "no stage 'trian'; did you mean train?"),
        (["train.epoch=1"], "did you mean train.epochs?"),
        (["extract"], "verifier './nowhere' is no folder"),
    ],
)
def test_a_wrong_command_line_ends_with_a_message(words: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        run(recipe(verifier="./nowhere", out=str(tmp_path / "out")), words)
    assert ended.value.code == (1 if words == ["extract"] else 2)
    assert message in capsys.readouterr().err


def test_the_quickstart_can_be_resolved() -> None:
    recipe = quickstart_recipe(bfloat16=True)
    assert recipe.out == "out/quickstart"
    assert apply_overrides(recipe, ["out=elsewhere"]).out == "elsewhere"


def test_the_quickstart_takes_fewer_rows_where_products_are_slow() -> None:
    fast, slow = quickstart_recipe(bfloat16=True), quickstart_recipe(bfloat16=False)
    assert (slow.data.limit or 0) < (fast.data.limit or 0)
    assert slow.model_copy(update={"data": fast.data}) == fast


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*_cpu.py")), ids=lambda path: path.stem)
def test_every_recipe_has_a_plan_as_script_and_as_module(path: Path, capsys: Any) -> None:
    command = [sys.executable, str(path), "--plan", "train.epochs=3"]
    done = subprocess.run(command, cwd=RECIPES.parent, capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    assert plan["recipe"]["name"] == path.stem
    assert plan["recipe"]["train"]["epochs"] == 3
    run(load_recipe([str(path)]), ["--plan", "train.epochs=3"])
    assert json.loads(capsys.readouterr().out) == plan


def test_a_file_without_a_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no file; give a recipe"):
        load_recipe([str(tmp_path / "none.py")])
    (tmp_path / "empty.py").write_text("RECIPE = 3\n", encoding="utf-8")
    with pytest.raises(UsageError, match="has no RECIPE of type Recipe"):
        load_recipe([str(tmp_path / "empty.py")])
