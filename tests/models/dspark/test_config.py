"""What a DSpark config says, refuses and promises."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from speculators.errors import FormatError
from speculators.models.draft_model import DraftContext
from speculators.models.dspark.config import DSparkConfig
from speculators.models.dspark.draft import DSparkDraft
from tests.models.drafts import HIDDEN, random_speculator, verifier_shape

GOLDEN = Path(__file__).parent.parent.parent / "golden" / "dspark"


def golden(**changes: Any) -> dict[str, Any]:
    return json.loads((GOLDEN / "config.json").read_text(encoding="utf-8")) | changes


def with_layers(*types: str, **changes: Any) -> dict[str, Any]:
    config = golden(**changes)
    config["transformer_layer_config"] |= {"layer_types": list(types), "num_hidden_layers": len(types)}
    config["transformer_layer_config"] |= {"use_sliding_window": "sliding_attention" in types}
    return config


def test_another_writers_file_is_read_and_written_back_but_for_its_noise() -> None:
    config = golden()
    written = DSparkConfig.from_json(config).to_json()
    assert config.keys() - written.keys() == {"auto_map", "transformers_version"}
    own = ("transformer_layer_config", "speculators_version")
    assert {key: value for key, value in written.items() if key not in own} == {
        key: config[key] for key in written if key not in own
    }


def test_keys_that_readers_take_differently_are_always_written() -> None:
    """Every flag does something, and no key is ignored (pitfall 10)."""
    config = golden()
    for key in ("sample_from_anchor", "sliding_window_non_causal", "enable_confidence_head", "markov_head_type"):
        del config[key]
    written = DSparkConfig.from_json(config).to_json()
    assert (written["sample_from_anchor"], written["sliding_window_non_causal"]) == (True, False)
    assert (written["enable_confidence_head"], written["markov_head_type"]) == (True, "vanilla")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("vanilla", {}),
        ("gated", {"markov_head.gate_proj.weight": (256, 64 + 256), "markov_head.gate_proj.bias": (256,)}),
        ("rnn", {"markov_head.joint_proj.weight": (768, 512 + 64), "markov_head.joint_proj.bias": (768,)}),
    ],
)
def test_tensors_are_those_of_the_golden_directory_and_of_the_kind_of_head(kind: str, changes: dict) -> None:
    with safe_open(GOLDEN / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    expected = DSparkConfig.from_json(golden(markov_head_type=kind)).expected_tensors()
    assert {name: spec.shape for name, spec in expected.items() if spec.required} == {
        **{name: shape for name, shape in stored.items() if name != "t2d"},
        **changes,
    }
    assert not expected["embed_tokens.weight"].required


def test_confidence_tensors_follow_the_two_flags() -> None:
    with_markov = DSparkConfig.from_json(golden()).expected_tensors()
    without = DSparkConfig.from_json(golden(confidence_head_with_markov=False)).expected_tensors()
    none = DSparkConfig.from_json(golden(enable_confidence_head=False)).expected_tensors()
    assert with_markov["confidence_head.proj.weight"].shape == (1, 64 + 256)
    assert without["confidence_head.proj.weight"].shape == (1, 64)
    assert not [name for name in none if "confidence" in name]


def test_a_layer_is_causal_where_it_has_a_window_as_vllm_reads_it() -> None:
    """Pitfall 12: the mask's kind must not lie in a key that the server does not read."""
    config = DSparkConfig.from_json(with_layers("full_attention", "sliding_attention"))
    assert [config.is_causal(layer) for layer in (0, 1)] == [False, True]
    vacuous = DSparkConfig.from_json(with_layers("full_attention", sliding_window_non_causal=True))
    assert not vacuous.is_causal(0)
    causal = with_layers("full_attention")
    causal["transformer_layer_config"]["is_causal"] = True
    assert DSparkConfig.from_json(causal).is_causal(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window_non_causal": True}, "sliding layers causally"),
        ({"confidence_temperatures": [1.0] * 7}, "has 7 entries; expected 8"),
        ({"confidence_temperatures": [1.0] * 8, "enable_confidence_head": False}, "enable_confidence_head is false"),
        ({"confidence_temperatures": [1.0] * 7 + [0.0]}, "greater than 0"),
        ({"markov_rank": 0}, "markov_rank"),
        ({"markov_rank": None}, "markov_rank"),
        ({"markov_head_type": "lstm"}, "markov_head_type"),
        ({"mask_token_id": 128}, "mask_token_id 128"),
        ({"block_size": 7}, "speculative_tokens is 8"),
        ({"sample_from_anchor": False}, "speculative_tokens is 8"),
        ({"markov_ranks": 3}, "markov_rank"),
    ],
)
def test_what_cannot_hold_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        DSparkConfig.from_json(golden(**changes))


