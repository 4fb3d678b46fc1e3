"""What is read of a verifier's configuration, against transformers' own configuration classes and layers."""

import copy
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators.errors import FormatError, SpeculatorsError, UsageError
from speculators.formats.vllm import validate_directory
from speculators.models.family import VerifierShape
from speculators.models.mtp.block import LAYER_CLASSES, build_block
from speculators.models.mtp.config import MtpConfig
from speculators.models.mtp.draft import MtpDraft
from speculators.models.mtp.layer_config import ModelType, MtpLayerConfig
from speculators.models.mtp.styles import STYLES
from speculators.models.speculator import Speculator
from tests.models.drafts import verifier_shape
from tests.models.mtp.dense import LAYER, PREFIX
from tests.models.mtp.test_block import speculator_of
from tests.models.mtp.verifiers import RAW, shape_of

GOLDEN = Path(__file__).parents[2] / "golden" / "mtp"


def config_of(style: str) -> MtpConfig:
    return MtpDraft().resolve(shape_of(style))


def refusal(changes: dict[str, Any], style: str = "qwen3", drop: tuple[str, ...] = ()) -> str:
    """What is said about a written configuration with these changes to its layer block."""
    written = copy.deepcopy(config_of(style).to_json())
    written["transformer_layer_config"] |= changes
    for key in drop:
        del written["transformer_layer_config"][key]
    with pytest.raises(FormatError) as caught:
        MtpConfig.from_json(written)
    return str(caught.value)


def test_the_tables_are_about_the_same_model_types() -> None:
    assert set(get_args(ModelType)) == STYLES.keys() == LAYER_CLASSES.keys()


@pytest.mark.parametrize("kind", [kind for kind in STYLES if kind != "mimo"])
def test_defaults_are_those_of_transformers_configuration_classes(kind: str) -> None:
    config = LAYER_CLASSES[kind].config()
    for key, value in STYLES[kind].defaults.items():
        if key == "partial_rotary_factor":
            assert config.rope_parameters[key] == value
        else:
            assert getattr(config, key) == value, key
    kinds, every = getattr(config, "layer_types", None), STYLES[kind].full_attention_interval
    assert ("linear_attention" in (kinds or ())) == (every is not None)
    if every is not None:
        assert kinds == ["linear_attention" if (i + 1) % every else "full_attention" for i in range(len(kinds))]


