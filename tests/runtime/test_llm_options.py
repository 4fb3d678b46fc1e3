"""Rules, depths and windows as a user asks for them of `LLM`: each does something, and none changes greedy answers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators import LLM, SamplingParams
from speculators.errors import EngineError, SpeculatorsError
from speculators.runtime.adaptive import AdaptiveVerification
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.schema_coverage import schema_coverage
from speculators.runtime.step_costs import CONTEXT_VARIABLE
from tests.runtime.methods import BY_NAME, served
from tests.runtime.methods import sampled_p as law_of
from tests.runtime.served import SMALL, Directories
from tests.tiny_models import make_speculator, make_verifier

PROMPTS = [[5, 9, 5, 9, 5, 9], [30], [11, 12, 13, 14], [7, 8, 9, 7, 8, 9], [40] * 6]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


def llm_of(made: Directories, family: str = "eagle3", depth: int = 3, **keys: Any) -> LLM:
    config = {"model": made.speculator(family), "num_speculative_tokens": depth, **keys.pop("config", {})}
    return LLM(made.verifier(), dtype="float32", speculative_config=config, max_model_len=96, **keys)


def told(llm: LLM, params: SamplingParams | list[SamplingParams] = GREEDY) -> list[list[int]]:
    outputs: list[RequestOutput] = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(made: Directories) -> list[list[int]]:
    return told(LLM(made.verifier(), dtype="float32", max_model_len=96))


def drawn(seed: int = 0, temperature: float = 0.7) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True, seed=seed + place)
        for place in range(len(PROMPTS))
    ]


def counts(llm: LLM) -> tuple[int, int, int]:
    assert llm.stats is not None
    return llm.stats.num_drafts, llm.stats.num_draft_tokens, llm.stats.num_accepted_tokens


def test_block_verification_draws_other_answers_of_the_same_law(made: Directories, plain: list[list[int]]) -> None:
    block = llm_of(made, config={"rejection_sample_method": "block", "draft_sample_method": "probabilistic"})
    assert told(block) == plain
    standard = llm_of(made, config={"draft_sample_method": "probabilistic"})
    assert told(block, drawn()) != told(standard, drawn())
    p = law_of(made, BY_NAME["eagle3"], 300, config={"rejection_sample_method": "block"})
    assert p is not None
    assert p > 1e-3


def test_drawn_drafts_are_others_than_the_likeliest(made: Directories) -> None:
    greedy, probabilistic = (
        llm_of(made, config={"draft_sample_method": method}) for method in ("greedy", "probabilistic")
    )
    assert told(greedy, drawn()) != told(probabilistic, drawn())


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, max_tokens=14, ignore_eos=True, seed=3)])
def test_synthetic_rates_decide_what_is_accepted(
    params: SamplingParams, made: Directories, caplog: pytest.LogCaptureFixture
) -> None:
    synthetic = {"rejection_sample_method": "synthetic"}
    always = llm_of(made, config={**synthetic, "synthetic_acceptance_rates": [1, 1, 1]})
    assert "outputs are meaningless" in caplog.text
    never = llm_of(made, config={**synthetic, "synthetic_acceptance_rates": [0, 0, 0]})
    told(always, params)
    told(never, params)
    assert counts(always)[1] == counts(always)[2] > 0
    assert counts(never)[1] > counts(never)[2] == 0


def test_a_synthetic_length_is_the_mean_of_a_step(made: Directories) -> None:
    llm = llm_of(made, config={"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.4})
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    llm.generate([prompt for prompt in PROMPTS for _ in range(4)], params, use_tqdm=False)
    drafts, _, accepted = counts(llm)
    # A step accepts one draft, and with probability 0.4 two.
    assert 1 + accepted / drafts == pytest.approx(2.4, abs=4 * (0.24 / drafts) ** 0.5)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"enable_entropy_verify": True, "posterior_threshold": 0.01}, "enable_entropy_verify is lossy"),
        ({"enable_entropy_verify": True, "posterior_alpha": 9.0}, "enable_entropy_verify is lossy"),
        ({"enable_block_verify": True}, "enable_block_verify is lossy"),
    ],
)
def test_lossy_rules_accept_more_and_say_so(
    rule: dict[str, Any], words: str, made: Directories, plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    drawing = {"draft_sample_method": "probabilistic"}
    lossy = llm_of(made, config=drawing, additional_config={"rejection_sampler_config": rule})
    assert words in caplog.text
    caplog.clear()
    exact = llm_of(made, config=drawing)
    assert "lossy" not in caplog.text
    assert told(lossy) == told(exact) == plain
    before = [counts(llm)[2] for llm in (lossy, exact)]
    for seed in (0, 10, 20):
        told(lossy, drawn(seed, 1.5))
        told(exact, drawn(seed, 1.5))
    assert counts(lossy)[2] - before[0] > counts(exact)[2] - before[1]


def test_a_table_gives_the_depth_of_each_batch_size(made: Directories, plain: list[list[int]]) -> None:
    ranges = [[1, 1, 2], [2, 16, 1]]
    for slots, depth in ((1, 2), (5, 1)):
        llm = llm_of(made, depth=3, max_num_seqs=slots, config={"num_speculative_tokens_per_batch_size": ranges})
        assert told(llm) == plain
        assert llm.stats is not None
        if slots == 1:
            assert llm.stats.drafted_per_position[depth:] == [0] * (3 - depth)
            assert llm.stats.drafted_per_position[depth - 1] > 0
        else:
            drafts, tokens, _ = counts(llm)
            assert drafts <= tokens < 1.5 * drafts
    nothing = llm_of(made, config={"num_speculative_tokens_per_batch_size": [[1, 16, 0]]})
    assert told(nothing) == plain
    assert counts(nothing)[1] == 0


def test_hysteresis_keeps_the_depth_of_a_batch_size_nearby(made: Directories) -> None:
    table = {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 16, 1]]}
    sizes = [2, 3, 4, 3, 2, 1]
    for hysteresis, depths in ((0, [3, 1, 1, 1, 3, 3]), (1, [3, 3, 1, 1, 1, 3])):
        llm = llm_of(made, config=table, additional_config={"batch_size_hysteresis": hysteresis})
        assert [llm.engine.depth.tokens_to_draft(size) for size in sizes] == depths
    with pytest.raises(EngineError, match=r"batch_size_hysteresis=1 without .*num_speculative_tokens_per_batch_size"):
        llm_of(made, additional_config={"batch_size_hysteresis": 1})


@pytest.mark.parametrize("name", ["eagle3", "dspark", "draft_model", "draft_model (PARD)", "medusa", "mtp"])
def test_adaptive_verification_measures_and_changes_no_answer(
    name: str, made: Directories, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTEXT_VARIABLE, "16")
    llm = served(
        made, BY_NAME[name], "dense", 3, max_num_seqs=4, speculative_config={"enable_adaptive_verification": True}
    )
    depth = llm.engine.depth
    assert isinstance(depth, AdaptiveVerification)
    assert sorted(depth.costs.verify) == sorted(depth.costs.draft) == [1, 2, 4]
    assert float(depth.costs.verify_ms(4, torch.tensor([16.0]))) > 0
    assert told(llm) == plain
    drafts, tokens, _ = counts(llm)
    assert 0 < drafts <= tokens <= 3 * drafts


@pytest.mark.parametrize(("family", "depth"), [("dspark", 7), ("dflash", 7)])
def test_a_confidence_budget_verifies_fewer(family: str, depth: int, made: Directories, plain: list[list[int]]) -> None:
    params = {"initial_verify_budget_per_req": 1, "budget_update_interval": 1000}
    budget = {"dynamic_spec_config": {"method": family, "method_params": params}}
    trimmed, whole = llm_of(made, family, depth, additional_config=budget), llm_of(made, family, depth)
    assert told(trimmed) == told(whole) == plain
    assert counts(trimmed)[0] == counts(trimmed)[1] > 0
    assert counts(whole)[1] > 4 * counts(whole)[0]
    kept = {**params, "min_verify_tokens": 2}
    least = llm_of(
        made, family, depth, additional_config={"dynamic_spec_config": {"method": family, "method_params": kept}}
    )
    told(least)
    assert 1.5 * counts(least)[0] < counts(least)[1] <= 2 * counts(least)[0]


@pytest.mark.parametrize("name", ["budget_threshold", "budget_update_interval"])
def test_the_budget_follows_the_threshold_at_its_interval(name: str, made: Directories) -> None:
    """At a threshold of 0 every draft counts; at 1 none does."""
    verified = []
    for threshold, interval in ((0, 1), (1, 1)) if name == "budget_threshold" else ((0, 1), (0, 1000)):
        params = {
            "initial_verify_budget_per_req": 1,
            "budget_update_interval": interval,
            "budget_threshold": threshold,
        }
        budget = {"dynamic_spec_config": {"method": "dflash", "method_params": params}}
        llm = llm_of(made, "dflash", 7, additional_config=budget)
        told(llm)
        verified.append(counts(llm)[1] / counts(llm)[0])
    assert verified[0] > 3 > verified[1]


@pytest.mark.parametrize("family", ["eagle3", "dflash", "dspark"])
def test_a_window_changes_what_is_drafted_and_no_answer(family: str, made: Directories, plain: list[list[int]]) -> None:
    drafts = []
    for additional in ({}, {"draft_window_size": 2}):
        llm = llm_of(made, family, 3, additional_config=additional)
        drafts.append([])
        _write_down(llm, drafts[-1])
        assert told(llm) == plain
    assert drafts[0] != drafts[1]


def _write_down(llm: LLM, found: list[list[list[int]]]) -> None:
    """Keep what the proposer proposes."""
    assert llm.engine.proposer is not None
    propose = llm.engine.proposer.propose

    def keeping(*given: Any) -> Any:
        proposal = propose(*given)
        found.append(proposal.token_ids_BK.tolist())
        return proposal

    llm.engine.proposer.propose = keeping


def test_dspark_chooses_among_as_many_tokens_as_asked(made: Directories, plain: list[list[int]]) -> None:
    drafts: list[list[list[list[int]]]] = [[], []]
    for found, topk in zip(drafts, (1, None), strict=True):
        llm = llm_of(made, "dspark", 7, config={"dspark_draft_topk": topk})
        _write_down(llm, found)
        assert told(llm) == plain
    assert drafts[0] != drafts[1]


def test_lookups_read_their_keys(made: Directories) -> None:
    def accepted(**keys: Any) -> tuple[int, int, int]:
        llm = LLM(made.verifier(), dtype="float32", speculative_config=keys, max_model_len=96, max_num_seqs=1)
        llm.generate([5, 9] * 6, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
        llm.generate([5, 9] * 6, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
        return counts(llm)

    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    assert accepted(**ngram, prompt_lookup_min=1, prompt_lookup_max=3) != accepted(**ngram, prompt_lookup_min=3)
    assert accepted(**ngram, prompt_lookup_max=1) != accepted(**ngram, prompt_lookup_max=9)
    suffix = {"method": "suffix", "num_speculative_tokens": 8}
    usual = accepted(**suffix)
    for key, value in (
        ("suffix_decoding_max_tree_depth", 2),
        ("suffix_decoding_max_cached_requests", 0),
        ("suffix_decoding_max_spec_factor", 0.5),
        ("suffix_decoding_min_token_prob", 1.0),
    ):
        assert accepted(**suffix, **{key: value}) != usual, key


def test_a_revision_is_asked_for(made: Directories) -> None:
    with pytest.raises(SpeculatorsError, match="is a directory, which has no revision 'v2'"):
        llm_of(made, config={"revision": "v2"})


# Where each key that has an effect is shown to have it: a test of this folder, of answers or counts of an LLM.
MATRIX, HERE = "test_methods.py::test_greedy_answers_are_those_without_drafts", "test_llm_options.py::"
LOOKUPS = HERE + "test_lookups_read_their_keys"
SYNTHETIC = HERE + "test_synthetic_rates_decide_what_is_accepted"
LOSSY = HERE + "test_lossy_rules_accept_more_and_say_so"
BUDGET = HERE + "test_a_confidence_budget_verifies_fewer"
UPDATE = HERE + "test_the_budget_follows_the_threshold_at_its_interval"
SHOWN = {
    **dict.fromkeys(("method", "model", "num_speculative_tokens"), MATRIX),
    **dict.fromkeys(("parallel_drafting", "use_heterogeneous_vocab"), MATRIX),
    "draft_sample_method": HERE + "test_drawn_drafts_are_others_than_the_likeliest",
    "revision": HERE + "test_a_revision_is_asked_for",
    "max_model_len": "test_infer.py::test_nothing_is_drafted_beyond_the_drafts_length",
    **dict.fromkeys(("prompt_lookup_max", "prompt_lookup_min"), LOOKUPS),
    **dict.fromkeys(
        [
            f"suffix_decoding_{key}"
            for key in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
        ],
        LOOKUPS,
    ),
    "rejection_sample_method": HERE + "test_block_verification_draws_other_answers_of_the_same_law",
    "synthetic_acceptance_rates": SYNTHETIC,
    "synthetic_acceptance_length": HERE + "test_a_synthetic_length_is_the_mean_of_a_step",
    "num_speculative_tokens_per_batch_size": HERE + "test_a_table_gives_the_depth_of_each_batch_size",
    "enable_adaptive_verification": HERE + "test_adaptive_verification_measures_and_changes_no_answer",
    "dspark_draft_topk": HERE + "test_dspark_chooses_among_as_many_tokens_as_asked",
    "draft_model_config": "test_extraction.py::",
    "additional_config.rejection_sampler_config": LOSSY,
    **dict.fromkeys(
        [
            f"additional_config.rejection_sampler_config.{key}"
            for key in ("enable_block_verify", "enable_entropy_verify", "posterior_threshold", "posterior_alpha")
        ],
        LOSSY,
    ),
    "additional_config.dynamic_spec_config": BUDGET,
    "additional_config.dynamic_spec_config.method": BUDGET,
    "additional_config.dynamic_spec_config.method_params": BUDGET,
    "additional_config.dynamic_spec_config.method_params.initial_verify_budget_per_req": BUDGET,
    "additional_config.dynamic_spec_config.method_params.min_verify_tokens": BUDGET,
    "additional_config.dynamic_spec_config.method_params.budget_update_interval": UPDATE,
    "additional_config.dynamic_spec_config.method_params.budget_threshold": UPDATE,
    "additional_config.draft_window_size": HERE + "test_a_window_changes_what_is_drafted_and_no_answer",
    "additional_config.batch_size_hysteresis": HERE + "test_hysteresis_keeps_the_depth_of_a_batch_size_nearby",
    **dict.fromkeys(
        [f"additional_config.tree_drafting{key}" for key in ("", ".top_k", ".depth", ".total_token")],
        "test_tree_drafting.py::test_the_size_is_what_was_asked_for",
    ),
}


def test_every_key_with_an_effect_is_shown_to_have_it() -> None:
    assert SHOWN.keys() == {name for name, row in schema_coverage().items() if row["coverage"] == "effect"}
    for place in SHOWN.values():
        file, _, test = place.partition("::")
        assert f"def {test}" in (Path(__file__).parent / file).read_text(encoding="utf-8"), place


# What is refused, and by which words: nothing of it may wait until weights have been read.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"method": "ngram"}, {}, "num_speculative_tokens is missing"),
    ({"method": "draft_model", "model": "{near}"}, {}, "num_speculative_tokens is missing"),
    ({"method": "draft_model", "model": "{other}", "num_speculative_tokens": 2}, {}, "set use_heterogeneous_vocab"),
    (
        {"model": "{near}", "num_speculative_tokens": 2, "parallel_drafting": True},
        {},
        "names no mask token",
    ),
    (
        {"model": "{near}", "num_speculative_tokens": 2, "max_model_len": 90000},
        {},
        "max_model_len=90000 is more than the 8192 positions of draft model",
    ),
    ({"method": "mtp"}, {}, "method='mtp' drafts with blocks of the verifier's own checkpoint"),
    ({"method": "custom_class", "model": "no.such.Class", "num_speculative_tokens": 2}, {}, "cannot be imported"),
    (
        {"model": "tests.runtime.custom_drafters.WithoutPropose", "num_speculative_tokens": 2},
        {},
        "has no method `propose`",
    ),
    ({"model": "{silent}"}, {"dynamic_spec_config": {"method": "dspark"}}, "reads a confidence head, and .* has none"),
    ({"model": "{eagle3}"}, {"dynamic_spec_config": {"method": "dspark"}}, "with speculative_config's method 'eagle3'"),
    (
        {"model": "{eagle3}", "rejection_sample_method": "block"},
        {"rejection_sampler_config": {"enable_block_verify": True}},
        "replace the standard one",
    ),
    ({"model": "{eagle3}"}, {"tree_drafting": {"top_k": 9, "depth": 129}}, r"depth=129: expected .* in \[1, 128\]"),
    (
        {"model": "{eagle3}", "num_speculative_tokens": 3},
        {"tree_drafting": {}},
        "depth=7 with .*num_speculative_tokens=3",
    ),
    ({"model": "{near}", "num_speculative_tokens": 2}, {"tree_drafting": {"depth": 2}}, "got method 'draft_model'"),
    ({"model": "{eagle3}", "method": "eagle"}, {}, "method='eagle', but .* is a speculator for method 'eagle3'"),
    ({"model": "{tiny eagle}"}, {}, "drafts for a verifier with a vocabulary of 3, and .* has 384; give it"),
    ({"model": "{tiny eagle3}"}, {}, "drafts for a verifier with a vocabulary of 3, and .* has 384; give it"),
    ({"model": "{wide}"}, {}, "drafts for a verifier with a hidden size of 64, and .* has 32; give it"),
    ({"model": "{assistant}", "num_speculative_tokens": 2, "method": "draft_model"}, {}, "'gemma4_assistant'"),
]


@pytest.mark.parametrize(("config", "additional", "words"), REFUSED)
def test_what_is_refused_is_refused_before_weights_are_read(
    config: dict[str, Any], additional: dict[str, Any], words: str, made: Directories, tmp_path: Path
) -> None:
    """The verifier has no weights at all, and nobody notices."""
    verifier = shutil.copytree(made.verifier(), tmp_path / "verifier", ignore=shutil.ignore_patterns("*.safetensors"))
    assistant = tmp_path / "assistant"
    assistant.mkdir()
    (assistant / "config.json").write_text('{"model_type": "gemma4_assistant"}', encoding="utf-8")
    paths = {
        "{near}": made.draft_model("near"),
        "{other}": made.draft_model("another vocabulary"),
        "{eagle3}": made.speculator("eagle3"),
        "{tiny eagle}": made.speculator("eagle", SMALL),
        "{tiny eagle3}": made.speculator("eagle3", SMALL),
        "{wide}": str(make_speculator(tmp_path / "wide", make_verifier(tmp_path / "wide-verifier"))),
        "{silent}": made.speculator("dspark", enable_confidence_head=False),
        "{assistant}": str(assistant),
    }
    config = {key: paths.get(value, value) if isinstance(value, str) else value for key, value in config.items()}
    with pytest.raises(EngineError, match=words):
        LLM(verifier, speculative_config=config, additional_config=additional)
    with pytest.raises(SpeculatorsError, match="cannot be read"):
        LLM(verifier)