def test_a_missing_rank_is_named() -> None:
    config = golden()
    del config["markov_rank"]
    with pytest.raises(FormatError, match="markov_rank is missing"):
        DSparkConfig.from_json(config)


def test_temperatures_are_written_only_where_there_are_any() -> None:
    temperatures = [0.5 + step / 4 for step in range(8)]
    calibrated = DSparkConfig.from_json(golden(confidence_temperatures=temperatures))
    assert calibrated.to_json()["confidence_temperatures"] == temperatures
    assert "confidence_temperatures" not in DSparkConfig.from_json(golden()).to_json()


def test_choices_reach_the_config() -> None:
    draft = DSparkDraft(
        num_layers=2, block_size=6, markov_rank=3, markov_head_type="rnn", confidence_head_with_markov=False
    )
    config = draft.resolve(verifier_shape())
    assert (config.markov_rank, config.markov_head_type) == (3, "rnn")
    assert (config.enable_confidence_head, config.confidence_head_with_markov) == (True, False)
    assert (config.block_size, config.mask_token_id, config.sample_from_anchor) == (6, 39, True)
    assert config.num_speculative_tokens == 6


def test_defaults_are_those_of_the_paper() -> None:
    config = DSparkDraft().resolve(verifier_shape(num_hidden_layers=36))
    assert (config.transformer_layer_config.num_hidden_layers, config.markov_rank) == (5, 256)
    assert (config.markov_head_type, config.enable_confidence_head) == ("vanilla", True)
    # Capture ids, one more than the paper's numbers of layer outputs 1, 9, 17, 25, 33.
    assert config.aux_layer_ids == [2, 10, 18, 26, 34]
    assert not any(config.is_causal(layer) for layer in range(5))


def test_a_window_that_is_not_causal_is_refused() -> None:
    with pytest.raises(FormatError, match="sliding layers causally"):
        DSparkDraft(sliding_window=4, sliding_window_non_causal=True).resolve(verifier_shape())


@pytest.mark.parametrize("block_size", [2, 8])
@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_a_block_drafts_as_many_tokens_as_the_config_promises(block_size: int, sample_from_anchor: bool) -> None:
    """Pitfall 20: with the anchor's own slot a block of B gives B tokens, without it B - 1."""
    options = {"block_size": block_size, "sample_from_anchor": sample_from_anchor, "num_layers": 1, "markov_rank": 4}
    speculator = random_speculator("dspark", **options)
    promised = block_size - (0 if sample_from_anchor else 1)
    written = speculator.config.to_json()["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert promised == written == speculator.num_speculative_tokens == speculator.config.max_speculative_tokens
    states = torch.randn(1, 3, len(speculator.draft.aux_layer_ids) * HIDDEN)
    context = DraftContext(torch.tensor([[4, 5, 6]]), states, [0], [3], speculator.draft.make_cache(1), slice(0, 1))

    def likeliest(logits_BD: Tensor, step: int) -> tuple[Tensor, None]:
        return logits_BD.argmax(-1), None

    proposal = speculator.draft.propose(context, promised, likeliest)
    assert proposal.token_ids_BK.shape == (1, promised)
    assert proposal.lengths_B.tolist() == [promised]
    assert proposal.confidence_BK.shape == (1, promised)
