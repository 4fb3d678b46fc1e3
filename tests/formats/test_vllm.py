"""The validator: every fault of a directory, each with its code, and nothing said about a sound one."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from speculators.errors import FormatError
from speculators.formats.config import SpeculatorConfig
from speculators.formats.faults import FAULTS, Fault
from speculators.formats.vllm import describe_for_vllm, validate_directory
from speculators.models.eagle3.config import Eagle3Config
from tests.formats.eagle3_directory import CONFIG, GOLDEN, KEPT, make_config, make_tensors, write_directory
from tests.formats.test_config import JSON_VALUES, paths, place

Tensors = dict[str, torch.Tensor]


def family_config(name: str) -> type[SpeculatorConfig] | None:
    return {"eagle3": Eagle3Config}.get(name)


def faults_of(directory: Path) -> list[Fault]:
    return validate_directory(directory, family_config)


def slugs_of(directory: Path) -> list[str]:
    return [fault.slug for fault in faults_of(directory)]


def without(config: dict[str, Any], *path: str | int) -> dict[str, Any]:
    changed: Any = json.loads(json.dumps(config))
    owner = changed
    for key in path[:-1]:
        owner = owner[key]
    del owner[path[-1]]
    return dict(changed)


def test_a_sound_directory_has_no_faults(tmp_path: Path) -> None:
    assert faults_of(write_directory(tmp_path)) == []


def test_golden_directory_has_only_warnings() -> None:
    """It says float32 over bfloat16 tensors, and llama layers with a window: both are as its writer left them."""
    found = faults_of(GOLDEN / "eagle3")
    assert [fault.slug for fault in found] == ["sliding-window-ignored", "dtype-differs"]
    assert {fault.level for fault in found} == {"WARNING"}


METHODS = ("speculators_config", "proposal_methods")
CONFIG_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("model_type of transformers", make_config(model_type="llama"), "model-type"),
    ("no proposal methods", without(CONFIG, *METHODS), "no-speculative-tokens"),
    ("empty proposal methods", make_config(block={"proposal_methods": []}), "no-speculative-tokens"),
    ("no speculative tokens", without(CONFIG, *METHODS, 0, "speculative_tokens"), "no-speculative-tokens"),
    ("null tokens", place(CONFIG, (*METHODS, 0, "speculative_tokens"), None), "no-speculative-tokens"),
    ("zero tokens", place(CONFIG, (*METHODS, 0, "speculative_tokens"), 0), "no-speculative-tokens"),
    ("no verifier", without(CONFIG, "speculators_config", "verifier"), "no-verifier"),
    ("no verifier name", without(CONFIG, "speculators_config", "verifier", "name_or_path"), "no-verifier"),
    ("null verifier name", place(CONFIG, ("speculators_config", "verifier", "name_or_path"), None), "no-verifier"),
    ("empty verifier name", place(CONFIG, ("speculators_config", "verifier", "name_or_path"), ""), "no-verifier"),
    ("no type", without(CONFIG, "speculators_model_type"), "no-speculators-model-type"),
    ("empty type", make_config(speculators_model_type=""), "no-speculators-model-type"),
    ("null type", make_config(speculators_model_type=None), "no-speculators-model-type"),
    ("layers are a list", make_config(transformer_layer_config=[1]), "layer-config"),
    ("no layers", without(CONFIG, "transformer_layer_config"), "layer-config"),
    ("no block", without(CONFIG, "speculators_config"), "no-speculators-config"),
    (
        "unsupported type",
        make_config(speculators_model_type="xpress", block={"algorithm": "xpress"}),
        "unsupported-type",
    ),
    ("unsupported layers", make_config(layer={"model_type": "gemma"}), "layer-model-type"),
    (
        "second proposal",
        make_config(block={"proposal_methods": [{"speculative_tokens": 3}, {"speculative_tokens": 5}]}),
        "second-proposal",
    ),
    (
        "lossy acceptance",
        make_config(block={"proposal_methods": [{"speculative_tokens": 3, "verifier_accept_k": 4}]}),
        "acceptance-not-read",
    ),
    (
        "tolerance",
        make_config(block={"proposal_methods": [{"speculative_tokens": 3, "accept_tolerance": 0.1}]}),
        "acceptance-not-read",
    ),
    ("misspelt key", make_config(fc_nrom=True), "unknown-key"),
    ("missing key", without(CONFIG, "norm_before_residual"), "missing-key"),
    ("wrong type", make_config(draft_vocab_size="16"), "bad-value"),
    ("ids out of order", make_config(eagle_aux_hidden_state_layer_ids=[4, 2, 5]), "layer-ids"),
    ("no ids", make_config(eagle_aux_hidden_state_layer_ids=None), "no-layer-ids"),
    ("contradiction", make_config(block={"algorithm": "hass"}), "contradiction"),
    (
        "relative verifier",
        place(CONFIG, ("speculators_config", "verifier", "name_or_path"), "./v"),
        "verifier-bare-path",
    ),
    (
        "absent verifier",
        place(CONFIG, ("speculators_config", "verifier", "name_or_path"), "/no/v"),
        "verifier-not-found",
    ),
    ("dtype", make_config(dtype="bfloat16"), "dtype-differs"),
]


@pytest.mark.parametrize(("name", "config", "slug"), CONFIG_FAULTS, ids=[case[0] for case in CONFIG_FAULTS])
def test_a_fault_of_the_configuration_is_named_and_is_the_only_one(
    tmp_path: Path, name: str, config: dict[str, Any], slug: str
) -> None:
    assert slugs_of(write_directory(tmp_path, config)) == [slug]


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    tensors = make_tensors()
    return tensors | {name: change(tensors[name])}


def dropped(*names: str) -> Tensors:
    return {name: tensor for name, tensor in make_tensors().items() if name not in names}


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    spoilt = tensor.clone()
    spoilt.flatten()[-1] = value
    return spoilt


ABSOLUTE = torch.tensor(KEPT)
TENSOR_FAULTS: list[tuple[str, Tensors, str]] = [
    ("absolute ids", make_tensors() | {"d2t": ABSOLUTE}, "d2t-absolute"),
    ("absolute ids without a mask", dropped("t2d") | {"d2t": ABSOLUTE}, "d2t-absolute"),
    ("map never filled", dropped("t2d") | {"d2t": torch.zeros(16, dtype=torch.int64)}, "d2t-all-zero"),
    ("map against mask", changed("t2d", torch.logical_not), "d2t-invalid"),
    ("map out of range", dropped("t2d") | {"d2t": torch.full((16,), 60)}, "d2t-invalid"),
    ("no head", dropped("lm_head.weight"), "no-lm-head"),
    ("no map", dropped("d2t", "t2d"), "no-d2t"),
    ("missing norm", dropped("norm.weight"), "missing-tensor"),
    ("unknown tensor", make_tensors() | {"verifier_lm_head.weight": torch.rand(64, 8)}, "unknown-tensor"),
    ("fc of four layers", make_tensors() | {"fc.weight": torch.rand(8, 32)}, "fc-width"),
    ("wrong shape", make_tensors() | {"lm_head.weight": torch.rand(8, 16)}, "tensor-shape"),
    ("wrong dtype", changed("d2t", lambda tensor: tensor.to(torch.int16)), "tensor-dtype"),
    ("narrow integers", changed("d2t", lambda tensor: tensor.to(torch.int32)), "integer-width"),
    ("narrow absolute ids", make_tensors() | {"d2t": ABSOLUTE.int()}, "integer-width d2t-absolute"),
    ("norms of one", changed("norm.weight", torch.ones_like), "norms-all-ones"),
    ("nan", changed("fc.weight", lambda tensor: with_value(tensor, float("nan"))), "not-finite"),
    ("infinity", changed("lm_head.weight", lambda tensor: with_value(tensor, float("-inf"))), "not-finite"),
    ("zero", changed("layers.0.mlp.up_proj.weight", torch.zeros_like), "all-zero"),
]


@pytest.mark.parametrize(("name", "tensors", "slug"), TENSOR_FAULTS, ids=[case[0] for case in TENSOR_FAULTS])
def test_a_fault_of_the_tensors_is_named_and_is_the_only_one(
    tmp_path: Path, name: str, tensors: Tensors, slug: str
) -> None:
    assert slugs_of(write_directory(tmp_path, tensors=tensors)) == slug.split()


def test_a_full_vocabulary_needs_neither_head_nor_map(tmp_path: Path) -> None:
    config = make_config(draft_vocab_size=64)
    assert slugs_of(write_directory(tmp_path, config, dropped("d2t", "t2d", "lm_head.weight"))) == []
    tensors = dropped("t2d", "lm_head.weight") | {"d2t": torch.zeros(64, dtype=torch.int64)}
    assert slugs_of(write_directory(tmp_path, config, tensors)) == ["d2t-at-full-vocabulary"]


def test_an_empty_map_is_right_when_the_mask_says_so(tmp_path: Path) -> None:
    tensors = make_tensors() | {"d2t": torch.zeros(16, dtype=torch.int64), "t2d": torch.arange(64) < 16}
    assert slugs_of(write_directory(tmp_path, tensors=tensors)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_judged_in_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    tensors = make_tensors(dtype)
    assert slugs_of(write_directory(tmp_path / "sound", make_config(dtype=name), tensors)) == []
    tensors["norm.weight"] = torch.ones(8, dtype=dtype)
    tensors["fc.weight"] = with_value(tensors["fc.weight"], float("nan"))
    tensors["lm_head.weight"] = with_value(tensors["lm_head.weight"], 60000.0)
    found = slugs_of(write_directory(tmp_path / "spoilt", make_config(dtype=name), tensors))
    assert sorted(found) == ["norms-all-ones", "not-finite"]


def test_llama_with_other_than_three_features_must_say_so(tmp_path: Path) -> None:
    """Pitfall 9: vLLM's llama draft counts three features whatever the list says."""
    tensors = make_tensors() | {"fc.weight": torch.rand(8, 32)}
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 5]}
    assert slugs_of(write_directory(tmp_path, make_config(**ids), tensors)) == ["num-aux-hidden-states"]
    said = make_config(**ids, layer={"num_aux_hidden_states": 4})
    assert slugs_of(write_directory(tmp_path, said, tensors)) == []
    wrong = make_config(**ids, layer={"num_aux_hidden_states": 3})
    assert slugs_of(write_directory(tmp_path, wrong, tensors)) == ["num-aux-hidden-states"]
    assert slugs_of(write_directory(tmp_path, Eagle3Config.from_json(make_config(**ids)).to_json(), tensors)) == []


