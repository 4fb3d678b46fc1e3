"""Every key of `speculative_config` and `additional_config`: types, ranges, errors, and what goes together."""

import dataclasses
import logging
from typing import Any

import pytest

from speculators.errors import EngineError
from speculators.runtime.additional import AdditionalConfig, TreeDraftingConfig
from speculators.runtime.config import METHODS, MISPLACED, OLD_MTP_METHODS, SpeculativeConfig
from speculators.runtime.engine_keywords import KEYWORDS, TAKEN, check_engine_keywords
from speculators.runtime.schema_coverage import schema_coverage

RATES = {"method": "eagle3", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
FLAG = ((1, "true", [], 0), "true or false")
TEXT = ((1, "", ["a"], True), "a non-empty string or null")
NULL_FLAG = (FLAG[0], "true or false or null")


def whole(least: int, most: int | None = None, *, null: bool = True) -> tuple[tuple[Any, ...], str]:
    above = () if most is None else (most + 1,)
    span = f"of at least {least}" if most is None else rf"in \[{least}, {most}\]"
    return (least - 1, *above, 1.5, "2", True, [2]), f"a whole number {span}{' or null' if null else ''}"


def number(least: float, most: float | None = None, *, null: bool = False) -> tuple[tuple[Any, ...], str]:
    above = () if most is None else (most + 0.01,)
    span = f"of at least {least}" if most is None else rf"in \[{least}, {most}\]"
    wrong = (least - 0.01, *above, "1", True, float("nan"), float("inf"))
    return wrong, f"a number {span}{' or null' if null else ''}"


# Of every key: values of a wrong type or out of range, and the words for what is allowed.
WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "method": ((1, "eagle4", "Eagle", ""), f"one of {', '.join(METHODS)} or null"),
    "model": TEXT,
    "num_speculative_tokens": whole(1, 128),
    "draft_sample_method": (("Greedy", None, 1), "one of greedy, probabilistic"),
    "revision": TEXT,
    "code_revision": TEXT,
    "max_model_len": whole(1),
    "parallel_drafting": NULL_FLAG,
    "use_heterogeneous_vocab": FLAG,
    "prompt_lookup_max": whole(1),
    "prompt_lookup_min": whole(1),
    "suffix_decoding_max_tree_depth": whole(1, null=False),
    "suffix_decoding_max_cached_requests": whole(0, null=False),
    "suffix_decoding_max_spec_factor": number(0),
    "suffix_decoding_min_token_prob": number(0, 1),
    "rejection_sample_method": (("exact", None, 1), "one of standard, synthetic, block"),
    "synthetic_acceptance_rates": (
        (0.5, [], [1.5], [0.5, -0.1], [0.5, 0.6], ["a"], [True]),
        r"a list of numbers in \[0, 1\] that do not increase, one a draft token or null",
    ),
    "synthetic_acceptance_length": number(1, null=True),
    "num_speculative_tokens_per_batch_size": (
        (3, [], [[1, 2]], [[0, 4, 2]], [[1, 0, 2]], [[1, 4, -1]], [[2, 4, 1]], [[1, 4, 2], [4, 8, 1]], [[1, 4.0, 1]]),
        r"a list of \[start, end, K\] with 1 <= start <= end and K >= 0, the first from 1 on or null",
    ),
    "enable_adaptive_verification": FLAG,
    "dspark_draft_topk": whole(1),
    "draft_tensor_parallel_size": whole(1),
    "quantization": TEXT,
    "moe_backend": TEXT,
    "attention_backend": TEXT,
    "kv_cache_dtype": TEXT,
    "draft_load_config": ((1, "auto"), r"an object \(a mapping\) or null"),
    "disable_padded_drafter_batch": FLAG,
    "index_share_for_mtp_iteration": NULL_FLAG,
    "enforce_eager": NULL_FLAG,
    "disable_eagle_block_drop": FLAG,
    "use_local_argmax_reduction": FLAG,
}
# Whether there is one is checked with the method, what is in it where layers are read (see test_extraction).
WITHOUT_RANGE = {"draft_model_config"}

# Of every key that is refused: a value of the right type, which values it runs with, and a word of the reason.
REFUSED: dict[str, tuple[Any, str, str]] = {
    "code_revision": ("main", "None", "never run"),
    "draft_tensor_parallel_size": (2, "None or 1", "one device"),
    "quantization": ("fp8", "None", "not quantised"),
    "moe_backend": ("triton", "None or 'auto'", "one implementation"),
    "attention_backend": ("FLASH_ATTN", "None or 'auto'", "one attention"),
    "kv_cache_dtype": ("fp8", "None or 'auto'", "cache of their own"),
    "draft_load_config": ({"load_format": "dummy"}, "None or {}", "safetensors"),
    "disable_padded_drafter_batch": (True, "False", "side by side"),
    "index_share_for_mtp_iteration": (True, "None or False", "no sparse attention"),
}

