"""Files of every family: what is always written, what other writers add, shards, half precision, narrow maps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators.formats.checkpoint import read_config
from speculators.models import FAMILIES
from speculators.models.speculator import Speculator
from tests.formats.eagle3_directory import GOLDEN
from tests.formats.families import config_json, speculator_of, write_family
from tests.models.drafts import verifier_weights

GOLDEN_FAMILIES = ("eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp")
# Keys of which readers take different values where they are absent, and those without which nothing can be computed.
_BLOCK_KEYS = {"aux_hidden_state_layer_ids", "mask_token_id", "block_size", "sample_from_anchor"}
ALWAYS: dict[str, set[str]] = {
    "eagle3": {"eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"},
    "peagle": {"eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "mask_token_id"},
    "dflash": _BLOCK_KEYS | {"sliding_window_non_causal"},
    "dflash2": _BLOCK_KEYS
    | {"sliding_window_non_causal", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"},
    "dspark": _BLOCK_KEYS
    | {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
    | {"sliding_window_non_causal"},
    "mtp": {"num_nextn_predict_layers"},
}
LAYER_KEYS = {
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "vocab_size", "rms_norm_eps", "hidden_act", "max_position_embeddings", "attention_bias"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_on_whose_defaults_readers_disagree_are_always_written(family: str) -> None:
    """Pitfall 10: an absent key means one thing to its writer and another to a server."""
    written = config_json(family)
    flags = {name for name, field in FAMILIES[family].config.model_fields.items() if field.annotation is bool}
    assert written.keys() >= ALWAYS.get(family, set()) | flags
    assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
    assert written["speculators_model_type"] == family
    assert not {"model_type", "auto_map", "transformers_version"} & written.keys()
    layer = written.get("transformer_layer_config")
    if layer is not None:
        assert layer.keys() >= LAYER_KEYS
        assert layer["rope_parameters"].keys() >= {"rope_type", "rope_theta"}


NOISE: dict[str, Any] = {
    "auto_map": {"": "config.SomeSpeculatorConfig"},
    "transformers_version": "5.19.0",
    "torch_dtype": "bfloat16",
    "model_type": "speculators",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_of_other_writers_is_read_and_not_written(family: str) -> None:
    config = FAMILIES[family].config
    written = config_json(family)
    assert config.from_json(written | NOISE).to_json() == written


@pytest.mark.parametrize("family", GOLDEN_FAMILIES)
def test_golden_configurations_are_read_and_written_but_for_their_noise(family: str) -> None:
    """Every key that is kept has the value that its writer gave it."""
    raw = json.loads((GOLDEN / family / "config.json").read_text(encoding="utf-8"))
    written = FAMILIES[family].config.from_json(raw).to_json()
    kept = {key: value for key, value in raw.items() if key in written and key != "transformer_layer_config"}
    assert raw.keys() - kept.keys() == {"auto_map", "transformers_version", "transformer_layer_config"}
    assert {key: written[key] for key in kept} == kept
    layer, theirs = written["transformer_layer_config"], raw["transformer_layer_config"]
    assert {key: layer[key] for key in theirs.keys() & layer.keys()} == {
        key: theirs[key] for key in theirs.keys() & layer.keys()
    }
    assert theirs.keys() - layer.keys() <= {"architectures", "dtype", "transformers_version"}


@pytest.mark.parametrize("family", GOLDEN_FAMILIES)
def test_golden_directories_are_loaded_whole(family: str) -> None:
    stored = load_file(GOLDEN / family / "model.safetensors")
    loaded = Speculator.from_pretrained(GOLDEN / family).draft.state_dict()
    assert stored.keys() - {"t2d"} <= loaded.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items() if name in loaded)


def shard(directory: Path) -> None:
    """Cut the weights of a directory into three files and an index, as transformers does."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    weight_map: dict[str, str] = {}
    for number, start in enumerate(range(3), start=1):
        name = f"model-{number:05}-of-00003.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[start::3]}
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_directory_is_the_same_speculator(family: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path / "draft", family)
    whole = Speculator.from_pretrained(directory).attach_verifier(verifier_weights()).draft.state_dict()
    shard(directory)
    parts = Speculator.from_pretrained(directory).attach_verifier(verifier_weights()).draft.state_dict()
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_written_from_full_precision(family: str, tmp_path: Path) -> None:
    """Training keeps float32; only the export is rounded, each number once, and what must stay exact stays so."""
    speculator = speculator_of(family)
    masters = {name: tensor.clone() for name, tensor in speculator.draft.state_dict().items()}
    assert {tensor.dtype for tensor in masters.values() if tensor.is_floating_point()} == {torch.float32}
    speculator.save_pretrained(tmp_path / "draft")
    assert read_config(tmp_path / "draft")["dtype"] == "bfloat16"
    specs = speculator.config.expected_tensors()
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert stored
    for name, tensor in stored.items():
        rounded = tensor.is_floating_point() and specs[name].kind != "float32"
        assert torch.equal(tensor, masters[name].bfloat16() if rounded else masters[name]), name
    assert all(torch.equal(tensor, masters[name]) for name, tensor in speculator.draft.state_dict().items())


@pytest.mark.parametrize("family", ["eagle3", "peagle", "dflash", "dspark"])
def test_a_map_of_narrow_integers_is_widened(family: str, tmp_path: Path) -> None:
    """Some published drafts store d2t as int32."""
    directory = write_family(tmp_path / "draft", family)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"d2t": tensors["d2t"].int()}, file)
    vocab = Speculator.from_pretrained(directory).vocab
    assert vocab.d2t.dtype == torch.int64
    assert torch.equal(vocab.d2t, tensors["d2t"])
