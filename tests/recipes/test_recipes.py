"""The published recipes: each is complete, fits its verifier, and accelerate knows the configurations beside them."""

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from speculators.models.family import VerifierShape
from speculators.train.__main__ import load_recipe
from speculators.train.launching import launched_strategy
from speculators.train.recipe import run
from tests.recipes.verifier_shapes import SHAPES

FOLDER = Path(__file__).parents[2] / "recipes"
# What SmolLM2-135M-Instruct's config.json says.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*_smollm2_cpu.py")), ids=lambda path: path.stem)
def test_a_recipe_fits_its_verifier_and_drafts_three_tokens(path: Path) -> None:
    recipe = load_recipe([str(path)])
    assert recipe.name == path.stem == f"{recipe.family}_smollm2_cpu"
    config = recipe.draft.resolve(VerifierShape.from_config_dict(SMOLLM2, "smollm2"))
    assert config.max_speculative_tokens in (None, 3)
    assert config.num_speculative_tokens == 3
    for file in (*recipe.data.train, *recipe.evaluate.data.values()):
        assert Path(file).is_file()


ON_GPUS = sorted(set(FOLDER.glob("*.py")) - set(FOLDER.glob("*_cpu.py")))


def plan_of(path: Path, folder: Path, capsys: Any, *overrides: str) -> dict[str, Any]:
    """What `--plan` prints where nothing of the verifier is here but its config.json."""
    recipe = load_recipe([str(path)])
    (folder / "config.json").write_text(json.dumps(SHAPES[recipe.verifier]), encoding="utf-8")
    run(recipe, ["--plan", f"verifier={folder}", *overrides])
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_a_recipe_for_gpus_resolves_from_a_configuration_alone(path: Path, tmp_path: Path, capsys: Any) -> None:
    """Its values hold for its verifier: layers that are there, a mask that no text has, tokens that it trains."""
    plan = plan_of(path, tmp_path, capsys)
    recipe, speculator = plan["recipe"], plan["speculator"]
    verifier = SHAPES[load_recipe([str(path)]).verifier]
    assert recipe["name"] == path.stem
    assert path.stem.startswith(f"{recipe['family']}_")
    assert speculator["speculators_model_type"] == recipe["family"]
    layers = verifier["num_hidden_layers"]
    ids = speculator.get("eagle_aux_hidden_state_layer_ids") or speculator.get("aux_hidden_state_layer_ids") or []
    assert (ids == []) is (recipe["family"] == "mtp")
    assert all(0 < layer < layers for layer in ids)
    layer = speculator["transformer_layer_config"]
    assert (layer["hidden_size"], layer["vocab_size"]) == (verifier["hidden_size"], verifier["vocab_size"])
    assert layer["rope_parameters"]["rope_theta"] == verifier["rope_theta"]
    if "mask_token_id" in speculator:
        # Behind the last token of Qwen3's tokenizer, whose 151,669 are fewer than the rows of the embeddings.
        assert 151_669 <= speculator["mask_token_id"] < verifier["vocab_size"]
    drafted = speculator["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    objective = recipe["objective"]
    trained = [objective[key] for key in ("ttt_steps", "num_depths", "num_steps") if key in objective]
    slots = [speculator["block_size"] - (not speculator["sample_from_anchor"])] if "block_size" in speculator else []
    assert 1 < drafted <= min(trained + slots)
    assert recipe["data"]["max_length"] <= recipe["train"]["row_length"] <= layer["max_position_embeddings"]


def test_experts_and_recurrent_layers_leave_a_dense_draft_or_the_verifiers_block(tmp_path: Path, capsys: Any) -> None:
    by_name = {path.stem: path for path in ON_GPUS}
    layer = plan_of(by_name["eagle3_gpt_oss_20b"], tmp_path, capsys)["speculator"]["transformer_layer_config"]
    assert (layer["intermediate_size"], layer["num_attention_heads"], layer["head_dim"]) == (3 * 2880, 64, 64)
    layer = plan_of(by_name["eagle3_qwen3_30b_a3b"], tmp_path, capsys)["speculator"]["transformer_layer_config"]
    assert (layer["intermediate_size"], layer["num_key_value_heads"]) == (6144, 4)
    plan = plan_of(by_name["mtp_qwen3_next"], tmp_path, capsys)
    assert plan["recipe"]["warm_start"] == "verifier"
    assert plan["speculator"]["transformer_layer_config"]["num_experts"] == 512


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_a_plan_without_the_verifiers_configuration_says_what_is_missing(path: Path, capsys: Any) -> None:
    """No hub is asked (the tests are offline, and nothing of these is in a cache)."""
    recipe = load_recipe([str(path)])
    run(recipe, ["--plan"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["speculator"] is None
    assert f"config.json of {recipe.verifier} is not on this machine; give verifier=FOLDER" in plan["unresolved"]


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("dflash_qwen3_8b", "draft.block_size=1", "draft.block_size=1: Input should be greater than or equal to 2"),
        ("dflash_qwen3_8b", "draft.aux_layer_ids=[2, 37]", "aux_layer_ids is [2, 37]; expected ascending ids"),
        ("eagle3_qwen3_8b", "draft.aux_layer_ids=[2, 18, 99]", "from 0 (embeddings) to 36"),
        ("dspark_qwen3_8b", "draft.mask_token_id=151645", "in use as the verifier's eos_token_id"),
        ("peagle_qwen3_8b", "draft.mask_token_id=151936", "expected a token of the verifier, 0 to 151935"),
        ("dflash2_qwen3_8b", "draft.draft_vocab_size=32000", "a dflash2 draft proposes all 151936 tokens"),
        ("peagle_qwen3_8b", "draft.num_layer=2", "did you mean draft.num_layers?"),
        ("mtp_qwen3_next", "warm_strat=verifier", "did you mean warm_start?"),
    ],
)
def test_what_cannot_be_is_refused_by_the_plan(
    name: str, override: str, message: str, tmp_path: Path, capsys: Any
) -> None:
    """Named, with no weights anywhere."""
    with pytest.raises(SystemExit) as ended:
        plan_of(FOLDER / f"{name}.py", tmp_path, capsys, override)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_table_has_every_recipe() -> None:
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path in FOLDER.glob("*.py"):
        assert table.count(f"| `{path.name}` |") == 1, path.name


@pytest.mark.parametrize("path", sorted((FOLDER / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configurations(path: Path) -> None:
    """A key that it does not know is an error of its own."""
    found = load_config_from_file(str(path))
    processes = {"cpu": 1, "gpu1": 1, "gpu8_ddp": 8, "gpu8_fsdp2": 8, "two_nodes_ddp": 16}[path.stem]
    assert (found.num_processes, found.mixed_precision) == (processes, "no")
    sharded = str(found.distributed_type).endswith("FSDP")
    assert sharded is ("fsdp" in path.stem)
    if sharded:
        version = str(found.fsdp_config["fsdp_version"])
        assert launched_strategy("auto", {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": version}) == "fsdp2"
