import subprocess
import sys

import pytest

from speculators.errors import VerifierError
from speculators.models import FAMILIES
from speculators.models.family import Count, VerifierShape

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}


def shape(**changes) -> VerifierShape:
    return VerifierShape.from_config_dict({**LLAMA, **changes}, "org/model")


def test_sizes_and_what_follows_from_them() -> None:
    found = shape()
    assert (found.num_key_value_heads, found.head_dim, found.rms_norm_eps) == (4, 16, 1e-5)
    assert found.architectures == ("LlamaForCausalLM",)
    assert shape(num_key_value_heads=2, head_dim=32).head_dim == 32


def test_the_language_part_of_a_multimodal_config_is_used() -> None:
    nested = {
        "architectures": ["SomeVLM"],
        "model_type": "vlm",
        "text_config": LLAMA,
        "vision_config": {"hidden_size": 9},
    }
    found = VerifierShape.from_config_dict(nested, "org/vlm")
    assert (found.hidden_size, found.model_type, found.architectures) == (64, "llama", ("SomeVLM",))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            {"rope_type": "default", "rope_theta": 10000.0},
        ),
        ({"partial_rotary_factor": 0.5}, {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    ],
)
def test_rope_settings_of_old_and_new_layouts(changes: dict, expected: dict) -> None:
    assert shape(**changes).rope_parameters == expected


def test_a_missing_rope_base_is_an_error_not_a_default() -> None:
    with pytest.raises(VerifierError, match="names no rope_theta"):
        shape(rope_theta=None)
    with pytest.raises(VerifierError, match="names no rope_theta"):
        shape(rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 2.0})


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, -1, "64", True, 2.0])
def test_a_size_that_is_none_is_named(key: str, value: object) -> None:
    with pytest.raises(VerifierError, match=f"org/model.*{key}={value!r}"):
        shape(**{key: value})


def test_counts_add_and_divide_once() -> None:
    total = Count(1.0, 2.0).plus(Count(2.0, 4.0))
    assert tuple(total) == (3.0, 6.0)
    assert total.rate == 0.5
    assert Count(0.0, 0.0).rate == 0.0


def test_names_in_the_table_are_those_of_the_configs() -> None:
    for name, family in FAMILIES.items():
        assert family.name == name
        assert family.config.model_fields["speculators_model_type"].default == name
        assert family.module.rpartition(".")[2] == name


def test_the_table_and_the_configs_need_no_torch() -> None:
    code = (
        "import sys; from speculators.models import FAMILIES;"
        "[(family.draft, family.config) for family in FAMILIES.values()];"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
