"""From a name and a configuration to a plan: method, depth, what is locked, and what is refused by name."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from speculators import LLM, SamplingParams
from speculators.errors import EngineError, FormatError
from speculators.formats.checkpoint import read_headers
from speculators.runtime.config import SpeculativeConfig
from speculators.runtime.infer import Plan, infer
from speculators.runtime.recognise import method_of_tensors, recognise
from tests.models.contract import contract_of
from tests.models.drafts import random_speculator

VERIFIER = "org/verifier"
PLAIN = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def planned(**keys: Any) -> Plan:
    return infer(VERIFIER, SpeculativeConfig.from_dict(keys))


def config_folder(path: Path, **keys: Any) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    return str(path)


def speculator_folder(path: Path, family: str, **options: Any) -> str:
    random_speculator(family, **options).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Speculators under names that say nothing, or something else."""
    root = tmp_path_factory.mktemp("speculators")
    families = ("eagle3", "peagle", "dflash", "dflash2", "dspark", "mtp", "eagle", "medusa", "mlp_speculator")
    return {
        family: speculator_folder(root / f"my-dspark-eagle-{place}", family, **contract_of(family).variants["plain"])
        for place, family in enumerate(families)
    }


# What vLLM calls each family.
METHODS = {
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "dflash": "dflash",
    "dflash2": "dflash",
    "dspark": "dspark",
    "mtp": "mtp",
    "eagle": "eagle",
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
}
PARALLEL = {"peagle", "dflash", "dflash2", "dspark"}


@pytest.mark.parametrize("family", METHODS)
def test_a_speculators_type_gives_the_method_whatever_its_name(folders: dict[str, str], family: str) -> None:
    served = infer(folders[family], None)
    drafting = planned(model=folders[family])
    assert served.config is not None
    assert drafting.config is not None
    assert (served.verifier, drafting.verifier) == ("org/tiny", VERIFIER)
    assert served.method == drafting.method == METHODS[family]
    assert served.config.parallel_drafting is drafting.config.parallel_drafting is (family in PARALLEL)
    proposal = json.loads((Path(folders[family]) / "config.json").read_text())["speculators_config"]["proposal_methods"]
    assert served.num_speculative_tokens == drafting.num_speculative_tokens == proposal[0]["speculative_tokens"]


