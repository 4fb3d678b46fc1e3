"""What vLLM reads from a directory of each family, and where that is not what the directory means."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators.errors import FormatError
from speculators.formats.vllm import describe_for_vllm, validate_directory
from speculators.formats.vllm_reading import INSTEAD
from speculators.formats.vllm_reading import SERVED as READ_BY_VLLM
from speculators.formats.vllm_traps import traps
from speculators.models import FAMILIES
from speculators.models.eagle3.config import Eagle3Config
from tests.formats.eagle3_directory import GOLDEN
from tests.formats.families import SERVED, config_json, faults_of, slugs_of, write_family


def reading(family: str, **options: Any) -> dict[str, Any]:
    return describe_for_vllm(FAMILIES[family].config.from_json(config_json(family, **options)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_directory_has_no_faults(family: str, tmp_path: Path) -> None:
    assert slugs_of(write_family(tmp_path / "draft", family)) == ([] if family in SERVED else ["not-served"])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_described_in_the_same_words(family: str) -> None:
    described = reading(family)
    assert described.keys() == reading("eagle3").keys()
    assert json.loads(json.dumps(described)) == described
    assert described["served"] is (family in SERVED)
    assert (described["method"] is None) is (family not in SERVED)
    assert (
        described["num_speculative_tokens"]
        == config_json(family)["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    )
    assert described["model"] == "org/tiny"
    assert described["differs"] == []
    assert (described["instead"] is None) is (family in SERVED)


def test_every_family_is_read_by_vllm_or_has_another_way() -> None:
    assert set(SERVED) == READ_BY_VLLM.keys()
    assert FAMILIES.keys() <= READ_BY_VLLM.keys() | INSTEAD.keys()
    assert not READ_BY_VLLM.keys() & INSTEAD.keys()


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("mtp", "checkpoint, under the names it has there, and serve that copy with method mtp"),
        ("eagle", "draft model of method eagle"),
        ("medusa", "draft model of method medusa"),
        ("mlp_speculator", "serve it with this library"),
    ],
)
def test_what_to_do_instead_is_said(family: str, words: str, tmp_path: Path) -> None:
    assert words in reading(family)["instead"]
    found = faults_of(write_family(tmp_path / "draft", family))
    assert [(fault.code, fault.level) for fault in found] == [("F052", "WARNING")]
    assert words in found[0].message


class TestReading:
    """Facts of vLLM 0.32's reader, type by type."""

    @pytest.mark.parametrize(
        ("family", "method", "architecture", "runner", "parallel"),
        [
            ("eagle3", "eagle3", "Eagle3LlamaForCausalLM", "V1 or V2", False),
            ("peagle", "eagle3", "PeagleLlamaForCausalLM", "V1", True),
            ("dflash", "dflash", "DFlashDraftModel", "V1 or V2", True),
            ("dflash2", "dflash", "DFlash2DraftModel", "V2", True),
            ("dspark", "dspark", "Qwen3DSparkModel", "V2", True),
        ],
    )
    def test_method_and_class(self, family: str, method: str, architecture: str, runner: str, parallel: bool) -> None:
        described = reading(family)
        assert (described["method"], described["architecture"]) == (method, architecture)
        assert (described["runner"], described["parallel_drafting"]) == (runner, parallel)

    @pytest.mark.parametrize("family", ["eagle3", "peagle"])
    def test_class_of_qwen3_layers(self, family: str) -> None:
        assert reading(family, layer_type="qwen3")["architecture"].endswith("Qwen3ForCausalLM")

    @pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark"])
    def test_ids_are_counted_from_the_embeddings_and_from_the_layers(self, family: str) -> None:
        """Pitfall 7: capture id i enters layer i, module id j leaves layer j."""
        described = reading(family, aux_layer_ids=[1, 4, 8])
        assert described["capture_layer_ids"] == [1, 4, 8]
        assert described["num_aux_features"] == 3
        module_ids = (described["dflash_config"] or described["draft"])["target_layer_ids"]
        assert module_ids == [0, 3, 7]

    @pytest.mark.parametrize("non_causal", [True, False])
    @pytest.mark.parametrize("family", ["dflash", "dflash2"])
    def test_one_flag_makes_all_layers_causal(self, family: str, non_causal: bool) -> None:
        """Pitfall 12."""
        described = reading(family, sliding_window_non_causal=non_causal, num_layers=3)
        assert described["dflash_config"]["causal"] is not non_causal
        assert described["causal_layers"] == [not non_causal] * 3
        assert described["mask_token_id"] == described["dflash_config"]["mask_token_id"] == 39

    def test_windows_make_layers_of_dspark_causal(self) -> None:
        types = ["sliding_attention", "full_attention"]
        described = reading("dspark", num_layers=2, layer_types=types, sliding_window=8)
        assert described["causal_layers"] == [True, False]

    def test_windows_in_some_layers_need_the_newer_runner(self) -> None:
        types = ["sliding_attention", "full_attention"]
        options: dict[str, Any] = {"num_layers": 2, "layer_types": types, "sliding_window": 8}
        assert reading("dflash", **options)["runner"] == "V2"
        assert reading("dflash", **options | {"layer_types": [types[0]] * 2})["runner"] == "V1 or V2"

    def test_dflash2_passes_on_its_convolutions_and_selector(self) -> None:
        written = config_json("dflash2")
        keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        assert {key: reading("dflash2")["dflash_config"][key] for key in keys} == {key: written[key] for key in keys}

    @pytest.mark.parametrize("from_anchor", [True, False])
    def test_dspark_reads_the_anchor_slot(self, from_anchor: bool) -> None:
        described = reading("dspark", sample_from_anchor=from_anchor)
        assert described["draft"]["sample_from_anchor"] is from_anchor
        assert described["draft"]["dspark_bonus_anchor"] is not from_anchor

    @pytest.mark.parametrize(
        ("architectures", "expected"),
        [
            (["Qwen3OmniDSparkModel"], "Qwen3OmniDSparkModel"),
            (["DSparkSpeculator"], "Qwen3DSparkModel"),
            (["Other", "Qwen3DSparkModel"], "Qwen3DSparkModel"),
        ],
    )
    def test_dspark_heeds_the_architectures_it_knows(self, architectures: list[str], expected: str) -> None:
        config = FAMILIES["dspark"].config.from_json(config_json("dspark") | {"architectures": architectures})
        assert describe_for_vllm(config)["architecture"] == expected


