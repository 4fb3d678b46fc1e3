"""config.json: what is read, what is refused by name, and what is written."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators.errors import FormatError
from speculators.formats.config import TensorSpec, package_version
from speculators.formats.decoder import DecoderConfig
from speculators.models.eagle3.config import Eagle3Config
from tests.formats.eagle3_directory import CONFIG, GOLDEN, make_config

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**31)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*prefix, key)
        yield from paths(inner, (*prefix, key))


def place(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(config)
    owner = changed
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    return dict(changed)


def refused(config: Any) -> FormatError:
    with pytest.raises(FormatError) as caught:
        Eagle3Config.from_json(config)
    return caught.value


def test_golden_file_is_read_and_written_but_for_its_noise() -> None:
    golden = json.loads((GOLDEN / "eagle3" / "config.json").read_text())
    written = Eagle3Config.from_json(golden).to_json()
    assert written == {key: value for key, value in golden.items() if key not in ("auto_map", "transformers_version")}


def test_what_is_written_is_read_back_the_same() -> None:
    config = Eagle3Config.from_json(CONFIG)
    assert config.to_json() == CONFIG
    assert Eagle3Config.from_json(json.loads(json.dumps(config.to_json()))) == config


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(paths(CONFIG), key=str)), JSON_VALUES)
def test_any_value_anywhere_is_understood_or_refused_by_name(path: tuple[Any, ...], value: Any) -> None:
    """Pitfall 9 and pitfall 10: a key is never ignored; a wrong value names it, a right one survives a round trip."""
    try:
        written = Eagle3Config.from_json(place(CONFIG, path, value)).to_json()
    except FormatError as error:
        refusal: FormatError | None = error
    else:
        refusal = None
        assert Eagle3Config.from_json(json.loads(json.dumps(written, allow_nan=False))).to_json() == written
    names = [part for part in path if isinstance(part, str)]
    assert refusal is None or (refusal.code is not None and any(name in str(refusal) for name in names))


@settings(deadline=None, max_examples=100)
@given(JSON_VALUES)
def test_any_document_is_refused_without_a_crash(value: Any) -> None:
    assert refused(value).code in ("F001", "F006")


@pytest.mark.parametrize(
    "missing", sorted(CONFIG.keys() - {"architectures", "speculators_version", "tie_word_embeddings"})
)
def test_a_missing_key_has_a_pinned_default_or_is_an_error(missing: str) -> None:
    """Pitfall 10: readers disagree about absent keys, so those that change numbers must be there."""
    config = {key: value for key, value in CONFIG.items() if key != missing}
    defaults: dict[str, Any] = {
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
    }
    if missing in defaults:
        assert getattr(Eagle3Config.from_json(config), missing) == defaults[missing]
    else:
        assert missing in str(refused(config))


@pytest.mark.parametrize(
    ("place_of", "name", "suggestion"),
    [
        ((), "norm_befor_fc", "norm_before_fc"),
        ((), "draft_vocabsize", "draft_vocab_size"),
        (("transformer_layer_config",), "hiden_size", "hidden_size"),
        (("speculators_config",), "proposal_method", "proposal_methods"),
        (("speculators_config", "verifier"), "name_or_pth", "name_or_path"),
        (("speculators_config", "proposal_methods", 0), "speculative_token", "speculative_tokens"),
    ],
)
def test_misspelt_key_is_named_with_the_nearest_known_one(
    place_of: tuple[Any, ...], name: str, suggestion: str
) -> None:
    error = refused(place(CONFIG, (*place_of, name), 1))
    assert error.code == "F031"
    assert name in str(error)
    assert f"did you mean '{suggestion}'" in str(error)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("draft_vocab_size",), 0, "greater than 0"),
        (("draft_vocab_size",), -5, "greater than 0"),
        (("draft_vocab_size",), 10**12, "less than or equal to"),
        (("draft_vocab_size",), "32", "a valid integer"),
        (("draft_vocab_size",), 32.0, "a valid integer"),
        (("draft_vocab_size",), True, "a valid integer"),
        (("norm_output",), 1, "a valid boolean"),
        (("norm_output",), "true", "a valid boolean"),
        (("dtype",), "int8", "'float32', 'bfloat16' or 'float16'"),
        (("tie_word_embeddings",), True, "False"),
        (("transformer_layer_config", "rms_norm_eps"), math.nan, "a finite number"),
        (("transformer_layer_config", "rms_norm_eps"), math.inf, "a finite number"),
        (("transformer_layer_config", "rms_norm_eps"), "1e-6", "a valid number"),
        (("transformer_layer_config", "hidden_size"), 2**40, "less than or equal to"),
        (("transformer_layer_config", "hidden_act"), "gelu", "'silu'"),
        (("transformer_layer_config", "eos_token_id"), "2", "a token id"),
        (("transformer_layer_config", "logit_scale"), 2.0, "less than or equal to 1"),
        (("transformer_layer_config", "is_causal"), False, "True"),
        (("speculators_config", "verifier", "architectures"), "X", "a valid list"),
        (("eagle_aux_hidden_state_layer_ids", 1), 2.5, "a valid integer"),
    ],
)
def test_wrong_value_names_key_got_and_expected(path: tuple[Any, ...], value: object, expected: str) -> None:
    text = str(refused(place(CONFIG, path, value)))
    assert ".".join(str(part) for part in path) in text
    assert expected in text
    if not isinstance(value, float):
        assert json.dumps(value) in text


def test_every_wrong_key_is_named_at_once() -> None:
    config = make_config(norm_befor_fc=True, norm_output=1, layer={"hidden_size": -1, "rope_parameters": {}})
    text = str(refused(config))
    for name in ("norm_befor_fc", "norm_output", "hidden_size", "rope_parameters"):
        assert name in text


@pytest.mark.parametrize("value", [None, "speculators"])
def test_harmless_model_type_is_dropped(value: str | None) -> None:
    assert "model_type" not in Eagle3Config.from_json(make_config(model_type=value)).to_json()


def test_other_model_type_is_refused() -> None:
    assert refused(make_config(model_type="speculator_model")).code == "F002"


def test_noise_of_other_writers_is_dropped() -> None:
    noisy = make_config(
        auto_map={"": "config.Eagle3SpeculatorConfig"}, transformers_version="5.19.0", torch_dtype="float16"
    )
    assert Eagle3Config.from_json(noisy).to_json() == CONFIG
    old = {key: value for key, value in make_config(torch_dtype="float16").items() if key != "dtype"}
    assert Eagle3Config.from_json(old).dtype == "float16"
    assert "auto_map" in str(refused(make_config(auto_map={"AutoModel": "modeling.Draft"})))


def test_absent_layer_ids_are_refused_with_what_engines_would_do() -> None:
    """Pitfall 8: where ids are absent an engine guesses them."""
    error = refused(make_config(eagle_aux_hidden_state_layer_ids=None))
    assert error.code == "F030"
    assert "guess" in str(error)


@pytest.mark.parametrize("ids", [[4, 2, 5], [2, 2, 5], [5, 4, 2]])
def test_layer_ids_out_of_order_are_refused(ids: list[int]) -> None:
    error = refused(make_config(eagle_aux_hidden_state_layer_ids=ids))
    assert error.code == "F029"
    assert str(sorted(set(ids))) in str(error)


def test_negative_layer_id_is_refused() -> None:
    assert refused(make_config(eagle_aux_hidden_state_layer_ids=[-1, 2])).code == "F029"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "at most one"),
        ({"draft_vocab_size": 65}, "exceeds vocab_size"),
        ({"layer": {"mlp_bias": True}}, "mlp_bias"),
        ({"layer": {"num_attention_heads": 3, "num_key_value_heads": 2}}, "no multiple"),
        ({"layer": {"head_dim": 5}}, "odd"),
        ({"layer": {"layer_types": ["full_attention"] * 2}}, "num_hidden_layers"),
        ({"layer": {"layer_types": ["sliding_attention"]}}, "sliding_window"),
        ({"block": {"algorithm": "peagle"}}, "algorithm"),
        ({"block": {"default_proposal_method": "tree"}}, "default_proposal_method"),
        ({"layer": {"num_aux_hidden_states": 4}}, "num_aux_hidden_states is 4"),
        ({"layer": {"num_aux_layers": 2}}, "num_aux_layers is 2"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], words: str) -> None:
    assert words in str(refused(make_config(**changes)))


def test_all_contradictions_of_a_block_are_named() -> None:
    text = str(refused(make_config(norm_before_fc=True, fc_norm=True, draft_vocab_size=65)))
    assert "at most one" in text
    assert "exceeds" in text


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("ids", [[3], [1, 2, 3], [0, 2, 4, 6]])
def test_llama_layers_say_how_many_features_there_are(kind: str, ids: list[int]) -> None:
    """Pitfall 9: vLLM's llama draft assumes three features whatever the list of layer ids says."""
    config = make_config(eagle_aux_hidden_state_layer_ids=ids, layer={"model_type": kind})
    layer = Eagle3Config.from_json(config).to_json()["transformer_layer_config"]
    assert layer.get("num_aux_hidden_states") == (len(ids) if kind == "llama" and len(ids) != 3 else None)