@pytest.mark.parametrize("style", RAW)
def test_expected_tensors_are_those_of_the_layer_in_transformers_own_model(style: str) -> None:
    """The layer stands where it does in the verifier here, under the verifier's own configuration."""
    layer = RAW[style]
    raw = {key: value for key, value in layer.items() if key not in ("model_type", "quantization_config", "auto_map")}
    classes = LAYER_CLASSES[layer["model_type"]]
    module = classes.layer(classes.config(**raw), LAYER.get(style, 3))
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {
        name.removeprefix(PREFIX): spec.shape
        for name, spec in config_of(style).expected_tensors().items()
        if name.startswith(PREFIX)
    }
    around = {f"{name}.weight": (32,) for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
    assert found == expected | around | {"input_proj.weight": (32, 64)}


def test_a_hybrid_verifiers_block_is_full_attention() -> None:
    """Pitfall 37: the layer types of the verifier start with linear attention."""
    for style, index in (("qwen3_next", 3), ("qwen3_next_dense", 2), ("qwen3_5", 3)):
        layer = config_of(style).transformer_layer_config
        assert layer.layer_types[0] == "linear_attention"
        assert layer.layer_index == index
        assert "self_attn.q_proj.weight" in build_block(layer).state_dict()


def test_a_quantised_verifiers_block_is_not_quantised() -> None:
    """Pitfall 39: how the verifier is stored says nothing about the block's own tensors."""
    written = config_of("deepseek").to_json()["transformer_layer_config"]
    assert "quantization_config" not in written
    assert "auto_map" not in written
    assert written["num_nextn_predict_layers"] == 1


def test_flat_and_nested_rope_are_read_alike() -> None:
    """What is turned is what the config says; base and type of the rotation are the verifier's.

    Pitfall 4 and pitfall 5.
    """
    glm = config_of("glm").transformer_layer_config
    assert glm.rope_parameters == {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5}
    assert glm.model_extra.keys().isdisjoint({"rope_theta", "partial_rotary_factor"})
    qwen = config_of("qwen3_5").transformer_layer_config
    assert qwen.rope_parameters == {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    assert config_of("glm_plain").transformer_layer_config.rope_parameters["partial_rotary_factor"] == 0.5
    both = {**RAW["qwen3_next_dense"], "partial_rotary_factor": 0.25}
    assert MtpLayerConfig.model_validate(both).rope_parameters["partial_rotary_factor"] == 0.5
    assert LAYER_CLASSES["qwen3_next"].config(**both).rope_parameters["partial_rotary_factor"] == 0.5
    assert config_of("llama_bias").transformer_layer_config.rope_parameters["rope_type"] == "linear"


def test_windows_of_a_verifier_are_spelled_out() -> None:
    raw = {**RAW["qwen3"], "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    layer = MtpLayerConfig.model_validate(raw)
    assert layer.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert layer.layer_index == 1
    assert build_block(layer).self_attn.sliding_window is None
    all_of_them = [
        {**raw, "max_window_layers": 0},
        {**RAW["qwen3_moe"], "use_sliding_window": True, "sliding_window": 8},
    ]
    for windowed in all_of_them:
        layer = MtpLayerConfig.model_validate(windowed)
        assert (layer.layer_index, layer.window) == (3, 8)
        assert build_block(layer).self_attn.sliding_window == 8


def test_the_golden_folder_is_read_and_written_without_its_noise() -> None:
    raw = json.loads((GOLDEN / "config.json").read_text(encoding="utf-8"))
    written = MtpConfig.from_json(raw).to_json()
    layer = {
        key: value for key, value in raw["transformer_layer_config"].items() if key not in ("architectures", "dtype")
    }
    assert written["transformer_layer_config"] == layer
    assert written["num_nextn_predict_layers"] == 1


def test_a_text_part_and_a_shape_made_by_hand() -> None:
    wrapped = {"model_type": "qwen3_5", "architectures": ["X"], "text_config": RAW["qwen3_5"]}
    config = MtpDraft(num_speculative_tokens=2).resolve(VerifierShape.from_config_dict(wrapped, "org/x"))
    assert config.num_speculative_tokens == 2
    assert config.transformer_layer_config == config_of("qwen3_5").transformer_layer_config
    by_hand = MtpDraft().resolve(verifier_shape(model_type="qwen3")).transformer_layer_config
    assert (by_hand.num_hidden_layers, by_hand.head_dim, by_hand.intermediate_size) == (8, 8, 48)
    with pytest.raises(UsageError, match="'gemma3_text'; MTP blocks are known for llama, qwen2, mimo"):
        MtpDraft().resolve(verifier_shape(model_type="gemma3_text"))
    raw = {key: value for key, value in RAW["glm"].items() if key != "moe_intermediate_size"}
    with pytest.raises(FormatError, match="moe_intermediate_size is missing"):
        MtpDraft().resolve(verifier_shape(model_type="glm4_moe", raw=raw))


@pytest.mark.parametrize(
    ("style", "changes", "drop", "said"),
    [
        ("qwen3", {"model_type": "gemma2"}, (), "F035 layer-model-type.*'qwen3_next'"),
        ("qwen3", {}, ("hidden_size",), "hidden_size is missing"),
        ("qwen3", {}, ("head_dim",), "head_dim is missing, which a layer of type qwen3 needs"),
        ("deepseek", {}, ("q_lora_rank",), "q_lora_rank is missing"),
        ("deepseek", {}, ("topk_group",), "topk_group is missing"),
        ("qwen3_5_moe", {}, ("num_experts",), "num_experts is missing"),
        ("qwen3_next", {}, ("norm_topk_prob",), "norm_topk_prob is missing"),
        ("qwen3", {"hidden_size": -4}, (), "hidden_size is -4"),
        ("qwen3", {"hidden_size": 1 << 40}, (), "hidden_size is 1099511627776"),
        ("qwen3", {"hidden_act": "gelu"}, (), "hidden_act"),
        ("qwen3", {"use_cache": float("nan")}, (), "values that JSON can hold"),
        ("qwen3", {"num_key_value_heads": 3}, (), "no multiple of num_key_value_heads 3"),
        ("qwen3", {"head_dim": 7}, (), "7 dimensions of a head are rotated"),
        ("qwen3", {"rope_theta": 5.0}, (), "rope_theta is 5.0 but rope_parameters says 1000000"),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, (), "a rope_type of default"),
        ("qwen3", {"partial_rotary_factor": 0.5}, (), "rotate whole heads"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, (), "sliding_window is missing"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, (), "neither full_attention nor sliding_attention"),
        ("qwen3", {"layer_types": ["full_attention"]}, (), "layer_types has 1 entries; num_hidden_layers is 4"),
        ("qwen3_moe", {"use_sliding_window": True}, (), "sliding_window is missing"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, (), "num_experts_per_tok 7 exceeds the 6 experts"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, (), "norm_topk_prob is false"),
        ("qwen3_5_moe", {"num_experts": 0}, (), "num_experts is 0"),
        ("deepseek", {"n_group": 3}, (), "n_routed_experts 8 in n_group 3"),
        ("deepseek", {"topk_group": 1}, (), "topk_group 1 of n_group 4 leaves too few experts"),
        ("deepseek", {"scoring_func": "softmax"}, (), "scoring_func"),
        ("mimo", {"attention_bias": False}, (), "attention_bias is false; layers of type mimo have biases"),
        ("qwen2", {"mlp_bias": True}, (), "mlp_bias is true"),
        ("llama_bias", {"num_attention_heads": 6}, (), "hidden_size 32 is no multiple of num_attention_heads 6"),
    ],
)
def test_what_the_block_cannot_be_is_refused(
    style: str, changes: dict[str, Any], drop: tuple[str, ...], said: str
) -> None:
    message = refusal(changes, style, drop)
    assert re.search(said, message, re.DOTALL), message


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 70),
    st.sampled_from([1 << 40, 0.0, -1.5, 1e30, float("nan"), float("inf"), "silu", "", [], [2], {}, {"rope_type": 1}]),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(RAW)), st.data())