# Values other than the default that pass, with the method under which they do.
FINE: list[tuple[str, dict[str, Any]]] = [
    *[(method, {"method": method}) for method in METHODS if method != "extract_hidden_states"],
    ("ngram", {"prompt_lookup_min": 2, "prompt_lookup_max": 2}),
    ("suffix", {"suffix_decoding_max_cached_requests": 0, "suffix_decoding_min_token_prob": 1}),
    ("draft_model", {"use_heterogeneous_vocab": True, "parallel_drafting": True, "max_model_len": 100}),
    ("dspark", {"dspark_draft_topk": 4, "enable_adaptive_verification": True, "draft_sample_method": "probabilistic"}),
    ("eagle3", {"num_speculative_tokens_per_batch_size": [[5, 9, 0], [1, 4, 2]], "rejection_sample_method": "block"}),
    ("eagle3", {"draft_tensor_parallel_size": 1, "attention_backend": "auto", "kv_cache_dtype": "auto"}),
    ("eagle3", {"draft_load_config": {"load_format": "safetensors"}, "quantization": None}),
    ("eagle", {"enforce_eager": True, "disable_eagle_block_drop": True, "use_local_argmax_reduction": True}),
    ("mtp", {"index_share_for_mtp_iteration": False, "revision": "main", "model": "a/b"}),
]

# Keys that contradict each other or the method.
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"method": "eagle3", "prompt_lookup_max": 4}, "prompt_lookup_max is for method 'ngram', 'ngram_gpu', got .*=4"),
    ({"method": "ngram", "suffix_decoding_max_tree_depth": 9}, "suffix_decoding_max_tree_depth is for method 'suffix'"),
    ({"method": "eagle3", "use_heterogeneous_vocab": True}, "use_heterogeneous_vocab is for method 'draft_model'"),
    ({"method": "dflash", "dspark_draft_topk": 4}, "dspark_draft_topk is for method 'dspark'.*method='dflash'"),
    ({"method": "medusa", "parallel_drafting": True}, "parallel_drafting is for method 'eagle', 'eagle3'"),
    ({"method": "ngram", "draft_sample_method": "probabilistic"}, "draft_sample_method is for method "),
    ({"method": "ngram", "enable_adaptive_verification": True}, "enable_adaptive_verification is for method "),
    ({"method": "suffix", "num_speculative_tokens_per_batch_size": [[1, 4, 2]]}, "per_batch_size is for method "),
    ({"method": "medusa", "num_speculative_tokens_per_batch_size": [[1, 4, 2]]}, "per_batch_size is for method "),
    ({"method": "mtp", "index_share_for_mtp_iteration": True}, "no sparse attention"),
    ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, r"prompt_lookup_min=3 .* in \[1, 2\]"),
    (
        {"use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic"},
        "draft_sample_method='probabilistic' with use_heterogeneous_vocab: expected 'greedy'",
    ),
    (
        {"enable_adaptive_verification": True, "num_speculative_tokens_per_batch_size": [[1, 4, 2]]},
        "both decide how many drafts are verified; expected one of them",
    ),
    ({**RATES}, "with no rate: expected one of"),
    (
        {**RATES, "synthetic_acceptance_rates": [1.0, 0.5, 0.0], "synthetic_acceptance_length": 2.0},
        "with synthetic_acceptance_rates and synthetic_acceptance_length: expected one of",
    ),
    ({**RATES, "synthetic_acceptance_rates": [1.0, 0.5]}, "has 2 entries: expected 3"),
    ({**RATES, "synthetic_acceptance_length": 4.5}, r"synthetic_acceptance_length=4.5: expected a number in \[1, 4\]"),
    ({"synthetic_acceptance_length": 2.0}, "synthetic_acceptance_length=2.0 with rejection_sample_method='standard'"),
    (
        {"rejection_sample_method": "block", "synthetic_acceptance_rates": [0.5]},
        "rejection_sample_method='block': expected 'synthetic'",
    ),
]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_named_with_the_range(name: str) -> None:
    values, expected = WRONG[name]
    for value in values:
        with pytest.raises(EngineError, match=rf"speculative_config: {name}=.*expected {expected}$") as caught:
            SpeculativeConfig.from_dict({name: value})
        assert f"{name}={value!r}: " in str(caught.value)


