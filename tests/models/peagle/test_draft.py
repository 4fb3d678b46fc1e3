"""What a P-EAGLE draft is resolved to, and what its config.json may say."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from speculators.errors import FormatError, UsageError
from speculators.models.peagle.config import PEagleConfig
from speculators.models.peagle.draft import PEagleDraft
from speculators.models.speculator import Speculator
from tests.models.drafts import HIDDEN, VOCAB, random_speculator, verifier_shape, verifier_weights

GOLDEN = Path(__file__).parents[2] / "golden" / "peagle"


def written() -> dict:
    return random_speculator("peagle").config.to_json()


def test_defaults() -> None:
    config = PEagleDraft().resolve(verifier_shape(num_hidden_layers=30, vocab_size=50000))
    layer = config.transformer_layer_config
    assert (layer.num_hidden_layers, config.num_speculative_tokens, config.max_speculative_tokens) == (4, 8, None)
    assert config.aux_layer_ids == [2, 15, 27]
    assert (config.mask_token_id, config.draft_vocab_size) == (49999, 8192)
    assert config.embed_requires_grad
    assert (config.norm_before_residual, config.norm_before_fc, config.fc_norm, config.norm_output) == (
        True,
        True,
        False,
        False,
    )
    assert config.architectures == ["PEagleDraftModel"]


def test_choices_win_and_contradictions_are_refused() -> None:
    config = PEagleDraft(num_layers=2, mask_token_id=3, embed_requires_grad=False).resolve(verifier_shape())
    assert (config.mask_token_id, config.embed_requires_grad) == (3, False)
    with pytest.raises(UsageError, match="mask_token_id is 40; expected a token of the verifier, 0 to 39"):
        PEagleDraft(mask_token_id=40).resolve(verifier_shape())
    with pytest.raises(UsageError, match="sliding_window needs layer_type 'qwen3'"):
        PEagleDraft(sliding_window=8).resolve(verifier_shape())
    with pytest.raises(UsageError, match="do not fit hidden_size 16"):
        PEagleDraft(hidden_size=16, embed_requires_grad=False).resolve(verifier_shape())
    for absent in ("fc_norm", "norm_output"):
        with pytest.raises(ValidationError, match=absent):
            PEagleDraft(**{absent: True})


def test_tensors_beside_those_of_eagle3() -> None:
    expected = PEagleDraft(num_layers=2).resolve(verifier_shape()).expected_tensors()
    assert expected["mask_hidden"].shape == (1, 1, 3 * HIDDEN)
    assert expected["mask_hidden"].required
    assert expected["embed_tokens.weight"].required
    assert expected["layers.0.self_attn.q_proj.weight"].shape == (32, 2 * HIDDEN)
    assert expected["layers.1.self_attn.q_proj.weight"].shape == (32, HIDDEN)
    frozen = PEagleDraft(embed_requires_grad=False).resolve(verifier_shape()).expected_tensors()
    assert not frozen["embed_tokens.weight"].required


def test_fc_norm_is_refused_since_engines_do_not_pass_it_on() -> None:
    with pytest.raises(FormatError, match=r"fc-norm-not-read: fc_norm is true.*norm_before_fc"):
        PEagleConfig.from_json(written() | {"fc_norm": True, "norm_before_fc": False})
    with pytest.raises(FormatError, match="fc_norm"):
        PEagleConfig.from_json(written() | {"fc_norm": 1})


def test_norm_output_is_read_whatever_it_says_and_written_as_false() -> None:
    for value in (True, False):
        assert PEagleConfig.from_json(written() | {"norm_output": value}).to_json()["norm_output"] is False
    with pytest.raises(FormatError, match="norm_output"):
        PEagleConfig.from_json(written() | {"norm_output": "true"})


@pytest.mark.parametrize("value", [None, -1, "5", 1.0, True, VOCAB])
def test_the_mask_token_must_be_a_row_of_the_embeddings(value: object) -> None:
    with pytest.raises(FormatError, match="mask_token_id"):
        PEagleConfig.from_json(written() | {"mask_token_id": value})


@pytest.mark.parametrize("key", ["mask_token_id", "norm_before_residual"])
def test_keys_without_a_default_must_be_there(key: str) -> None:
    config = written()
    del config[key]
    with pytest.raises(FormatError, match=f"{key} is missing"):
        PEagleConfig.from_json(config)


def test_llama_layers_say_how_many_features_they_read() -> None:
    config = PEagleDraft(aux_layer_ids=[1, 3, 5, 7]).resolve(verifier_shape())
    assert config.to_json()["transformer_layer_config"]["num_aux_hidden_states"] == 4


def test_a_directory_of_independent_software_goes_in_and_out_unchanged(tmp_path: Path) -> None:
    """The tensors bit by bit; of the config every key but what its writer adds for itself."""
    speculator = Speculator.from_pretrained(GOLDEN)
    speculator.save_pretrained(tmp_path, torch.bfloat16)
    theirs, ours = load_file(GOLDEN / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    read = json.loads((GOLDEN / "config.json").read_text(encoding="utf-8"))
    found = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    for noise in ("auto_map", "transformers_version"):
        del read[noise]
    layers = found.pop("transformer_layer_config")
    assert layers | read.pop("transformer_layer_config") == layers
    # Their file says float32 of tensors that are stored in bfloat16.
    assert found == read | {"dtype": "bfloat16"}


def test_fresh_parameters_follow_the_seed_and_the_verifier() -> None:
    config = PEagleDraft(num_layers=1, draft_vocab_size=None).resolve(verifier_shape())
    drafts = [Speculator.create(config, verifier_weights(), seed=seed).draft for seed in (1, 1, 2)]
    masks = [draft.get_parameter("mask_hidden").detach() for draft in drafts]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert masks[0].abs().min() > 0
    table, head = (drafts[0].get_parameter(name) for name in ("embed_tokens.weight", "lm_head.weight"))
    assert torch.equal(table, verifier_weights().embed_tokens)
    assert torch.equal(head, verifier_weights().lm_head)
    assert (table.requires_grad, head.requires_grad) == (True, False)
