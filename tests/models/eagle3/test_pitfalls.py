"""Faults that other tools had with EAGLE-3 drafts, row by row, where no other test in this folder names the row."""

from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speculators.errors import FormatError, VerifierError
from speculators.formats.checkpoint import read_config
from speculators.models.eagle3.config import Eagle3Config
from speculators.models.eagle3.draft import Eagle3Draft
from speculators.models.eagle3.model import Eagle3Model
from speculators.models.family import VerifierShape
from speculators.models.speculator import Speculator
from tests.models.drafts import HIDDEN, random_speculator, verifier_weights

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}


def saved_layers(verifier: dict, folder: Path) -> dict:
    """The layer block of an EAGLE-3 draft for a verifier's config, as it is read back from its directory."""
    config = Eagle3Draft().resolve(VerifierShape.from_config_dict(LLAMA | verifier, "org/tiny"))
    Speculator.create(config, verifier_weights()).save_pretrained(folder)
    layers: dict = read_config(folder)["transformer_layer_config"]
    return layers


def rotated_by_training(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, rotated] of the first positions, sign left out, as the draft in a directory uses them."""
    draft = Speculator.from_pretrained(folder).draft
    assert isinstance(draft, Eagle3Model)
    cos, sin = draft.rotary.at(torch.arange(6), 6, torch.float32)
    return cos, sin.abs()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    ],
    ids=["partial", "partial_flat", "mrope", "mrope_flat"],
)
def test_row_4_what_is_rotated_in_training_is_what_the_saved_config_says(rope: dict, tmp_path: Path) -> None:
    layers = saved_layers(rope, tmp_path)
    assert layers["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
    assert "partial_rotary_factor" not in layers
    # A server that reads this config turns whole heads, by these angles.
    server = LlamaRotaryEmbedding(LlamaConfig(**layers))
    cos, sin = server(torch.zeros(1), torch.arange(6)[None])
    ours = rotated_by_training(tmp_path)
    assert ours[0].shape == (6, layers["head_dim"])
    torch.testing.assert_close(ours[0], cos[0])
    torch.testing.assert_close(ours[1], sin[0].abs())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e4},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
    ],
    ids=["nested_first", "by_layer_type", "flat", "flat_null"],
)
def test_row_5_the_base_is_the_verifiers(rope: dict, tmp_path: Path) -> None:
    assert saved_layers(rope, tmp_path)["rope_parameters"]["rope_theta"] == 1e6
    angle = 5 * 1e6 ** (-2 * torch.arange(4) / 8)
    torch.testing.assert_close(rotated_by_training(tmp_path)[0][5, :4], angle.cos())


def test_row_5_no_base_is_guessed() -> None:
    with pytest.raises(VerifierError, match="names no rope_theta"):
        VerifierShape.from_config_dict(LLAMA, "org/tiny")


@pytest.mark.parametrize("layout", ["rope_parameters", "rope_scaling"])
def test_row_5_yarn_is_scaled_and_never_falls_back(layout: str, tmp_path: Path) -> None:
    assert saved_layers({layout: YARN}, tmp_path)["rope_parameters"] == YARN
    config = LlamaConfig(**{**LLAMA, "rope_parameters": dict(YARN)})
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    cos, _ = rotated_by_training(tmp_path)
    torch.testing.assert_close(cos[5, :4], (5 * frequencies).cos() * factor)
    assert factor > 1.1


def test_row_5_an_unknown_rotation_is_refused() -> None:
    shape = VerifierShape.from_config_dict(LLAMA | {"rope_parameters": {**YARN, "rope_type": "longrope"}}, "org/tiny")
    with pytest.raises(FormatError, match=r"rope_type.*longrope"):
        Eagle3Draft().resolve(shape)


NORMS = [{"norm_before_fc": False}, {"norm_before_fc": True}, {"norm_before_fc": False, "fc_norm": True}]
IDS = [[3], [2, 4, 5], [0, 2, 5, 8]]


@pytest.mark.parametrize("ids", IDS, ids=len)
@pytest.mark.parametrize("hidden_size", [None, 16])
def test_row_9_every_combination_of_flags_survives_its_directory(
    ids: list[int], hidden_size: int | None, tmp_path: Path
) -> None:
    for number, (norms, residual, output, layer_type) in enumerate(
        product(NORMS, (False, True), (False, True), ("llama", "qwen3"))
    ):
        flags = {**norms, "norm_before_residual": residual, "norm_output": output}
        speculator = random_speculator(aux_layer_ids=ids, hidden_size=hidden_size, layer_type=layer_type, **flags)
        folder = tmp_path / str(number)
        speculator.save_pretrained(folder, torch.float32)
        loaded = Speculator.from_pretrained(folder).attach_verifier(verifier_weights())
        assert {key: getattr(loaded.config, key) for key in flags} == flags
        assert loaded.config.aux_layer_ids == ids
        assert loaded.draft.get_parameter("fc.weight").shape == (hidden_size or HIDDEN, len(ids) * HIDDEN)
        tensors = speculator.draft.state_dict()
        assert loaded.draft.state_dict().keys() == tensors.keys()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in loaded.draft.state_dict().items())


def test_row_10_what_an_older_config_leaves_out_is_pinned() -> None:
    """That each flag changes the logits is in the family contract; an unknown key is refused there too."""
    written = random_speculator().config.to_json()
    flags = ("norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
    old = Eagle3Config.from_json({key: value for key, value in written.items() if key not in flags})
    assert [getattr(old, key) for key in flags] == [False] * 4
    with pytest.raises(FormatError, match="norm_before_residual is missing"):
        Eagle3Config.from_json({key: value for key, value in written.items() if key != "norm_before_residual"})