def test_keys_of_the_user_win_but_for_method_and_model(
    folders: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    path = folders["eagle3"]
    keys = {"num_speculative_tokens": 1, "draft_sample_method": "probabilistic", "method": "mtp", "model": "other"}
    with caplog.at_level(logging.WARNING):
        plan = infer(path, SpeculativeConfig.from_dict(keys))
    assert plan.config == SpeculativeConfig(
        method="eagle3",
        model=path,
        num_speculative_tokens=1,
        draft_sample_method="probabilistic",
        parallel_drafting=False,
    )
    resets = [record.getMessage() for record in caplog.records]
    assert f"method='mtp' is reset to 'eagle3', which the speculator {path} that is served fixes" in resets[0]
    assert f"model='other' is reset to '{path}', which the speculator {path} that is served fixes" in resets[1]
    assert len(resets) == 2
    caplog.clear()
    infer(path, SpeculativeConfig(method="eagle3", model=path))
    assert caplog.records == []


def test_a_draft_that_is_another_methods_is_refused_with_both(folders: dict[str, str]) -> None:
    """A head of EAGLE-3 under the name of EAGLE, for one, would draft garbage."""
    for family, method in (("eagle3", "eagle"), ("eagle3", "draft_model"), ("dflash", "dspark")):
        words = f"method='{method}', but {folders[family]} is a speculator for method '{METHODS[family]}'"
        with pytest.raises(EngineError, match=words):
            planned(method=method, model=folders[family])


def test_tensors_of_eagle3_are_refused_under_the_name_of_eagle(folders: dict[str, str], tmp_path: Path) -> None:
    """Whatever config.json says, and from the headers of the files alone: the numbers behind them are gone."""
    for family, other in (("eagle3", "eagle"), ("eagle", "eagle3")):
        said, tensors = tmp_path / f"says-{other}", Path(folders[family], "model.safetensors")
        said.mkdir()
        shutil.copy(Path(folders[other], "config.json"), said)
        width = read_headers(folders[family])["fc.weight"].shape
        shutil.copy(tensors, said)
        raw = Path(config_folder(tmp_path / f"raw-{other}", **PLAIN, draft_vocab_size=None))
        shutil.copy(tensors, raw)
        words = f"method='{other}', but the tensors of .* are those of a draft for method '{family}': fc.weight is "
        for keys in ({"model": str(said)}, {"model": str(raw), "method": other, "num_speculative_tokens": 3}):
            with pytest.raises(EngineError, match=words + re.escape(str(list(width)))):
                planned(**keys)
        assert planned(model=str(raw), method=family, num_speculative_tokens=3).method == family


def test_tensors_tell_eagle3_from_eagle_and_leave_others_alone() -> None:
    query, older = "layers.0.self_attn.q_proj.weight", "midlayer.self_attn.q_proj.weight"
    for shapes, method in (
        ({"fc.weight": [64, 192], query: [32, 128]}, "eagle3"),
        ({"fc.weight": [64, 192], older: [32, 128]}, "eagle3"),
        ({"model.fc.weight": [64, 128], f"model.{query}": [32, 64]}, "eagle"),
        ({"fc.weight": [64, 128], query: [32, 64], "hidden_norm.weight": [64]}, None),
        ({"fc.weight": [64, 192], query: [32, 64], "hidden_norm.weight": [64]}, None),
        ({query: [32, 64]}, None),
        ({}, None),
    ):
        assert method_of_tensors(shapes) == method


def test_a_depth_above_what_a_step_drafts_is_refused(folders: dict[str, str]) -> None:
    for family in ("dflash", "dspark", "medusa", "mlp_speculator"):
        most = infer(folders[family], None).speculator.config.max_speculative_tokens
        assert planned(model=folders[family], num_speculative_tokens=most).num_speculative_tokens == most
        with pytest.raises(
            EngineError, match=f"={most + 1}, but a step of {folders[family]} drafts at most {most} tok"
        ):
            planned(model=folders[family], num_speculative_tokens=most + 1)
    assert planned(model=folders["eagle3"], num_speculative_tokens=16).num_speculative_tokens == 16


def test_parallel_drafting_needs_a_mask_token(
    folders: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        EngineError, match=f"parallel_drafting=True, but the config.json of {folders['eagle3']} names no"
    ):
        planned(model=folders["eagle3"], parallel_drafting=True)
    with caplog.at_level(logging.WARNING):
        plan = planned(model=folders["peagle"], parallel_drafting=False)
    assert plan.config is not None
    assert plan.config.parallel_drafting is True
    assert "parallel_drafting=False is reset to True" in caplog.text
    plain = config_folder(tmp_path / "plain", **PLAIN)
    with pytest.raises(EngineError, match="names no mask token"):
        planned(model=plain, parallel_drafting=True, num_speculative_tokens=4)
    for key in ("pard_token", "mask_token_id", "ptd_token_id"):
        draft = config_folder(tmp_path / key, **PLAIN, **{key: 7})
        parallel = planned(model=draft, parallel_drafting=True, num_speculative_tokens=4).config
        assert parallel is not None
        assert (parallel.method, parallel.parallel_drafting) == ("draft_model", True)


# What a file says of itself, the method it is for and the tokens a step drafts.
RECOGNISED: list[tuple[dict[str, Any], str, int | None]] = [
    (PLAIN, "draft_model", None),
    ({"model_type": "gpt2"}, "draft_model", None),
    ({"architectures": ["GPT2LMHeadModel"]}, "draft_model", None),
    ({"medusa_num_heads": 4, "medusa_num_layers": 1}, "medusa", 4),
    ({"model_type": "medusa", "num_heads": 5}, "medusa", 5),
    ({"model_type": "mlp_speculator", "n_predict": 3}, "mlp_speculator", 3),
    ({"architectures": ["MLPSpeculatorPreTrainedModel"], "n_predict": 5}, "mlp_speculator", 5),
    ({"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"]}, "eagle", None),
    ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3", None),
    ({**PLAIN, "draft_vocab_size": 32000}, "eagle3", None),
    ({"architectures": ["PEagleLlamaForCausalLM"]}, "eagle3", None),
    ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16}, "dflash", 15),
    ({"architectures": ["Qwen3DSparkModel"], "block_size": 7, "sample_from_anchor": True}, "dspark", 7),
    ({"architectures": ["Qwen3DSparkModel"], "dspark_block_size": 7}, "dspark", 7),
    ({"model_type": "deepseek_mtp", "num_nextn_predict_layers": 1}, "mtp", 1),
    ({"architectures": ["Qwen3NextMTP"], "mtp_num_hidden_layers": 2}, "mtp", 2),
    ({"model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"]}, "mtp", 1),
    ({"model_type": "gemma4_unified_assistant"}, "mtp", 1),
]