def test_every_key_has_its_wrong_values() -> None:
    fields = {item.name for item in dataclasses.fields(SpeculativeConfig)}
    assert WRONG.keys() | WITHOUT_RANGE == fields
    rows = schema_coverage()
    assert REFUSED.keys() | MISPLACED.keys() == {name for name, row in rows.items() if row["coverage"] == "refused"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_says_why(name: str) -> None:
    value, runs_with, reason = REFUSED[name]
    with pytest.raises(EngineError) as caught:
        SpeculativeConfig.from_dict({name: value})
    message = str(caught.value)
    assert message.startswith(f"speculative_config: {name}={value!r} cannot be honoured by this engine: ")
    assert reason in message
    assert f"; it runs with {name}={runs_with}" in message


@pytest.mark.parametrize(("method", "keys"), FINE)
def test_values_that_pass(method: str, keys: dict[str, Any]) -> None:
    config = SpeculativeConfig.from_dict({**keys, "method": method})
    written = {name: getattr(config, name) for name in keys}
    if "num_speculative_tokens_per_batch_size" in written:
        keys = {**keys, "num_speculative_tokens_per_batch_size": ((1, 4, 2), (5, 9, 0))}
    assert written == keys


@pytest.mark.parametrize(("keys", "message"), TOGETHER)
def test_keys_that_contradict_each_other(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        SpeculativeConfig.from_dict(keys)


@pytest.mark.parametrize("name", MISPLACED)
def test_what_belongs_elsewhere_is_refused_with_the_place(name: str) -> None:
    with pytest.raises(EngineError) as caught:
        SpeculativeConfig.from_dict({name: 1})
    assert str(caught.value) == f"speculative_config: {name}=1: {MISPLACED[name]}"
    place = "draft_tensor_parallel_size" if name == "tensor_parallel_size" else "SamplingParams"
    assert place in MISPLACED[name] or name.startswith(("target_", "draft_"))
    assert SpeculativeConfig.from_dict({name: None}) == SpeculativeConfig()


def test_unknown_keys_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        EngineError, match=r"unknown key 'num_speculative_token'; did you mean num_speculative_tokens\?"
    ):
        SpeculativeConfig.from_dict({"num_speculative_token": 3})
    with pytest.raises(EngineError, match=r"unknown key 'zzz'$"):
        SpeculativeConfig.from_dict({"zzz": 3})
    with pytest.raises(EngineError, match=r"is \[\], expected an object"):
        SpeculativeConfig.from_dict([])


def test_dashes_are_underscores() -> None:
    assert SpeculativeConfig.from_dict({"num-speculative-tokens": 3}) == SpeculativeConfig(num_speculative_tokens=3)
    with pytest.raises(EngineError, match="there twice"):
        SpeculativeConfig.from_dict({"num-speculative-tokens": 3, "num_speculative_tokens": 3})


def test_both_ends_of_the_lookup_follow_from_one() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 5}
    ends = [{}, {"prompt_lookup_min": 2}, {"prompt_lookup_max": 4}, {"prompt_lookup_min": 2, "prompt_lookup_max": 4}]
    found = [SpeculativeConfig.from_dict({**given, **one}).lookup_range for one in ends]
    assert found == [(5, 5), (2, 2), (4, 4), (2, 4)]