BLOCK: dict[str, Any] = {"num_layers": 2, "sliding_window": 8}
MIXED = BLOCK | {"layer_types": ["sliding_attention", "full_attention"]}
WINDOW = {"layer.layer_types": ["sliding_attention"], "layer.sliding_window": 4, "layer.use_sliding_window": True}
# family, options of a sound draft, keys of its config.json changed (... removes one), the one fault that there is then
TRAPS: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("two ways to norm", "eagle3", {}, {"fc_norm": True}, "F041"),
    ("chunk norms", "peagle", {"norm_before_fc": False}, {"fc_norm": True}, "F042"),
    ("normed output", "peagle", {}, {"norm_output": True}, "F043"),
    ("anchor", "dflash", {"sample_from_anchor": True}, {}, "F044"),
    ("anchor", "dflash2", {"sample_from_anchor": True}, {}, "F044"),
    ("mixed", "dflash", MIXED, {"sliding_window_non_causal": False}, "F045"),
    ("mixed", "dflash2", MIXED, {"sliding_window_non_causal": False}, "F045"),
    (
        "full layers of another writer",
        "dflash",
        {},
        {"sliding_window_non_causal": False, "transformers_version": "5.19.0"},
        "F045",
    ),
    (
        "windows that see ahead",
        "dspark",
        BLOCK | {"layer_types": ["sliding_attention"] * 2},
        {"sliding_window_non_causal": True},
        "F046",
    ),
    ("gated", "dspark", {"markov_head_type": "gated"}, {}, "F047"),
    ("rnn", "dspark", {"markov_head_type": "rnn"}, {}, "F047"),
    ("no anchor flag", "dspark", {}, {"sample_from_anchor": ...}, "F048"),
    ("mask beyond the rows", "peagle", {}, {"mask_token_id": 40}, "F051"),
    ("mask beyond the rows", "dflash", {}, {"mask_token_id": 40}, "F051"),
    ("mask beyond the rows", "dspark", {}, {"mask_token_id": 1000}, "F051"),
    ("llama window", "eagle3", {}, WINDOW, "F037"),
    ("llama window", "peagle", {"num_layers": 1}, WINDOW, "F037"),
    ("features not counted", "eagle3", {"aux_layer_ids": [1, 2, 3, 4]}, {"layer.num_aux_hidden_states": ...}, "F028"),
    ("features not counted", "peagle", {"aux_layer_ids": [1, 2]}, {"layer.num_aux_hidden_states": ...}, "F028"),
]