def test_a_changed_configuration_is_refused_or_builds(style: str, data: st.DataObject) -> None:
    """Either our error, or a block whose tensors are those that were announced."""
    raw = dict(RAW[style])
    for key in data.draw(st.lists(st.sampled_from([*sorted(raw), "layer_types", "mlp_bias"]), min_size=1, max_size=2)):
        if data.draw(st.booleans()):
            raw[key] = data.draw(VALUES)
        else:
            raw.pop(key, None)
    written = {**config_of(style).to_json(), "transformer_layer_config": raw}
    try:
        config = MtpConfig.from_json(written)
    except SpeculatorsError:
        return
    assert MtpConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    with torch.device("meta"):
        module = build_block(config.transformer_layer_config)
    expected = {name.removeprefix(PREFIX): spec.shape for name, spec in config.expected_tensors().items()}
    for name, tensor in module.state_dict().items():
        assert expected[name] == tuple(tensor.shape)


def test_the_offsets_of_experts_are_never_rounded(tmp_path: Path) -> None:
    speculator = speculator_of("deepseek")
    name = f"{PREFIX}mlp.gate.e_score_correction_bias"
    offsets = speculator.draft.state_dict()[name].clone()
    assert not torch.equal(offsets.bfloat16().float(), offsets)
    speculator.save_pretrained(tmp_path / "saved")
    assert [item.slug for item in validate_directory(tmp_path / "saved", {"mtp": MtpConfig}.get)] == ["not-served"]
    loaded = Speculator.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert loaded.config.dtype == "bfloat16"
    assert loaded.draft.dtype == torch.bfloat16
    assert torch.equal(loaded.draft.state_dict()[name], offsets)
    assert torch.equal(loaded.to("cpu", torch.float32).draft.state_dict()[name], offsets)


@pytest.mark.parametrize("style", ["qwen3_moe", "deepseek"])
def test_the_number_of_experts_is_read_under_the_name_of_newer_configurations(style: str) -> None:
    raw = dict(RAW[style])
    name = "n_routed_experts" if style == "deepseek" else "num_experts"
    raw["num_local_experts"] = raw.pop(name)
    raw.pop("num_experts", None)
    expected = RAW[style][name]
    assert getattr(MtpLayerConfig.model_validate(raw), name) == expected