class TestRope:
    """Pitfall 4 and pitfall 5: never a default base, never a type or key that is copied and then ignored."""

    @staticmethod
    def parameters(**layer: Any) -> dict[str, Any]:
        block = {key: value for key, value in CONFIG["transformer_layer_config"].items() if key != "rope_parameters"}
        return DecoderConfig.model_validate(block | layer).rope_parameters

    def test_flat_layout_is_read(self) -> None:
        assert self.parameters(rope_theta=1e6) == {"rope_type": "default", "rope_theta": 1e6}
        scaling = {"type": "linear", "factor": 4.0}
        assert self.parameters(rope_theta=5e5, rope_scaling=scaling) == {
            "rope_type": "linear",
            "factor": 4.0,
            "rope_theta": 5e5,
        }

    def test_nested_layout_comes_first(self) -> None:
        nested = {"rope_type": "default", "rope_theta": 1e6}
        assert self.parameters(rope_parameters=nested, rope_theta=1e6) == nested

    def test_disagreeing_layouts_are_refused(self) -> None:
        assert "rope_theta" in str(refused(make_config(layer={"rope_theta": 1e6})))

    @pytest.mark.parametrize(
        ("parameters", "words"),
        [
            ({"rope_type": "default"}, "rope_theta"),
            ({"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}, "rope_type"),
            ({"rope_theta": 1e4, "rope_type": ["default"]}, "rope_type"),
            ({"rope_theta": 1e4, "rope_type": "yarn"}, "factor"),
            ({"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}, "high_freq_factor"),
            ({"rope_theta": 1e4, "rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
            ({"rope_theta": 1e4, "rope_type": "default", "factor": 2.0}, "factor"),
            ({"rope_theta": 0, "rope_type": "default"}, "above 0"),
            ({"rope_theta": math.nan, "rope_type": "default"}, "above 0"),
            ({"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.5}, "at most 1"),
        ],
    )
    def test_what_would_be_rotated_wrongly_is_refused(self, parameters: dict[str, Any], words: str) -> None:
        text = str(refused(make_config(layer={"rope_parameters": parameters})))
        assert "rope_parameters" in text
        assert words in text

    @pytest.mark.parametrize(
        "parameters",
        [
            {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25},
            {
                "rope_theta": 1e6,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            {
                "rope_theta": 5e5,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ],
    )
    def test_known_types_are_kept(self, parameters: dict[str, Any]) -> None:
        assert self.parameters(rope_parameters=parameters) == parameters


def test_older_layer_blocks_are_written_out_in_full() -> None:
    """Engines apply no class defaults to the block: an attribute that is left out is simply missing there."""
    block = CONFIG["transformer_layer_config"]
    left_out = (
        "head_dim",
        "layer_types",
        "use_sliding_window",
        "attention_bias",
        "sliding_window",
        "initializer_range",
    )
    old = {key: value for key, value in block.items() if key not in left_out} | {
        "_name_or_path": "x",
        "use_cache": True,
    }
    written = Eagle3Config.from_json(CONFIG | {"transformer_layer_config": old}).to_json()["transformer_layer_config"]
    assert written == block | {"use_cache": True}


def test_expected_tensors_are_those_of_the_golden_file() -> None:
    config = Eagle3Config.from_json(json.loads((GOLDEN / "eagle3" / "config.json").read_text()))
    raw = (GOLDEN / "eagle3" / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    kinds = {"BF16": "float", "I64": "int", "BOOL": "bool"}
    stored = {k: (tuple(v["shape"]), kinds[v["dtype"]]) for k, v in header.items() if k != "__metadata__"}
    assert {name: (spec.shape, spec.kind) for name, spec in config.expected_tensors().items()} == stored


def test_expected_tensors_of_two_qwen3_layers_with_every_option() -> None:
    layer = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "attention_bias": True,
        "num_aux_hidden_states": 4,
    }
    config = Eagle3Config.from_json(
        make_config(
            layer=layer,
            fc_norm=True,
            embed_requires_grad=True,
            target_hidden_size=6,
            draft_vocab_size=64,
            eagle_aux_hidden_state_layer_ids=[0, 2, 4, 6],
        )
    )
    expected = {
        "fc.weight": (8, 24),
        "norm.weight": (8,),
        "lm_head.weight": (64, 8),
        "embed_tokens.weight": (64, 8),
        "t2d": (64,),
        **{f"fc_norm.{index}.weight": (6,) for index in range(4)},
        "layers.0.hidden_norm.weight": (8,),
    }
    for index, width in ((0, 16), (1, 8)):
        start = f"layers.{index}."
        expected |= {
            start + "self_attn.q_proj.weight": (8, width),
            start + "self_attn.k_proj.weight": (4, width),
            start + "self_attn.v_proj.weight": (4, width),
            start + "self_attn.q_proj.bias": (8,),
            start + "self_attn.k_proj.bias": (4,),
            start + "self_attn.v_proj.bias": (4,),
            start + "self_attn.o_proj.weight": (8, 8),
            start + "self_attn.q_norm.weight": (4,),
            start + "self_attn.k_norm.weight": (4,),
            start + "mlp.gate_proj.weight": (12, 8),
            start + "mlp.up_proj.weight": (12, 8),
            start + "mlp.down_proj.weight": (8, 12),
            start + "input_layernorm.weight": (8,),
            start + "post_attention_layernorm.weight": (8,),
        }
    found = config.expected_tensors()
    assert {name: spec.shape for name, spec in found.items()} == expected
    # Of another width than the verifier, a draft has a head of its own.
    assert {name for name, spec in found.items() if not spec.required} == {"t2d"}


@pytest.mark.parametrize(
    ("changes", "required"),
    [
        ({}, False),
        ({"target_hidden_size": 8}, False),
        ({"target_hidden_size": 6}, True),
        ({"embed_requires_grad": True}, True),
    ],
)
def test_embeddings_are_required_when_the_verifiers_do_not_serve(changes: dict[str, Any], required: bool) -> None:
    config = Eagle3Config.from_json(make_config(**changes))
    assert config.expected_tensors()["embed_tokens.weight"] == TensorSpec((64, 8), required=required)


def test_llama_attention_bias_reaches_the_output_projection() -> None:
    tensors = Eagle3Config.from_json(make_config(layer={"attention_bias": True})).expected_tensors()
    assert tensors["layers.0.self_attn.o_proj.bias"].shape == (8,)
    assert "layers.0.self_attn.q_norm.weight" not in tensors


def test_what_others_ask_of_a_configuration() -> None:
    config = Eagle3Config.from_json(make_config(target_hidden_size=6))
    assert config.num_speculative_tokens == 3
    assert config.verifier.name_or_path == "somebody/verifier"
    assert config.aux_layer_ids == [2, 4, 5]
    assert config.verifier_hidden_size == 6
    assert package_version().count(".") >= 2


def test_reading_formats_needs_no_tensor_library() -> None:
    code = (
        "import sys; import speculators.formats.vllm, speculators.formats.checkpoint, speculators.models.eagle3.config;"
        "print([name for name in ('torch', 'transformers', 'numpy', 'safetensors') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=GOLDEN.parent.parent
    )
    assert run.stdout.strip() == "[]"