@pytest.mark.parametrize(("config", "method", "depth"), RECOGNISED)
def test_files_say_what_they_draft_with(config: dict[str, Any], method: str, depth: int | None) -> None:
    kind = recognise(config, "somewhere")
    assert (kind.method, kind.family, kind.depth) == (method, None, depth)


def test_what_nothing_is_known_of_is_refused() -> None:
    for config in ({}, {"model_type": "bert", "architectures": ["BertForMaskedLM"]}):
        with pytest.raises(EngineError, match=r"no method can be told from the config.json of somewhere"):
            recognise(config, "somewhere")
    with pytest.raises(EngineError, match="family 'hass' is not served here"):
        recognise({"speculators_model_type": "hass", "speculators_config": {}}, "somewhere")


def test_the_method_follows_from_what_the_model_is(tmp_path: Path) -> None:
    plain = config_folder(tmp_path / "eagle-dflash-plain", **PLAIN)
    assert planned(model=plain, num_speculative_tokens=2).method == "draft_model"
    assert planned(model=plain, num_speculative_tokens=2, method="draft_model").method == "draft_model"
    assert planned(model="package.module.Class", num_speculative_tokens=2).method == "custom_class"
    for name in ("ngram", "[ngram]"):
        plan = planned(model=name, num_speculative_tokens=2, prompt_lookup_max=3)
        assert plan.config is not None
        assert (plan.method, plan.config.model, plan.config.lookup_range) == ("ngram", None, (3, 3))
    assistant = config_folder(tmp_path / "assistant", model_type="gemma4_assistant")
    assert planned(model=assistant, num_speculative_tokens=1).method == "mtp"
    with pytest.raises(EngineError, match=r"method='draft_model', but .* is for method 'mtp' \(.*'gemma4_assistant'\)"):
        planned(method="draft_model", model=assistant, num_speculative_tokens=1)


def test_a_depth_comes_from_somewhere(tmp_path: Path) -> None:
    assert planned(method="suffix").num_speculative_tokens == 24
    assert planned(method="suffix", suffix_decoding_max_tree_depth=9).num_speculative_tokens == 9
    assert planned(method="suffix", num_speculative_tokens=16).num_speculative_tokens == 16
    medusa = config_folder(tmp_path / "heads", medusa_num_heads=3, medusa_num_layers=1)
    assert planned(model=medusa).num_speculative_tokens == 3
    plain = config_folder(tmp_path / "plain", **PLAIN)
    for keys in ({"method": "ngram"}, {"model": "a.b"}, {"model": plain}, {"method": "eagle", "model": plain}):
        with pytest.raises(EngineError, match=r"num_speculative_tokens is missing, and .* does not say how many"):
            planned(**keys)
    for keys in ({}, {"num_speculative_tokens": 3}, {"method": "eagle3", "num_speculative_tokens": 3}):
        with pytest.raises(EngineError, match="give `model`, the speculator directory or hub id to draft with"):
            planned(**keys)


