"""What DFlash 2's options become, and which configurations are refused."""

import pytest

from speculators.errors import FormatError, UsageError
from speculators.models.dflash2.config import DFlash2Config
from speculators.models.dflash2.draft import DFlash2Draft
from tests.models.drafts import verifier_shape


def test_defaults_follow_the_verifier() -> None:
    config = DFlash2Draft().resolve(verifier_shape())
    assert (config.block_size, config.num_speculative_tokens, config.sliding_window_non_causal) == (8, 7, True)
    assert (config.conv_kernel_size, config.conv_group_size) == (2, 16)
    assert (config.selector_rank, config.selector_top_k) == (256, 16)
    assert config.draft_vocab_size == 40
    tensors = config.expected_tensors()
    assert tensors["layers.4.mlp_conv.base_kernel"].shape == (2, 2, 32)
    assert tensors["layers.0.attention_conv.kernel_projection.weight"].shape == (2 * 2 * 2, 32)
    assert tensors["candidate_selector.hidden_projection.weight"].shape == (256, 32)
    assert tensors["candidate_selector.predecessor_codebook"].shape == (40, 256)
    assert "convolutions" in config.network()


def test_a_part_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="draft_vocab_size is 16; a dflash2 draft proposes all 40 tokens"):
        DFlash2Draft(draft_vocab_size=16).resolve(verifier_shape())
    assert DFlash2Draft(draft_vocab_size=40).resolve(verifier_shape()).draft_vocab_size == 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_group_size": 12}, "conv_group_size 12 does not divide hidden_size 32"),
        ({"draft_vocab_size": 16}, "F054 .*draft_vocab_size is 16; a DFlash 2 draft proposes all 40"),
        ({"selector_top_k": 41}, "selector_top_k 41 exceeds vocab_size 40"),
        ({"conv_kernel_size": 0}, "conv_kernel_size is 0"),
        ({"selector_rank": None}, "selector_rank is null"),
    ],
)
def test_configurations_that_cannot_be_meant_are_refused(changes: dict, message: str) -> None:
    written = DFlash2Draft().resolve(verifier_shape()).to_json()
    with pytest.raises(FormatError, match=message):
        DFlash2Config.from_json(written | changes)


@pytest.mark.parametrize("key", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"])
def test_keys_without_which_vllm_fails_must_be_there(key: str) -> None:
    written = DFlash2Draft().resolve(verifier_shape()).to_json()
    del written[key]
    with pytest.raises(FormatError, match=f"{key} is missing"):
        DFlash2Config.from_json(written)