@pytest.mark.parametrize("method", OLD_MTP_METHODS)
def test_old_names_of_native_blocks_become_one(method: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert SpeculativeConfig(method=method).method == "mtp"
    assert f"method '{method}' is an old name of 'mtp'" in caplog.text


def test_families_that_are_no_methods_name_the_one_that_serves_them() -> None:
    for family, method in (("peagle", "eagle3"), ("dflash2", "dflash")):
        with pytest.raises(EngineError, match=f"method='{family}': a {family} speculator is served with .*'{method}'"):
            SpeculativeConfig(method=family)
    with pytest.raises(EngineError, match=r"method='eagel3': did you mean eagle3\?"):
        SpeculativeConfig(method="eagel3")


ADDITIONAL: list[tuple[str, tuple[Any, ...], str]] = [
    ("draft_window_size", *whole(1)),
    ("batch_size_hysteresis", *whole(0, null=False)),
    ("tree_drafting", (1, [], "on", True), r"an object \(a mapping\) or null"),
    ("tree_drafting.top_k", *whole(1, 64, null=False)),
    ("tree_drafting.depth", *whole(1, 128, null=False)),
    ("tree_drafting.total_token", *whole(1, 1024, null=False)),
    ("rejection_sampler_config", (1, [], "on"), r"an object \(a mapping\)"),
    ("rejection_sampler_config.enable_block_verify", *FLAG),
    ("rejection_sampler_config.enable_entropy_verify", *FLAG),
    ("rejection_sampler_config.posterior_threshold", (0, 1.1, -1, "1", True, None), r"a number in \(0, 1\]"),
    ("rejection_sampler_config.posterior_alpha", *number(0)),
    ("dynamic_spec_config", (1, [], "dspark"), r"an object \(a mapping\)"),
    ("dynamic_spec_config.method", ("eagle3", 1, ""), "one of dspark, dflash or null"),
    ("dynamic_spec_config.method_params", (1, [2]), r"an object \(a mapping\)"),
    ("dynamic_spec_config.method_params.initial_verify_budget_per_req", *whole(1, null=False)),
    ("dynamic_spec_config.method_params.budget_update_interval", *whole(1, null=False)),
    ("dynamic_spec_config.method_params.budget_threshold", *number(0, 1)),
    ("dynamic_spec_config.method_params.min_verify_tokens", *whole(1, 128, null=False)),
]


def nested(path: str, value: object) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


@pytest.mark.parametrize(("path", "values", "expected"), ADDITIONAL)
def test_additional_values_are_named_with_the_range(path: str, values: tuple[Any, ...], expected: str) -> None:
    *parents, name = path.split(".")
    where = ".".join(["additional_config", *parents])
    for value in values:
        with pytest.raises(EngineError, match=f"{where}: {name}=.*expected {expected}$") as caught:
            AdditionalConfig.from_dict(nested(path, value))
        assert f"{name}={value!r}: " in str(caught.value)


def test_additional_keys_and_defaults() -> None:
    config = AdditionalConfig.from_dict({"dynamic-spec-config": {"method": "dspark", "method_params": None}})
    params = config.dynamic_spec_config.method_params
    values = (params.initial_verify_budget_per_req, params.budget_update_interval)
    assert (*values, params.budget_threshold, params.min_verify_tokens) == (5, 16, 0.3, 1)
    rule = config.rejection_sampler_config
    assert (rule.lossy, rule.posterior_threshold, rule.posterior_alpha) == (False, 0.95, 0.4)
    assert config.tree_drafting is None
    assert AdditionalConfig.from_dict({"tree_drafting": {}}).tree_drafting == TreeDraftingConfig(10, 7, 60)
    with pytest.raises(EngineError, match="additional_config: unknown key 'draft_window'; did you mean draft_window_s"):
        AdditionalConfig.from_dict({"draft_window": 3})
    with pytest.raises(EngineError, match=r"rejection_sampler_config: unknown key 'posterior_beta'; did you mean post"):
        AdditionalConfig.from_dict({"rejection_sampler_config": {"posterior_beta": 1}})
    paths = {name.removeprefix("additional_config.") for name in schema_coverage() if name.startswith("additional")}
    assert paths == {path for path, _, _ in ADDITIONAL}


BLOCK = {"rejection_sampler_config": {"enable_block_verify": True}}
ENTROPY = {"rejection_sampler_config": {"enable_entropy_verify": True}}
TREE = {"tree_drafting": {"depth": 4}}
CONFIDENT = {"dynamic_spec_config": {"method": "dflash", "method_params": {"min_verify_tokens": 4}}}


@pytest.mark.parametrize(
    ("keys", "speculation", "message"),
    [
        ({"draft_window_size": 9}, None, "its keys are about speculation, and there is none"),
        (BLOCK, {"method": "eagle3", "num_speculative_tokens": 2}, "num_speculative_tokens=2: expected at least 3"),
        (
            BLOCK,
            {**RATES, "synthetic_acceptance_length": 2},
            "rejection_sample_method='synthetic'; expected 'standard'",
        ),
        (
            ENTROPY,
            {"method": "eagle3", "rejection_sample_method": "block"},
            "rejection_sample_method='block'; expected",
        ),
        (CONFIDENT, {"method": "dspark"}, "method='dflash' with speculative_config's method 'dspark': expected the sa"),
        (CONFIDENT, {"method": "dflash", "num_speculative_tokens": 3}, r"min_verify_tokens=4: .* in \[1, 3\]"),
        (CONFIDENT, {"method": "dflash", "enable_adaptive_verification": True}, "enable_adaptive_verification both"),
        (
            CONFIDENT,
            {"method": "dflash", "num_speculative_tokens_per_batch_size": [[1, 2, 3]]},
            "num_speculative_tokens_per_batch_size both",
        ),
        (
            {"draft_window_size": 9},
            {"method": "eagle"},
            "draft_window_size=9 with method 'eagle': expected a method of",
        ),
        (TREE, {"method": "ngram"}, "got method 'ngram': expected a draft of method eagle or eagle3 that makes each"),
        (TREE, {"method": "mtp"}, "got method 'mtp': expected a draft of method eagle or eagle3"),
        (TREE, {"method": "eagle3", "parallel_drafting": True}, "got method 'eagle3' and parallel_drafting: expected"),
        (
            TREE,
            {"method": "eagle3", "draft_sample_method": "probabilistic"},
            "tree_drafting with speculative_config's draft_sample_method='probabilistic': a tree has the likeliest",
        ),
        (
            TREE,
            {"method": "eagle", "num_speculative_tokens_per_batch_size": [[1, 2, 3]]},
            r"num_speculative_tokens_per_batch_size=\(\(1, 2, 3\),\): a tree has the same levels at every batch size",
        ),
        (
            TREE,
            {"method": "eagle3", "enable_adaptive_verification": True},
            "enable_adaptive_verification=True: a tree is verified whole; leave one of them out",
        ),
        (
            TREE,
            {"method": "eagle3", "rejection_sample_method": "block"},
            "rejection_sample_method='block': siblings are tried by the standard rule",
        ),
        (TREE | BLOCK, {"method": "eagle3"}, "tree_drafting with rejection_sampler_config: its rules accept chains"),
        (TREE | CONFIDENT, {"method": "eagle3"}, "tree_drafting with dynamic_spec_config: a tree is verified whole"),
        (TREE, None, "its keys are about speculation, and there is none"),
    ],
)
def test_additional_keys_go_with_the_speculation(
    keys: dict[str, Any], speculation: dict[str, Any] | None, message: str
) -> None:
    config = None if speculation is None else SpeculativeConfig.from_dict(speculation)
    with pytest.raises(EngineError, match=message):
        AdditionalConfig.from_dict(keys).check_against(config)


def test_parameters_without_what_they_are_of_are_refused() -> None:
    with pytest.raises(EngineError, match=r"method_params=.* without method"):
        AdditionalConfig.from_dict({"dynamic_spec_config": {"method_params": {"min_verify_tokens": 2}}})
    with pytest.raises(EngineError, match=r"posterior_alpha=0.5 without enable_entropy_verify"):
        AdditionalConfig.from_dict({"rejection_sampler_config": {"posterior_alpha": 0.5}})
    with pytest.raises(EngineError, match=r"tree_drafting: total_token=5 with depth=7: expected at least as many"):
        AdditionalConfig.from_dict({"tree_drafting": {"total_token": 5}})


def test_a_window_does_nothing_for_native_blocks_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        AdditionalConfig(draft_window_size=9).check_against(SpeculativeConfig(method="mtp"))
    assert "draft_window_size=9 does nothing under method 'mtp'" in caplog.text


def test_every_key_of_the_schema_has_one_coverage() -> None:
    rows = schema_coverage()
    assert {row["coverage"] for row in rows.values()} == {"effect", "neutral", "refused"}
    assert all(set(row) == {"coverage", "reason"} and row["reason"] for row in rows.values())
    neutral = {name for name, row in rows.items() if row["coverage"] == "neutral"}
    assert neutral == {"enforce_eager", "disable_eagle_block_drop", "use_local_argmax_reduction"}
    assert {item.name for item in dataclasses.fields(SpeculativeConfig)} <= rows.keys()


def test_engine_keywords_are_honoured_or_refused() -> None:
    assert not KEYWORDS.keys() & TAKEN
    check_engine_keywords({"tensor_parallel_size": 1, "compilation_config": {"cudagraph_mode": "FULL"}})
    with pytest.raises(
        EngineError, match=r"compilation_config=.*: it has 'pass_config'; expected a whole number, or an"
    ):
        check_engine_keywords({"compilation_config": {"pass_config": {}}})
    with pytest.raises(EngineError, match=r"enforce_eager=1: expected true or false"):
        check_engine_keywords({"enforce_eager": 1})
    with pytest.raises(EngineError, match=r"unknown key 'enforce_eagre'; did you mean enforce_eager\?"):
        check_engine_keywords({"enforce_eagre": True})