def test_windows_of_llama_layers_are_not_honoured(tmp_path: Path) -> None:
    window = {"layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": True}
    assert slugs_of(write_directory(tmp_path, make_config(layer=window))) == ["sliding-window-ignored"]


class TestFiles:
    def test_truncated_weights(self, tmp_path: Path) -> None:
        file = write_directory(tmp_path) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        found = faults_of(tmp_path)
        assert [fault.slug for fault in found] == ["broken-weights"]
        assert "model.safetensors: truncated" in found[0].message

    def test_no_weights(self, tmp_path: Path) -> None:
        (write_directory(tmp_path) / "model.safetensors").unlink()
        assert slugs_of(tmp_path) == ["no-weights"]

    def test_no_config(self, tmp_path: Path) -> None:
        (write_directory(tmp_path) / "config.json").unlink()
        assert slugs_of(tmp_path) == ["no-config"]

    def test_nothing_at_all(self, tmp_path: Path) -> None:
        assert slugs_of(tmp_path / "nowhere") == ["no-config", "no-weights"]

    def test_stray_weights(self, tmp_path: Path) -> None:
        save_file({"x": torch.ones(1)}, write_directory(tmp_path) / "optimizer.safetensors")
        assert slugs_of(tmp_path) == ["stray-weights"]

    def test_shards(self, tmp_path: Path) -> None:
        (write_directory(tmp_path) / "model.safetensors").unlink()
        tensors = make_tensors()
        names = sorted(tensors)
        for file, part in (("a.safetensors", names[:8]), ("b.safetensors", names[8:])):
            save_file({name: tensors[name] for name in part}, tmp_path / file)
        index = {name: "a.safetensors" if name in names[:8] else "b.safetensors" for name in names}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        assert slugs_of(tmp_path) == []
        (tmp_path / "b.safetensors").write_bytes(b"\0" * 4)
        assert slugs_of(tmp_path) == ["broken-weights"]
        save_file({"other": torch.rand(1)}, tmp_path / "b.safetensors")
        assert "broken-index" in slugs_of(tmp_path)
        (tmp_path / "b.safetensors").unlink()
        assert slugs_of(tmp_path) == ["broken-index"]


