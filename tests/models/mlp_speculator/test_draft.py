import pytest
from pydantic import ValidationError

from speculators.errors import FormatError, UsageError
from speculators.models.mlp_speculator.config import MlpSpeculatorConfig
from speculators.models.mlp_speculator.draft import MlpSpeculatorDraft
from tests.models.drafts import verifier_shape


def test_defaults_follow_the_verifier() -> None:
    config = MlpSpeculatorDraft().resolve(verifier_shape())
    assert (config.vocab_size, config.emb_dim, config.inner_dim, config.n_predict) == (40, 32, 32, 3)
    assert (config.tie_weights, config.scale_input) == (True, True)
    assert (config.top_k_tokens_per_head, config.n_candidates) == ([5, 4, 3], 5)
    assert (config.verifier_hidden_size, config.verifier_vocab_size, config.num_draft_ids) == (32, 40, 40)
    assert (config.num_speculative_tokens, config.max_speculative_tokens, config.aux_layer_ids) == (3, 3, [])
    assert config.network() == "3 steps of a recurrence of width 32 with tied weights"


def test_choices_win() -> None:
    draft = MlpSpeculatorDraft(
        n_predict=7, inner_dim=24, tie_weights=False, num_speculative_tokens=2, top_k_tokens_per_head=[3] * 7
    )
    config = draft.resolve(verifier_shape())
    assert (config.width, config.num_speculative_tokens, config.top_k_tokens_per_head) == (24, 2, [3] * 7)
    shapes = {name: spec.shape for name, spec in config.expected_tensors().items()}
    assert (shapes["proj.0.weight"], shapes["proj.6.weight"]) == ((24, 32), (24, 24))
    assert (shapes["emb.6.weight"], shapes["head.6.weight"], shapes["ln.6.bias"]) == ((40, 24), (40, 24), (24,))
    assert MlpSpeculatorDraft(n_predict=7).resolve(verifier_shape()).top_k_tokens_per_head == [5, 4, 3, 2, 1, 1, 1]


def test_contradicting_choices_are_refused() -> None:
    with pytest.raises(UsageError, match="num_speculative_tokens is 4 with n_predict 3"):
        MlpSpeculatorDraft(num_speculative_tokens=4).resolve(verifier_shape())
    with pytest.raises(FormatError, match="tie_weights is true and n_predict is 1"):
        MlpSpeculatorDraft(n_predict=1).resolve(verifier_shape())
    assert MlpSpeculatorDraft(n_predict=1, tie_weights=False).resolve(verifier_shape()).n_predict == 1
    with pytest.raises(FormatError, match="top_k_tokens_per_head has 1 entries; n_predict is 3"):
        MlpSpeculatorDraft(top_k_tokens_per_head=[5]).resolve(verifier_shape())
    with pytest.raises(ValidationError, match="num_heads\n"):
        MlpSpeculatorDraft(num_heads=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_predict": 2, "top_k_tokens_per_head": [1, 1]}, "speculative_tokens is 3 but n_predict is 2"),
        ({"top_k_tokens_per_head": [5, 4, 0]}, "top_k_tokens_per_head"),
        ({"tie_weights": None}, "tie_weights is null"),
        ({"inner_dim": -1}, "inner_dim is -1"),
        ({"scale_input": "yes"}, "scale_input is"),
        ({"hidden_size": 32}, "hidden_size is not a known key"),
        ({"model_type": "mlp_speculator"}, "F002 model-type"),
    ],
)
def test_wrong_keys_are_named(changes: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        MlpSpeculatorConfig.from_json(MlpSpeculatorDraft().resolve(verifier_shape()).to_json() | changes)


def test_a_width_of_0_is_the_verifiers() -> None:
    written = MlpSpeculatorDraft().resolve(verifier_shape()).to_json() | {"inner_dim": 0}
    config = MlpSpeculatorConfig.from_json(written)
    assert (config.inner_dim, config.width) == (0, 32)
    assert config.expected_tensors()["proj.1.weight"].shape == (32, 32)
