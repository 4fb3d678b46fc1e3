"""Speculators of the EAGLE kin in other layouts: what is written, what is refused, and the way back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculators.convert.export import export, planned_export
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.run import convert
from speculators.errors import FormatError, SpeculatorsError, UsageError
from speculators.formats.checkpoint import read_config
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.formats.vocab import DraftVocab
from speculators.models import FAMILIES
from speculators.models.family import VerifierShape
from speculators.models.speculator import Speculator
from tests.convert import layouts_eagle as layouts
from tests.convert.foreign import ForeignCheckpoint
from tests.convert.test_from_eagle_kin import converted
from tests.tiny_models import make_verifier

FOLLOWS = {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False}
# checkpoint -> a layout that can say it
BOTH_WAYS: list[tuple[Callable[[], ForeignCheckpoint], str]] = [
    (layouts.safeailab_eagle3, "safeailab-eagle3"),
    (layouts.safeailab_eagle3_llama3, "safeailab-eagle3"),
    (layouts.nebius, "safeailab-eagle3"),
    (layouts.specforge, "sglang"),
    (layouts.specforge_eagle31, "sglang"),
    (layouts.specforge_other_width, "sglang"),
    (layouts.angelslim, "sglang"),
    (layouts.flags_alone, "sglang"),
    (layouts.modelopt, "modelopt-eagle3"),
    (layouts.modelopt_float8, "modelopt-eagle3"),
    (layouts.specforge, "modelopt-eagle3"),
    (layouts.safeailab_eagle, "safeailab-eagle"),
    (layouts.hass, "safeailab-eagle"),
    (layouts.vllm_eagle, "vllm-eagle"),
]
# Those whose own files already have the layout's names and dtypes.
SAME_FILE = [
    (layouts.safeailab_eagle3, "safeailab-eagle3"),
    (layouts.specforge, "sglang"),
    (layouts.specforge_eagle31, "sglang"),
    (layouts.specforge_other_width, "sglang"),
    (layouts.modelopt, "modelopt-eagle3"),
    (layouts.safeailab_eagle, "safeailab-eagle"),
    (layouts.hass, "safeailab-eagle"),
    (layouts.vllm_eagle, "vllm-eagle"),
]
# Keys that mean nothing to the network, or are written in another of their forms.
UNCOMPARED = {"transformers_version", "rope_parameters", "rope_scaling", "norm_output", "pad_token_id", "eagle_config"}


def name_of(item: str | Callable[[], ForeignCheckpoint]) -> str:
    return item if isinstance(item, str) else item.__name__


def weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize(("make", "layout"), BOTH_WAYS, ids=name_of)
def test_in_out_in_is_the_identity(
    make: Callable[[], ForeignCheckpoint], layout: str, tiny_verifier: Path, tmp_path: Path
) -> None:
    case = make()
    ours = converted(case, tmp_path, tiny_verifier).directory
    foreign = export(ours, layout, tmp_path / "theirs")
    options = ConvertOptions(**case.options)
    again = convert(foreign, tmp_path / "again", verifier=ConversionVerifier(str(tiny_verifier)), options=options)
    assert_same(weights(again.directory), weights(ours))
    assert read_config(again.directory) == read_config(ours)


@pytest.mark.parametrize(("make", "layout"), SAME_FILE, ids=name_of)
def test_out_is_what_came_in(
    make: Callable[[], ForeignCheckpoint], layout: str, tiny_verifier: Path, tmp_path: Path
) -> None:
    case = make()
    foreign = export(converted(case, tmp_path, tiny_verifier).directory, layout, tmp_path / "theirs")
    assert_same(weights(foreign), case.tensors)
    said = read_config(foreign)
    for key in case.config.keys() - UNCOMPARED:
        assert said[key] == case.config[key], key
    ids = "eagle_aux_hidden_state_layer_ids"
    assert said.get("eagle_config", {}).get(ids) == case.config.get("eagle_config", {}).get(ids)


def make_ours(verifier: Path, directory: Path, family: str, **choices: Any) -> Path:
    """An untrained speculator of ours in float32 with 96 draft tokens, where its family has a vocabulary."""
    shape = VerifierShape.from_config_dict(read_config(verifier), str(verifier))
    size = choices.pop("draft_vocab_size", layouts.DRAFT_VOCAB)
    vocab = None
    if family != "eagle":
        choices["draft_vocab_size"] = size
        if size is not None:
            vocab = DraftVocab.from_counts(torch.arange(shape.vocab_size) % 7, size)
    config = FAMILIES[family].draft(**choices).resolve(shape)
    speculator = Speculator.create(config, load_verifier_weights(verifier), vocab, seed=3)
    speculator.save_pretrained(directory, dtype=torch.float32)
    return directory


@pytest.mark.parametrize("layout", ["safeailab-eagle3", "sglang", "modelopt-eagle3"])
@pytest.mark.parametrize("size", [layouts.DRAFT_VOCAB, None])
def test_a_speculator_of_ours_comes_back_as_it_was(
    layout: str, size: int | None, tiny_verifier: Path, tmp_path: Path
) -> None:
    ours = make_ours(tiny_verifier, tmp_path / "ours", "eagle3", **FOLLOWS, draft_vocab_size=size)
    back = convert(
        export(ours, layout, tmp_path / "theirs"),
        tmp_path / "back",
        verifier=ConversionVerifier(str(tiny_verifier)),
    ).directory
    assert_same(weights(back), weights(ours))
    assert read_config(back) == read_config(ours)


def test_sglang_reads_ids_of_outputs_under_midlayer(tiny_verifier: Path, tmp_path: Path) -> None:
    ours = make_ours(tiny_verifier, tmp_path / "ours", "eagle3", **FOLLOWS, aux_layer_ids=[1, 4, 7])
    written = export(ours, "sglang", tmp_path / "theirs")
    config = json.loads((written / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6]
    assert (config["rope_theta"], config["rope_scaling"]) == (10000.0, None)
    assert not any(key.startswith(("speculators", "transformer_layer")) for key in config)
    theirs = layouts.specforge().tensors
    assert weights(written).keys() == theirs.keys()


def test_modelopt_has_one_map_and_several_layers(tiny_verifier: Path, tmp_path: Path) -> None:
    ours = make_ours(tiny_verifier, tmp_path / "ours", "eagle3", **FOLLOWS, num_layers=2)
    plan = planned_export(ours, "modelopt-eagle3")
    assert dict(plan.dropped) == {"t2d": "the layout has d2t alone, from which it follows"}
    assert sorted([*plan.used, *plan.dropped]) == sorted(weights(ours))
    theirs = {*layouts.modelopt().tensors, "embed_tokens.weight"}
    assert weights(export(ours, "modelopt-eagle3", tmp_path / "theirs")).keys() == theirs


def test_vllm_gets_no_head_and_no_first_norm(tiny_verifier: Path, tmp_path: Path) -> None:
    ours = make_ours(tiny_verifier, tmp_path / "ours", "eagle", bias=False, qkv_bias=True, num_layers=2)
    written = export(ours, "vllm-eagle", tmp_path / "theirs")
    names = set(weights(written))
    assert names - {"embed_tokens.weight"} == {
        *layouts.vllm_eagle().tensors,
        *(f"layers.{index}.self_attn.{name}_proj.bias" for index in (0, 1) for name in "qkv"),
    }
    config = json.loads((written / "config.json").read_text(encoding="utf-8"))
    assert (config["architectures"], config["bias"], config["qkv_bias"]) == (["LlamaForCausalLM"], False, True)
    assert "attention_bias" not in config


def test_embeddings_that_are_left_to_the_verifier_are_written_where_the_layout_holds_them(
    tiny_verifier: Path, tmp_path: Path
) -> None:
    ours, name = make_ours(tiny_verifier, tmp_path / "ours", "eagle", bias=True), "embed_tokens.weight"
    assert name not in weights(ours)
    assert dict(planned_export(ours, "safeailab-eagle").derived) == {name: f"{tiny_verifier}'s"}
    written = weights(export(ours, "safeailab-eagle", tmp_path / "theirs"))
    assert torch.equal(written.pop(name), load_file(tiny_verifier / "model.safetensors")[f"model.{name}"])
    assert_same(written, weights(ours))
    other = make_verifier(tmp_path / "other", hidden_size=32)
    with pytest.raises(FormatError, match=rf"{name} of {other} is \[384, 32\]; the draft's is \[384, 64\]"):
        export(ours, "safeailab-eagle", tmp_path / "no", verifier=str(other))
    with pytest.raises(SpeculatorsError, match="it is not there"):
        export(ours, "safeailab-eagle", tmp_path / "no", verifier=str(tmp_path / "nowhere"))
    assert not (tmp_path / "no").exists()


# family and choices, layout, what the refusal has to say
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("eagle3", {"norm_before_residual": True}, "sglang", "norm_before_residual"),
    ("eagle3", {"norm_before_residual": True}, "safeailab-eagle3", "norm_before_residual"),
    ("eagle3", {"norm_before_residual": True}, "modelopt-eagle3", "train with norm_before_residual=false"),
    ("eagle3", {"norm_before_fc": True}, "sglang", "norm_before_fc"),
    ("eagle3", {"norm_output": True}, "sglang", "norm_output without fc_norm"),
    ("eagle3", {"norm_output": True}, "modelopt-eagle3", "norm_output"),
    ("eagle3", {"fc_norm": True}, "safeailab-eagle3", "fc_norm"),
    ("eagle3", {"fc_norm": True}, "modelopt-eagle3", "fc_norm"),
    ("eagle3", {"layer_type": "qwen3"}, "sglang", "qwen3 layers"),
    ("eagle3", {"layer_type": "qwen3", "sliding_window": 8}, "sglang", "sliding windows"),
    ("eagle3", {"num_layers": 2}, "sglang", "one layer"),
    ("eagle3", {"aux_layer_ids": [1, 2, 3, 4]}, "sglang", "three layers"),
    ("eagle3", {"aux_layer_ids": [0, 2, 3]}, "sglang", "no layer's output"),
    ("eagle3", {"attention_bias": True}, "sglang", "no biases"),
    ("eagle3", {"aux_layer_ids": [1, 4, 5]}, "safeailab-eagle3", r"reads depths \[1, 4, 5\]"),
    (
        "eagle3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}},
        "safeailab-eagle3",
        "rotations of type",
    ),
    ("peagle", {}, "sglang", "a layout of EAGLE-3; this is a peagle"),
    ("eagle3", {}, "vllm-eagle", "a layout of EAGLE-1; this is a eagle3"),
    ("eagle", {"bias": True}, "vllm-eagle", "bias of fc"),
    ("eagle", {"embed_layernorm": True}, "vllm-eagle", "embed_layernorm"),
    ("eagle", {"post_embedding_layernorm": True}, "safeailab-eagle", "post_embedding_layernorm"),
]


@pytest.mark.parametrize(("family", "choices", "layout", "words"), REFUSED)
def test_what_a_layout_cannot_say_is_refused_by_name(
    family: str, choices: dict[str, Any], layout: str, words: str, tiny_verifier: Path, tmp_path: Path
) -> None:
    given = {**FOLLOWS, **choices} if family == "eagle3" else choices
    ours = make_ours(tiny_verifier, tmp_path / "ours", family, **given)
    with pytest.raises(FormatError, match=words):
        export(ours, layout, tmp_path / "theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_an_unknown_layout_and_a_damaged_speculator_are_refused(tiny_verifier: Path, tmp_path: Path) -> None:
    ours = make_ours(tiny_verifier, tmp_path / "ours", "eagle3", **FOLLOWS)
    with pytest.raises(UsageError, match="expected one of safeailab-eagle3"):
        export(ours, "eagle4", tmp_path / "theirs")
    with pytest.raises(FormatError, match="is there already"):
        export(ours, "sglang", ours)
    config = read_config(ours)
    (ours / "config.json").write_text(json.dumps(config | {"norm_before_fc": True}), encoding="utf-8")
    with pytest.raises(FormatError, match=r"input_norm\.weight is missing"):
        export(ours, "sglang", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
