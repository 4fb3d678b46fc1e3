"""What cannot be trained on is refused by name before the verifier or a draft is loaded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from speculators.errors import StoreError, UsageError
from speculators.train.stages import Run
from tests.recipes.verifier_shapes import SHAPES
from tests.tiny_models import make_verifier
from tests.train.test_family_recipes import make_recipe

ROOT = Path(__file__).parents[2]


def test_a_store_of_other_weights_is_refused(tiny_verifier: Path, tmp_path: Path) -> None:
    """The verifier's folder has the same name and shape, and other weights than when its states were stored."""
    here = tmp_path / "verifier"
    shutil.copytree(tiny_verifier, here)
    run = Run(make_recipe("eagle3", here, tmp_path), progress=False)
    run.run(["prepare-data", "extract"])
    make_verifier(here, seed=5)
    message = r"states was made for verifier fingerprint \w{12}\.\.\. \(made with .*\), now \w{12}\.\.\. is asked for"
    with pytest.raises(StoreError, match=message):
        run.run(["train"])
    assert not (run.outputs.out / "checkpoints").exists()


@pytest.mark.parametrize("family", ["peagle", "dflash", "dspark"])
def test_a_mask_token_that_the_verifier_writes_is_refused(family: str, tiny_verifier: Path, tmp_path: Path) -> None:
    recipe = make_recipe(family, tiny_verifier, tmp_path)
    with Path(recipe.data.train[0]).open("a", encoding="utf-8") as rows:
        # In a prompt it is not learnt, nor is a draft asked to go on from it.
        rows.write(json.dumps({"input_ids": [383, 5, 6, 383, 8, 383], "loss_mask": [0, 1, 1, 1, 1, 1]}) + "\n")
    run = Run(recipe, progress=False)
    with pytest.raises(UsageError, match="mask token 383 is in use: the data's answers have it 2 times; set draft"):
        run.run(["prepare-data", "extract"])
    assert not run.outputs.states.exists()


def test_a_plan_reads_the_hubs_cache_and_asks_no_hub(tmp_path: Path) -> None:
    """A repository's config.json in the cache is enough, and keeps the verifier's name."""
    repo = tmp_path / "hub" / "models--Qwen--Qwen3-8B"
    (repo / "snapshots" / "abc").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc", encoding="utf-8")
    (repo / "snapshots" / "abc" / "config.json").write_text(json.dumps(SHAPES["Qwen/Qwen3-8B"]), encoding="utf-8")
    nowhere = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_CACHE"} | nowhere
    command = [sys.executable, str(ROOT / "recipes" / "eagle3_qwen3_8b.py"), "--plan"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    assert "unresolved" not in plan
    assert plan["speculator"]["speculators_config"]["verifier"]["name_or_path"] == "Qwen/Qwen3-8B"
    assert plan["speculator"]["eagle_aux_hidden_state_layer_ids"] == [2, 18, 33]
