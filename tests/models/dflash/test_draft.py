"""What a block drafter's options become, and which configurations are refused."""

import pytest

from speculators.errors import FormatError, UsageError
from speculators.models.dflash.config import DFlashConfig
from speculators.models.dflash.draft import DFlashDraft, spread_layer_ids
from tests.models.drafts import verifier_shape


def written(**options) -> dict:
    return DFlashDraft(**{"block_size": 4, "num_layers": 2} | options).resolve(verifier_shape()).to_json()


def test_defaults_follow_the_verifier() -> None:
    config = DFlashDraft().resolve(verifier_shape(num_hidden_layers=36, vocab_size=50000))
    layer = config.transformer_layer_config
    assert (layer.model_type, layer.num_hidden_layers, layer.hidden_size) == ("qwen3", 5, 32)
    assert config.draft_vocab_size == layer.vocab_size == 50000
    assert (config.block_size, config.num_speculative_tokens, config.mask_token_id) == (8, 7, 49999)
    assert (config.sample_from_anchor, config.sliding_window_non_causal) == (False, True)
    assert layer.layer_types == ["full_attention"] * 5
    # DFlash's own release for 36 layers takes the outputs of 1, 9, 17, 25 and 33.
    assert config.aux_layer_ids == [2, 10, 18, 26, 34]


@pytest.mark.parametrize(
    ("drafts", "layers", "expected"),
    [
        (1, 36, [19]),
        (5, 48, [2, 13, 24, 35, 46]),
        (2, 8, [2, 6]),
        (5, 4, [2]),
        (3, 2, [0, 1, 2]),
        (1, 1, [1]),
        (4, 1, [0, 1]),
    ],
)
def test_layer_ids_are_spread_over_the_verifier(drafts: int, layers: int, expected: list[int]) -> None:
    """Ids are one more than round(1 + i (L - 4) / (n - 1)), which is the layer whose output is meant."""
    assert spread_layer_ids(drafts, layers) == expected


def test_choices_win_over_the_verifier() -> None:
    config = DFlashDraft(
        num_layers=3,
        block_size=16,
        mask_token_id=7,
        aux_layer_ids=[1, 8],
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sample_from_anchor=True,
        sliding_window_non_causal=False,
    ).resolve(verifier_shape())
    layer = config.transformer_layer_config
    assert layer.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert (layer.sliding_window, layer.use_sliding_window) == (5, True)
    assert (config.num_speculative_tokens, config.mask_token_id, config.aux_layer_ids) == (16, 7, [1, 8])
    assert [config.is_causal(index) for index in range(3)] == [True] * 3


def test_a_window_is_for_all_layers_unless_some_are_named() -> None:
    layer = DFlashDraft(num_layers=2, sliding_window=5).resolve(verifier_shape()).transformer_layer_config
    assert layer.layer_types == ["sliding_attention"] * 2


def test_a_draft_of_another_width_ships_embeddings_and_head() -> None:
    config = DFlashDraft(hidden_size=16).resolve(verifier_shape())
    assert (config.target_hidden_size, config.verifier_hidden_size) == (32, 32)
    tensors = config.expected_tensors()
    assert tensors["fc.weight"].shape == (16, 5 * 32)
    assert all(tensors[name].required for name in ("embed_tokens.weight", "lm_head.weight"))
    same = DFlashDraft().resolve(verifier_shape()).expected_tensors()
    assert not any(same[name].required for name in ("embed_tokens.weight", "lm_head.weight"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token_id": 40}, "mask_token_id is 40; expected a token of the verifier, 0 to 39"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; expected num_layers, 2"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window None"),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 5}, "sliding_window 5"),
        ({"aux_layer_ids": [3, 2]}, r"aux_layer_ids is \[3, 2\]; expected ascending ids"),
        ({"aux_layer_ids": [9]}, "to 8"),
    ],
)
def test_contradicting_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        written(**options)


def test_a_block_of_more_tokens_than_engines_verify_is_refused() -> None:
    """A config promises no more tokens than a block predicts (pitfall 20)."""
    assert DFlashDraft(block_size=129).resolve(verifier_shape()).num_speculative_tokens == 128
    with pytest.raises(FormatError, match="speculative_tokens is 129"):
        DFlashDraft(block_size=129, sample_from_anchor=True).resolve(verifier_shape())


def changed(data: dict, path: str, value: object) -> dict:
    """`data` with one value changed at a dotted path; numbers are list positions."""
    first, _, rest = path.partition(".")
    if isinstance(data, list):
        copy = list(data)
        copy[int(first)] = changed(data[int(first)], rest, value) if rest else value
        return copy
    return {**data, first: changed(data[first], rest, value) if rest else value}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("aux_hidden_state_layer_ids", [6, 2], r"F029 .*is \[6, 2\]; expected \[2, 6\]"),
        ("aux_hidden_state_layer_ids", [], "F029"),
        ("block_size", 1, "block_size is 1"),
        ("mask_token_id", 40, "F051 .*mask_token_id 40 has no embedding; expected an id below 40"),
        ("mask_token_id", -1, "mask_token_id is -1"),
        ("mask_token_id", None, "mask_token_id is null"),
        ("sliding_window_non_causal", 1, "sliding_window_non_causal is 1"),
        ("transformer_layer_config.model_type", "llama", "F035 .*a block drafter's layers are qwen3"),
        ("transformer_layer_config.is_causal", True, "is_causal contradicts sliding_window_non_causal"),
        (
            "speculators_config.proposal_methods.0.speculative_tokens",
            4,
            "F050 .*speculative_tokens is 4; a block of 4, whose first is the anchor, predicts 3 tokens: write 3",
        ),
    ],
)
def test_configurations_that_cannot_be_meant_are_refused(path: str, value: object, message: str) -> None:
    """Pitfall 20 is the last."""
    with pytest.raises(FormatError, match=message):
        DFlashConfig.from_json(changed(written(), path, value))


@pytest.mark.parametrize(
    "key", ["mask_token_id", "sliding_window_non_causal", "aux_hidden_state_layer_ids", "block_size"]
)
def test_keys_that_readers_guess_differently_must_be_there(key: str) -> None:
    data = written()
    del data[key]
    with pytest.raises(FormatError, match=f"{key} is missing"):
        DFlashConfig.from_json(data)


def test_fewer_tokens_than_a_block_predicts_may_be_proposed() -> None:
    data = changed(written(), "speculators_config.proposal_methods.0.speculative_tokens", 2)
    assert DFlashConfig.from_json(data).num_speculative_tokens == 2


def test_biases_are_those_of_vllms_layers() -> None:
    names = DFlashConfig.from_json(written(attention_bias=True)).expected_tensors()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert f"layers.1.self_attn.{name}.bias" in names
