import pytest
from pydantic import ValidationError

from speculators.errors import FormatError, UsageError
from speculators.models.eagle3.draft import Eagle3Draft
from tests.models.drafts import verifier_shape


def test_defaults_follow_the_verifier() -> None:
    config = Eagle3Draft().resolve(verifier_shape(num_hidden_layers=30, vocab_size=50000))
    layer = config.transformer_layer_config
    assert config.aux_layer_ids == [2, 15, 27]
    assert config.draft_vocab_size == 8192
    assert (config.norm_before_residual, config.norm_before_fc, config.fc_norm, config.norm_output) == (
        True,
        True,
        False,
        True,
    )
    assert (layer.model_type, layer.num_hidden_layers, layer.hidden_size, layer.vocab_size) == ("llama", 1, 32, 50000)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 2, 8)
    assert layer.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.verifier.name_or_path == "org/tiny"
    assert config.num_speculative_tokens == 3


def test_choices_win_over_the_verifier() -> None:
    draft = Eagle3Draft(
        num_layers=2, layer_type="qwen3", intermediate_size=64, head_dim=16, sliding_window=7, num_speculative_tokens=5
    )
    config = draft.resolve(verifier_shape())
    layer = config.transformer_layer_config
    assert (layer.intermediate_size, layer.head_dim, layer.sliding_window) == (64, 16, 7)
    assert layer.layer_types == ["sliding_attention", "sliding_attention"]
    assert config.num_speculative_tokens == 5


@pytest.mark.parametrize("size", [None, 40, 1000])
def test_a_draft_vocabulary_is_at_most_the_verifiers(size: int | None) -> None:
    assert Eagle3Draft(draft_vocab_size=size).resolve(verifier_shape()).draft_vocab_size == 40


def test_default_layers_of_a_shallow_verifier_come_once_each() -> None:
    assert Eagle3Draft().resolve(verifier_shape(num_hidden_layers=4)).aux_layer_ids == [1, 2]


@pytest.mark.parametrize("ids", [[], [5, 2], [2, 2], [-1, 3], [2, 9]])
def test_wrong_layer_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(UsageError, match=r"aux_layer_ids is .* from 0 \(embeddings\) to 8"):
        Eagle3Draft(aux_layer_ids=ids).resolve(verifier_shape())


def test_default_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="defaults to"):
        Eagle3Draft().resolve(verifier_shape(num_hidden_layers=2))


def test_feature_count_is_written_where_vllm_needs_it() -> None:
    layer = Eagle3Draft(aux_layer_ids=[0, 1, 4, 8]).resolve(verifier_shape()).to_json()["transformer_layer_config"]
    assert layer["num_aux_hidden_states"] == 4


def test_contradictions_are_refused() -> None:
    with pytest.raises(UsageError, match="fc_norm and norm_before_fc"):
        Eagle3Draft(fc_norm=True).resolve(verifier_shape())
    with pytest.raises(UsageError, match="sliding_window needs layer_type 'qwen3'"):
        Eagle3Draft(sliding_window=8).resolve(verifier_shape())
    with pytest.raises(ValidationError, match="num_layer\n"):
        Eagle3Draft(num_layer=2)
    with pytest.raises(ValidationError, match="num_layers"):
        Eagle3Draft(num_layers="2")


def test_a_partly_rotated_verifier_gets_a_wholly_rotated_draft() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    layer = Eagle3Draft().resolve(verifier_shape(rope_parameters=rope)).transformer_layer_config
    assert layer.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_a_rotation_that_cannot_be_followed_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0}
    with pytest.raises(FormatError, match=r"rope_type.*dynamic"):
        Eagle3Draft().resolve(verifier_shape(rope_parameters=rope))
    with pytest.raises(FormatError, match="no multiple of num_key_value_heads"):
        Eagle3Draft(num_attention_heads=3).resolve(verifier_shape())
    own = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
    config = Eagle3Draft(rope_parameters=own).resolve(verifier_shape(rope_parameters=rope))
    assert config.transformer_layer_config.rope_parameters == own
