"""What a draft takes over from verifiers that are no plain dense decoder, as transformers configures them."""

from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma3Config,
    Gemma4Config,
    Glm4MoeLiteConfig,
    GptOssConfig,
    Llama4Config,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral3Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from speculators.errors import SpeculatorsError, VerifierError
from speculators.formats.verifier_weights import VerifierWeights
from speculators.formats.vocab import DraftVocab
from speculators.models import FAMILIES
from speculators.models.dense_shape import Heads, dense_heads, dense_width
from speculators.models.draft_model import DraftContext
from speculators.models.family import VerifierShape
from speculators.models.speculator import Speculator
from tests.verifier_configs import HIDDEN, LAYERS, TINY, VOCAB

# Of the sizes that the classes have by default: MLP width, query heads, key heads, head size.
DEFAULTS: list[tuple[type[PreTrainedConfig], tuple[int, int, int, int]]] = [
    (Qwen3MoeConfig, (6144, 32, 4, 64)),  # a dense width is written: three hidden sizes
    (GptOssConfig, (3 * 2880, 64, 8, 64)),  # intermediate_size is an expert's
    (MixtralConfig, (14336, 32, 8, 128)),  # an expert's too, as wide as a dense layer
    (DeepseekV3Config, (3 * 7168, 56, 8, 128)),  # the first layers' 18432; head_dim is the rotated part of a head
    (Glm4MoeLiteConfig, (10240, 16, 8, 128)),  # latent attention with 20 heads of 256
    (Llama4Config, (16384, 40, 8, 128)),  # intermediate_size 8192 is an expert's, intermediate_size_mlp the dense one
    (MiniMaxM2Config, (3 * 3072, 48, 8, 128)),
    (Qwen3NextConfig, (3 * 2048, 16, 2, 256)),
    (Qwen3_5MoeConfig, (3 * 2048, 16, 2, 256)),  # no dense width at all
    (Qwen3_5Config, (12288, 16, 4, 256)),
    (Gemma3Config, (9216, 8, 4, 256)),
    (Mistral3Config, (32768, 32, 8, 128)),
]


def shape_of(config: PreTrainedConfig | dict[str, Any]) -> VerifierShape:
    return VerifierShape.from_config_dict(config if isinstance(config, dict) else config.to_dict(), "org/model")


@pytest.mark.parametrize(("kind", "expected"), DEFAULTS, ids=[kind.__name__ for kind, _ in DEFAULTS])
def test_sizes_of_a_dense_draft(kind: type[PreTrainedConfig], expected: tuple[int, int, int, int]) -> None:
    found = shape_of(kind())
    heads = (found.num_attention_heads, found.num_key_value_heads, found.head_dim)
    assert (found.intermediate_size, *heads) == expected


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [
        (7168, Heads(56, 8, 128)),
        (5120, Heads(40, 8, 128)),
        (1536, Heads(12, 4, 128)),
        (2880, Heads(24, 8, 128)),  # 22.5 heads: the multiple of four next to it
        (100, Heads(4, 4, 32)),
        (64, Heads(2, 2, 32)),
        (2, Heads(1, 1, 2)),
    ],
)
def test_heads_of_the_drafts_own(hidden: int, expected: Heads) -> None:
    """Latent attention, or heads that nothing can rotate: the draft's make up its width, and are even."""
    assert dense_heads({"num_attention_heads": 4, "kv_lora_rank": 8, "head_dim": 8}, hidden, "v") == expected
    assert dense_heads({"num_attention_heads": 4, "head_dim": 25}, hidden, "v") == expected
    assert dense_heads({"num_attention_heads": 3 * hidden}, hidden, "v") == expected
    assert expected.num_attention_heads % expected.num_key_value_heads == 0


def test_the_verifiers_heads_are_kept_where_a_draft_can_have_them() -> None:
    assert dense_heads({"num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 10}, 64, "v") == (6, 2, 10)
    assert dense_heads({"num_attention_heads": 4, "num_key_value_heads": None}, 64, "v") == (4, 4, 16)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 96),
        ({"intermediate_size": 20}, 20),
        ({"intermediate_size": 20, "num_experts": 0}, 20),
        ({"intermediate_size": 20, "num_local_experts": 1}, 20),
        ({"intermediate_size": 20, "num_local_experts": 8}, 96),
        ({"intermediate_size": 0, "n_routed_experts": 8}, 96),
        ({"intermediate_size": 200, "moe_num_experts": 8}, 200),
        ({"intermediate_size": [20, 30]}, 30),
    ],
)
def test_width_of_the_mlp(config: dict[str, Any], expected: int) -> None:
    assert dense_width(config, 32, "v") == expected