@pytest.mark.parametrize(("name", "family", "options", "changes", "code"), TRAPS)
def test_a_trap_is_named_and_is_the_only_fault(
    name: str, family: str, options: dict[str, Any], changes: dict[str, Any], code: str, tmp_path: Path
) -> None:
    """What an engine drops, or takes for something else (pitfall 9, pitfall 10, pitfall 12 and pitfall 20)."""
    found = faults_of(write_family(tmp_path / "draft", family, changes, **options))
    assert [fault.code for fault in found] == [code], found


@pytest.mark.parametrize(("family", "most"), [("dflash", 3), ("dflash2", 3), ("dspark", 4)])
def test_more_tokens_than_a_block_predicts_are_named(family: str, most: int, tmp_path: Path) -> None:
    """Pitfall 20: a block of 4 predicts 3 tokens, or 4 where the anchor's slot predicts one too."""
    block = config_json(family)["speculators_config"]
    for tokens, expected in ((most, []), (1, []), (most + 1, ["F050"])):
        changed = {"speculators_config": {**block, "proposal_methods": [{"speculative_tokens": tokens}]}}
        found = faults_of(write_family(tmp_path / f"{tokens}", family, changed))
        assert [fault.code for fault in found] == expected


def test_differences_are_part_of_the_description() -> None:
    described = reading("dflash", sample_from_anchor=True)
    assert [line.split(":")[0] for line in described["differs"]] == ["ERROR F044 anchor-sampling"]
    assert reading("dspark", markov_head_type="rnn")["differs"][0].startswith("ERROR F047 markov-head")


def test_a_file_is_read_as_it_stands_not_as_it_would_be_written() -> None:
    """Pitfall 10: vLLM's defaults stand for what an older file leaves out."""
    raw = config_json("dspark")
    del raw["sample_from_anchor"], raw["transformer_layer_config"]["layer_types"]
    config = FAMILIES["dspark"].config.from_json(raw)
    assert describe_for_vllm(config)["draft"]["sample_from_anchor"] is True
    described = describe_for_vllm(config, raw)
    assert described["draft"]["sample_from_anchor"] is False
    assert described["draft"]["dspark_bonus_anchor"] is True
    assert described["causal_layers"] == [False] * raw["transformer_layer_config"]["num_hidden_layers"]
    assert [line.split(":")[0] for line in described["differs"]] == ["ERROR F048 no-sample-from-anchor"]


def test_a_default_that_is_not_vllms_is_named_where_the_key_is_absent() -> None:
    class WithAnotherDefault(Eagle3Config):
        norm_output: bool = True

    raw = config_json("eagle3")
    assert list(traps(raw, WithAnotherDefault.from_json(raw))) == []
    del raw["norm_output"]
    found = list(traps(raw, WithAnotherDefault.from_json(raw)))
    assert [(fault.code, fault.level) for fault in found] == [("F055", "ERROR")]
    assert "norm_output is absent, which vLLM reads as False and this library as True" in found[0].message
    assert list(traps(raw, Eagle3Config.from_json(raw))) == []


