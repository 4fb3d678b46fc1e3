"""The published recipes: each is complete, fits its verifier, and accelerate knows the configurations beside them."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from speculators.models.family import VerifierShape
from speculators.train.__main__ import load_recipe
from speculators.train.launching import launched_strategy

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