def test_rope_of_several_kinds_of_layers_and_axes() -> None:
    """Pitfall 4 and pitfall 5: the base is the verifier's, and what the draft cannot turn by is not copied."""
    gemma = shape_of(Gemma3Config())
    assert gemma.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    partial = shape_of(Gemma4Config())
    assert partial.rope_parameters == {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    multimodal = shape_of(TINY["qwen2_5_vl"]())
    assert multimodal.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    scaled = shape_of(Ministral3Config()).rope_parameters
    assert (scaled["rope_type"], scaled["factor"], scaled["original_max_position_embeddings"]) == ("yarn", 16.0, 16384)
    assert not {"llama_4_scaling_beta", "max_position_embeddings", "type"} & scaled.keys()


# An MTP block is a layer of the verifier's own kind, so that only some verifiers have one.
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"mtp"}))
@pytest.mark.parametrize("kind", TINY)
def test_a_draft_of_any_family_is_created_for_it(family: str, kind: str) -> None:
    """What `resolve` gives is a sound config, and its draft takes the verifier's embeddings, head and norm."""
    shape = shape_of(TINY[kind]())
    assert (shape.hidden_size, shape.num_hidden_layers, shape.vocab_size) == (HIDDEN, LAYERS, VOCAB)
    config = FAMILIES[family].draft().resolve(shape)
    vocab = None
    if config.num_draft_ids < VOCAB:
        vocab = DraftVocab.from_ids(range(config.num_draft_ids), VOCAB)
    weights = VerifierWeights(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.ones(HIDDEN), 1e-6)
    speculator = Speculator.create(config, weights, vocab)
    assert speculator.draft.missing_tensors() == []
    context = DraftContext(
        token_ids_BT=torch.tensor([[5, 6, 7]]),
        aux_hidden_states_BTX=torch.randn(1, 3, HIDDEN * len(config.aux_layer_ids)) if config.aux_layer_ids else None,
        starts=[0],
        lengths=[3],
        cache=speculator.draft.make_cache(1),
        rows=slice(0, 1),
        normed_hidden_states_BTH=torch.randn(1, 3, HIDDEN),
    )
    num_tokens = min(2, config.num_speculative_tokens)
    with torch.no_grad():
        proposal = speculator.draft.propose(context, num_tokens, lambda logits, step: (logits.argmax(-1), None))
    assert proposal.token_ids_BK.shape == (1, num_tokens)


def test_sizes_can_be_chosen_instead() -> None:
    choices = {"intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 12}
    layer = FAMILIES["eagle3"].draft(**choices).resolve(shape_of(TINY["deepseek_v3"]())).transformer_layer_config
    assert {key: getattr(layer, key) for key in choices} == choices


BAD: list[tuple[str, Any]] = [
    ("intermediate_size", "x"),
    ("intermediate_size", -1),
    ("intermediate_size", 0),
    ("intermediate_size", [48, "x"]),
    ("intermediate_size", True),
    ("num_key_value_heads", "2"),
    ("num_key_value_heads", 0),
    ("head_dim", 2.5),
    ("head_dim", -8),
    ("rms_norm_eps", "1e-5"),
    ("rms_norm_eps", -1.0),
    ("initializer_range", [1]),
    ("architectures", "LlamaForCausalLM"),
    ("architectures", [1]),
    ("rope_parameters", [1]),
    ("rope_parameters", "yarn"),
    ("max_position_embeddings", None),
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_verifier_config_that_makes_no_sense_is_named(key: str, value: object) -> None:
    config = {**TINY["mistral3"]().to_dict()["text_config"], key: value}
    with pytest.raises(VerifierError, match="org/model"):
        shape_of(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_parameters", {"rope_type": ["x"], "rope_theta": 1e4}),
        ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("rope_parameters", {"rope_theta": "1e4"}),
        ("hidden_size", 1 << 40),
        ("vocab_size", 1 << 60),
        ("eos_token_id", "</s>"),
        ("rms_norm_eps", 2.0),
    ],
)
def test_what_no_draft_can_have_is_refused_when_it_is_resolved(key: str, value: object) -> None:
    config = {**TINY["mistral3"]().to_dict()["text_config"], key: value}
    with pytest.raises(SpeculatorsError):
        FAMILIES["eagle3"].draft().resolve(shape_of(config))
