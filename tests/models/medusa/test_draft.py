import pytest
from pydantic import ValidationError

from speculators.errors import FormatError, UsageError
from speculators.models.medusa.config import MedusaConfig
from speculators.models.medusa.draft import MedusaDraft
from tests.models.drafts import verifier_shape


def test_defaults_follow_the_verifier() -> None:
    config = MedusaDraft().resolve(verifier_shape())
    assert (config.medusa_num_heads, config.medusa_num_layers, config.medusa_fc_bias) == (5, 1, True)
    assert (config.hidden_size, config.vocab_size, config.truncated_vocab_size) == (32, 40, 40)
    assert (config.verifier_hidden_size, config.verifier_vocab_size, config.num_draft_ids) == (32, 40, 40)
    assert (config.num_speculative_tokens, config.max_speculative_tokens, config.aux_layer_ids) == (5, 5, [])
    assert not config.original_lm_head
    assert config.network() == "5 heads of 1 residual layer of width 32"


def test_choices_win() -> None:
    draft = MedusaDraft(num_heads=3, num_layers=2, bias=False, draft_vocab_size=16, num_speculative_tokens=2)
    config = draft.resolve(verifier_shape())
    assert (config.medusa_num_heads, config.num_speculative_tokens, config.truncated_vocab_size) == (3, 2, 16)
    assert set(config.expected_tensors()) == {
        *(f"blocks.{head}.layers.{layer}.weight" for head in range(3) for layer in range(2)),
        *(f"lm_heads.{head}.weight" for head in range(3)),
        "token_map",
    }
    assert config.network() == "3 heads of 2 residual layers of width 32"
    assert MedusaDraft(draft_vocab_size=1000).resolve(verifier_shape()).truncated_vocab_size == 40


def test_more_tokens_than_heads_are_refused() -> None:
    with pytest.raises(UsageError, match="num_speculative_tokens is 6 with num_heads 5"):
        MedusaDraft(num_speculative_tokens=6).resolve(verifier_shape())
    with pytest.raises(ValidationError, match="head\n"):
        MedusaDraft(head=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"medusa_num_heads": 4}, "speculative_tokens is 5 but medusa_num_heads is 4"),
        ({"truncated_vocab_size": 41}, "truncated_vocab_size 41 exceeds vocab_size 40"),
        ({"base_model_name_or_path": "org/other"}, "base_model_name_or_path is 'org/other' but verifier.name_or_path"),
        ({"medusa_fc_bias": 1}, "medusa_fc_bias is 1"),
        ({"num_heads": 5}, "num_heads is not a known key"),
        ({"medusa_num_layers": 0}, "medusa_num_layers is 0"),
        ({"draft_vocab_size": 16}, "draft_vocab_size is not a known key"),
    ],
)
def test_wrong_keys_are_named(changes: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        MedusaConfig.from_json(MedusaDraft().resolve(verifier_shape()).to_json() | changes)


@pytest.mark.parametrize("key", ["medusa_fc_bias", "original_lm_head", "truncated_vocab_size", "medusa_num_layers"])
def test_what_readers_take_differently_must_be_written(key: str) -> None:
    config = MedusaDraft().resolve(verifier_shape()).to_json()
    del config[key]
    with pytest.raises(FormatError, match=f"{key} is missing"):
        MedusaConfig.from_json(config)


def test_the_verifier_is_named_as_in_medusas_own_files_too() -> None:
    config = MedusaDraft().resolve(verifier_shape()).to_json()
    assert config["base_model_name_or_path"] == "org/tiny"
    del config["base_model_name_or_path"]
    assert MedusaConfig.from_json(config).to_json()["base_model_name_or_path"] == "org/tiny"