def test_native_blocks_are_the_verifiers_own(tmp_path: Path) -> None:
    one = config_folder(tmp_path / "one", **PLAIN, num_nextn_predict_layers=1)
    two = config_folder(tmp_path / "two", model_type="qwen", text_config={"mtp_num_hidden_layers": 2})
    none = config_folder(tmp_path / "none", **PLAIN, num_nextn_predict_layers=0)
    plan = infer(one, SpeculativeConfig(method="deepseek_mtp"))
    assert plan.config is not None
    assert (plan.verifier, plan.method, plan.config.model, plan.num_speculative_tokens) == (one, "mtp", one, 1)
    assert infer(one, SpeculativeConfig(method="mtp", num_speculative_tokens=3)).num_speculative_tokens == 3
    assert infer(one, SpeculativeConfig(method="mtp", model=one)).num_speculative_tokens == 1
    assert infer(two, SpeculativeConfig(method="mtp", num_speculative_tokens=4)).num_speculative_tokens == 4
    with pytest.raises(EngineError, match=r"num_speculative_tokens=3, but the 2 blocks of .* draft in turn"):
        infer(two, SpeculativeConfig(method="mtp", num_speculative_tokens=3))
    with pytest.raises(EngineError, match=r"names none; give a speculator .* 'eagle3', .* with method 'draft_model'"):
        infer(none, SpeculativeConfig(method="mtp"))


def test_methods_that_read_no_model_take_none() -> None:
    with pytest.raises(EngineError, match="method 'suffix' reads no model, got model='org/draft'"):
        planned(method="suffix", model="org/draft")
    with pytest.raises(EngineError, match="method 'custom_class' with model=None: expected the dotted path of a class"):
        planned(method="custom_class", num_speculative_tokens=2)
    with pytest.raises(FormatError, match=r"config\.json is missing"):
        planned(method="draft_model", model="/no/such/folder", num_speculative_tokens=2)


def test_what_is_not_served_is_refused_before_anything_loads(folders: dict[str, str], tmp_path: Path) -> None:
    medusa = config_folder(tmp_path / "heads", medusa_num_heads=3)
    with pytest.raises(EngineError, match=r"is no speculator directory: its config.json has no speculators_config"):
        LLM(VERIFIER, speculative_config={"model": medusa})


def test_nothing_is_drafted_beyond_the_drafts_length(
    tiny_speculator: Path, tiny_verifier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, params = list(range(5, 15)), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain = LLM(str(tiny_verifier), dtype="float32").generate(prompt, params, use_tqdm=False)[0].outputs[0]
    llm = LLM(str(tiny_speculator), dtype="float32", speculative_config={"max_model_len": 18})
    drafted = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert drafted.token_ids == plain.token_ids
    # Three drafts after each of 11 to 15 tokens at the most, and of 11 at least.
    assert llm.stats is not None
    assert 3 <= llm.stats.num_draft_tokens <= 15
    assert caplog.text.count("goes on without speculation") == 1
    with pytest.raises(EngineError, match=r"max_model_len=600: expected a whole number in \[1, 512\]"):
        LLM(str(tiny_speculator), dtype="float32", speculative_config={"max_model_len": 600})


def test_a_tokenizer_beside_a_speculator_is_told_to_be_the_verifiers(
    tiny_speculator: Path, tiny_verifier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LLM(str(tiny_speculator), dtype="float32", tokenizer="/elsewhere")
    assert f"tokenizer='/elsewhere' is reset to '{tiny_verifier}'" in caplog.text