def test_causal_blocks_without_windows_are_meant_here() -> None:
    """This library, like vLLM, lets the flag hold for every layer; only a mixture may have been meant otherwise."""
    assert reading("dflash", sliding_window_non_causal=False)["differs"] == []


def test_reduced_vocabulary_of_dflash2(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "draft", "dflash2", {"draft_vocab_size": 16})
    assert "F054" in [fault.code for fault in faults_of(directory)]


@pytest.mark.parametrize("family", ["eagle3", "peagle", "dflash", "dspark"])
class TestVocabulary:
    """Pitfall 31: a reduced vocabulary has a head and a map, a whole one no map."""

    def change(self, directory: Path, drop: str | None = None, add: dict[str, torch.Tensor] | None = None) -> None:
        file = directory / "model.safetensors"
        tensors = {name: tensor for name, tensor in load_file(file).items() if name != drop}
        save_file(tensors | (add or {}), file)

    def test_no_head(self, family: str, tmp_path: Path) -> None:
        directory = write_family(tmp_path / "draft", family)
        self.change(directory, drop="lm_head.weight")
        assert slugs_of(directory) == ["no-lm-head"]

    def test_no_map(self, family: str, tmp_path: Path) -> None:
        directory = write_family(tmp_path / "draft", family)
        self.change(directory, drop="d2t")
        assert slugs_of(directory) == ["no-d2t"]

    def test_a_map_of_everything(self, family: str, tmp_path: Path) -> None:
        directory = write_family(tmp_path / "draft", family, draft_vocab_size=None)
        assert slugs_of(directory) == []
        self.change(directory, add={"d2t": torch.zeros(40, dtype=torch.int64)})
        assert slugs_of(directory) == ["d2t-at-full-vocabulary"]

    def test_a_tensor_of_the_verifier(self, family: str, tmp_path: Path) -> None:
        directory = write_family(tmp_path / "draft", family)
        self.change(directory, add={"verifier_norm.weight": torch.rand(32)})
        assert slugs_of(directory) == ["unknown-tensor"]


class TestContext:
    @staticmethod
    def codes(tmp_path: Path, family: str, context: int) -> list[str]:
        shape = {"hidden_size": 32, "vocab_size": 40, "num_hidden_layers": 8, "max_position_embeddings": context}
        verifier = tmp_path / "verifier"
        verifier.mkdir()
        (verifier / "config.json").write_text(json.dumps(shape))
        block = config_json(family)["speculators_config"]
        block["verifier"]["name_or_path"] = str(verifier)
        directory = write_family(tmp_path / "draft", family, {"speculators_config": block})
        return [fault.code for fault in faults_of(directory)]

    @pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark"])
    def test_a_context_shorter_than_the_verifiers_is_named(self, family: str, tmp_path: Path) -> None:
        assert self.codes(tmp_path, family, 257) == ["F049"]

    @pytest.mark.parametrize(("family", "context"), [("dflash", 256), ("dspark", 100), ("eagle3", 1000)])
    def test_one_that_suffices_or_is_raised_is_not(self, family: str, context: int, tmp_path: Path) -> None:
        assert self.codes(tmp_path, family, context) == []


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("peagle", ["dtype-differs"]),
        ("dflash", ["dtype-differs"]),
        ("dflash2", ["dtype-differs"]),
        ("dspark", ["dtype-differs"]),
        ("mtp", ["not-served"]),
    ],
)
def test_golden_directories_have_only_warnings(family: str, expected: list[str]) -> None:
    """Most say float32 over bfloat16 tensors, as their writer left them."""
    assert slugs_of(GOLDEN / family) == expected


def test_a_type_that_no_family_has_is_an_error(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "draft", "dflash")
    assert "unsupported-type" in [f.slug for f in validate_directory(directory, lambda name: None)]
    with pytest.raises(FormatError, match="xpress"):
        FAMILIES["dflash"].config.from_json(config_json("dflash") | {"speculators_model_type": "xpress"})