class TestVerifier:
    @pytest.fixture
    def verifier(self, tmp_path: Path) -> Path:
        (tmp_path / "verifier").mkdir()
        return tmp_path / "verifier"

    @staticmethod
    def check(verifier: Path, directory: Path, **verifier_config: Any) -> list[Fault]:
        shape = {"num_hidden_layers": 8, "hidden_size": 8, "vocab_size": 64} | verifier_config
        (verifier / "config.json").write_text(json.dumps({"text_config": shape}))
        block = {"verifier": {"name_or_path": str(verifier), "architectures": []}}
        return faults_of(write_directory(directory, make_config(block=block)))

    def test_fits(self, verifier: Path, tmp_path: Path) -> None:
        assert self.check(verifier, tmp_path / "draft") == []

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"num_hidden_layers": 4}, "layer ids [5] exceed the verifier's 4 layers"),
            ({"hidden_size": 16}, "hidden_size is 16"),
            ({"vocab_size": 65}, "vocab_size is 65"),
        ],
    )
    def test_does_not_fit(self, verifier: Path, tmp_path: Path, change: dict[str, int], words: str) -> None:
        """Pitfall 9 and pitfall 62: an id beyond the last layer is silently never captured."""
        found = self.check(verifier, tmp_path / "draft", **change)
        assert [fault.slug for fault in found] == ["verifier-mismatch"]
        assert words in found[0].message

    def test_is_unreadable(self, verifier: Path, tmp_path: Path) -> None:
        self.check(verifier, tmp_path / "draft")
        (verifier / "config.json").write_text("{")
        assert slugs_of(tmp_path / "draft") == ["verifier-mismatch"]

    def test_is_a_relative_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        write_directory(tmp_path / "draft")
        assert slugs_of(tmp_path / "draft") == []
        (tmp_path / "somebody" / "verifier").mkdir(parents=True)
        assert slugs_of(tmp_path / "draft") == ["verifier-bare-path"]


