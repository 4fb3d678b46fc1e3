import json

import pytest
from pydantic import ValidationError

from speculators.errors import FormatError
from speculators.models.eagle.config import EagleConfig
from speculators.models.eagle.draft import EagleDraft
from tests.models.drafts import verifier_shape


def written(**changes: object) -> dict:
    return EagleDraft().resolve(verifier_shape()).to_json() | changes


def test_defaults_follow_the_verifier() -> None:
    config = EagleDraft().resolve(verifier_shape(vocab_size=50000, rms_norm_eps=1e-5))
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (32, 48, 1)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert (config.vocab_size, config.rms_norm_eps, config.max_position_embeddings) == (50000, 1e-5, 256)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (config.bias, config.qkv_bias, config.embed_layernorm, config.post_embedding_layernorm) == (False,) * 4
    assert (config.aux_layer_ids, config.max_speculative_tokens, config.num_speculative_tokens) == ([], None, 3)
    assert (config.verifier_hidden_size, config.verifier_vocab_size, config.num_draft_ids) == (32, 50000, 50000)
    assert config.verifier.name_or_path == "org/tiny"
    assert config.network() == "1 `llama` layer of width 32"


def test_choices_win_over_the_verifier() -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    choices = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
    draft = EagleDraft(num_layers=2, rope_parameters=rope, bias=True, num_speculative_tokens=7, **choices)
    config = draft.resolve(verifier_shape())
    assert {key: getattr(config, key) for key in choices} == choices
    assert (config.num_hidden_layers, config.rope_parameters, config.num_speculative_tokens) == (2, rope, 7)
    assert config.expected_tensors()["layers.1.self_attn.q_proj.weight"].shape == (12, 32)
    assert config.network() == "2 `llama` layers of width 32"


def test_a_partly_rotated_verifier_gets_a_wholly_rotated_draft() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    config = EagleDraft().resolve(verifier_shape(rope_parameters=rope))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_what_no_draft_can_follow_is_refused() -> None:
    with pytest.raises(FormatError, match=r"rope_type.*dynamic"):
        EagleDraft().resolve(verifier_shape(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0}))
    with pytest.raises(FormatError, match="org/tiny: F034 contradiction: num_attention_heads 3 is no multiple"):
        EagleDraft(num_attention_heads=3).resolve(verifier_shape())
    with pytest.raises(ValidationError, match="num_layer\n"):
        EagleDraft(num_layer=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": None}, "bias is null; expected a valid boolean"),
        ({"bias": "true"}, "bias is"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"rms_norm_eps": None}, "rms_norm_eps is null"),
        ({"transformer_layer_config": {}}, "transformer_layer_config is not a known key"),
        ({"model_type": "llama"}, "F002 model-type"),
        ({"draft_vocab_size": 16}, "draft_vocab_size is not a known key"),
    ],
)
def test_wrong_keys_are_named(changes: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        EagleConfig.from_json(written(**changes))


@pytest.mark.parametrize("key", ["bias", "hidden_size", "head_dim", "rope_parameters", "rms_norm_eps", "vocab_size"])
def test_what_changes_numbers_must_be_written(key: str) -> None:
    config = written()
    del config[key]
    with pytest.raises(FormatError, match=f"{key} is missing"):
        EagleConfig.from_json(config)


def test_the_file_says_everything_at_its_top_level() -> None:
    config = json.loads(json.dumps(written()))
    assert {
        "bias",
        "qkv_bias",
        "embed_layernorm",
        "post_embedding_layernorm",
        "head_dim",
        "rms_norm_eps",
    } <= config.keys()
    assert {"model_type", "transformer_layer_config"}.isdisjoint(config)