def test_all_faults_of_a_directory_are_named_together(tmp_path: Path) -> None:
    config = make_config(
        model_type="llama",
        fc_nrom=True,
        eagle_aux_hidden_state_layer_ids=[5, 4, 2, 1],
        dtype="float16",
        block={
            "algorithm": "other",
            "proposal_methods": [{"speculative_tokens": -1}, {"speculative_tokens": 2}],
            "verifier": {"name_or_path": "", "architectures": "x"},
        },
        layer={"hiden_size": 3, "rope_parameters": {"rope_type": "default"}, "layer_types": []},
    )
    tensors = make_tensors() | {"d2t": ABSOLUTE, "verifier_norm.weight": torch.ones(8)}
    del tensors["lm_head.weight"], tensors["norm.weight"]
    tensors["layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    directory = write_directory(tmp_path, config, tensors)
    save_file({"x": torch.ones(1)}, directory / "stray.safetensors")
    expected = {
        "model-type",
        "unknown-key",
        "layer-ids",
        "no-speculative-tokens",
        "no-verifier",
        "bad-value",
        "contradiction",
        "second-proposal",
        "num-aux-hidden-states",
        "fc-width",
        "no-lm-head",
        "missing-tensor",
        "unknown-tensor",
        "d2t-absolute",
        "dtype-differs",
        "not-finite",
        "norms-all-ones",
        "stray-weights",
    }
    found = faults_of(directory)
    assert {fault.slug for fault in found} == expected
    assert len(found) == len(set(found))
    for fault in found:
        assert (fault.code, fault.level) == FAULTS[fault.slug]
        assert "\n" not in str(fault)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(sorted(paths(CONFIG), key=str)), JSON_VALUES), min_size=1, max_size=4))
@example(
    [((*METHODS, 0, "speculative_tokens"), 0), ((*METHODS, 0, "proposal_type"), 1), (METHODS, [{"x": 1}, {"y": 1}])]
)
def test_any_configuration_is_judged_without_a_crash(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[tuple[Any, ...], Any]]
) -> None:
    """Whatever the library refuses has an error here."""
    config = make_config()
    for path, value in changes:
        with contextlib.suppress(KeyError, IndexError, TypeError):
            config = place(config, path, value)
    found = faults_of(write_directory(tmp_path_factory.mktemp("any"), config))
    try:
        Eagle3Config.from_json(json.loads(json.dumps(config, allow_nan=False)))
    except (ValueError, FormatError):
        assert any(fault.level == "ERROR" for fault in found)


def test_what_vllm_reads_is_described() -> None:
    described = describe_for_vllm(Eagle3Config.from_json(make_config(target_hidden_size=6)))
    assert {key: described[key] for key in described if key not in ("draft", "layers")} == {
        "served": True,
        "method": "eagle3",
        "parallel_drafting": False,
        "num_speculative_tokens": 3,
        "model": "somebody/verifier",
        "architecture": "Eagle3LlamaForCausalLM",
        "runner": "V1 or V2",
        "capture_layer_ids": [2, 4, 5],
        "num_aux_features": 3,
        "mask_token_id": None,
        "causal_layers": [True],
        "dflash_config": None,
        "differs": [],
        "instead": None,
    }
    assert described["draft"] == {
        "draft_vocab_size": 16,
        "target_hidden_size": 6,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }
    assert described["layers"] == CONFIG["transformer_layer_config"]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("ids", [[1], [1, 2, 3], [1, 2, 3, 4]])
def test_what_we_write_has_the_features_that_vllm_counts(kind: str, ids: list[int]) -> None:
    config = Eagle3Config.from_json(make_config(eagle_aux_hidden_state_layer_ids=ids, layer={"model_type": kind}))
    assert describe_for_vllm(config)["num_aux_features"] == len(ids)


def test_validation_loads_no_tensor_library() -> None:
    code = (
        "import sys; from speculators.formats.vllm import validate_directory;"
        "from speculators.models.eagle3.config import Eagle3Config;"
        f"print(len(validate_directory({str(GOLDEN / 'eagle3')!r}, lambda name: Eagle3Config)),"
        "[name for name in ('torch', 'transformers', 'numpy', 'safetensors') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=GOLDEN.parent.parent
    )
    assert run.stdout.strip() == "2 []"
