"""Prefix caching: answers and drafts as without it, and fewer tokens computed, as counts of the prompts say."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import Tensor

from speculators.errors import EngineError
from speculators.models.cache import SlotCache, SlotWrite
from speculators.runtime.additional import AdditionalConfig, TreeDraftingConfig
from speculators.runtime.assemble import choose_engine
from speculators.runtime.config import SpeculativeConfig
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.infer import infer
from speculators.runtime.llm import LLM
from speculators.runtime.methods import prepare
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier, VerifierOutput
from tests.runtime.draft_models import model_of
from tests.runtime.methods import BY_NAME, served
from tests.runtime.parts import random_speculator, random_verifier
from tests.runtime.replaying import ReplayProposer
from tests.runtime.served import Directories
from tests.runtime.serving import samples, serving
from tests.verifier_configs import TINY

LENGTH = 192
METHODS = ("eagle3", "dflash", "mtp", "draft_model", "ngram", "suffix")
OTHERS = ("eagle", "eagle3 (peagle)", "dspark", "dflash (dflash2)", "medusa", "draft_model (PARD)", "ngram_gpu")
MORE = ("custom_class", "mtp (the verifier's own)", "draft_model (another vocabulary)", "mlp_speculator")
ASSISTANTS = ("mtp (Gemma 4 assistant)",)


class Counting(Verifier):
    """A verifier that counts the tokens of its passes, without padding."""

    num_tokens = 0

    def forward(
        self, token_ids_BT: Tensor, cache: SlotCache, write: SlotWrite, *, need_logits: bool = True
    ) -> VerifierOutput:
        # A tree has no padding to be left out; what it computes beside the prompt is the same with caching.
        self.num_tokens += write.width * len(write.starts) if write.lengths is None else sum(write.lengths)
        return super().forward(token_ids_BT, cache, write, need_logits=need_logits)


def prompts() -> list[list[int]]:
    """A system prompt of 40 tokens and what follows it; prompts that part inside it, are short, or are said again."""
    system = [(5 + 7 * i + i * i) % 37 + 2 for i in range(40)]
    turns = [[*system, *((3 + i * j) % 31 + 4 for j in range(3 + 2 * i))] for i in range(4)]
    inside = [[*system[:25], *((11 + 3 * i * j) % 29 + 5 for j in range(9))] for i in (1, 2)]
    return [*turns, [4, 9], [30] * 20, *inside, turns[2], turns[3][:-1], [30] * 21, system]


def params(sampled: bool) -> list[SamplingParams]:
    """Answers that end at different places."""
    return [
        SamplingParams(temperature=0.8 if sampled else 0.0, max_tokens=1 + (7 * i) % 9, ignore_eos=True, seed=i)
        for i in range(len(prompts()))
    ]


@dataclass
class Told:
    """What an engine answered, and what it took."""

    outputs: list[RequestOutput]
    engine: Engine
    computed: int

    @property
    def tokens(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.outputs]

    @property
    def counts(self) -> list[tuple[Any, ...]]:
        """Of each request, the drafts of each step and those accepted, and where."""
        found = []
        for output in self.outputs:
            spec = output.outputs[0].spec_decode_metrics
            assert spec is not None
            found.append((spec.stats.per_step_drafted, spec.stats.per_step_accepted, output.outputs[0].accepted))
        return found


def asked(
    engine: Engine, wanted: Sequence[tuple[Sequence[int], SamplingParams]], *, names: str = "", together: bool = True
) -> Told:
    """All requests at once, or each when the one before it has ended."""
    assert isinstance(engine.verifier, Counting)
    before, done = engine.verifier.num_tokens, dict[str, RequestOutput]()
    for place, (prompt, params) in enumerate(wanted):
        engine.add_request(f"{names}{place}", prompt, params)
        while engine.has_unfinished and not together:
            done |= {output.request_id: output for output in engine.step()}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step()}
    computed = engine.verifier.num_tokens - before
    return Told([done[f"{names}{place}"] for place in range(len(wanted))], engine, computed)


def engine_of(
    made: Directories, name: str, batch: int, caching: bool, *, depth: int = 3, kind: str = "", **keys: Any
) -> Engine:
    case = BY_NAME[name]
    kind = kind or case.verifiers[0]
    tree = keys.pop("tree", None)
    config = SpeculativeConfig.from_dict({**case.config(made, kind), "num_speculative_tokens": depth, **keys})
    verifier = Counting.from_pretrained(made.verifier(kind), dtype="float32")
    limits = EngineLimits(batch, LENGTH, 48, caching)
    plan = infer(made.verifier(kind), config, AdditionalConfig(tree_drafting=tree))
    build = prepare(plan, verifier)
    assert build is not None
    return choose_engine(plan)(verifier, build(verifier, limits), limits=limits, metrics_level="detailed")


def same_as_without(made: Directories, name: str, batch: int, sampled: bool, **keys: Any) -> None:
    if sampled and BY_NAME[name].drawn and "tree" not in keys:
        keys["draft_sample_method"] = "probabilistic"
    wanted = list(zip(prompts(), params(sampled), strict=True))
    told = {}
    for caching in (False, True):
        engine = engine_of(made, name, batch, caching, **keys)
        # The second time, all of it is kept by requests that have ended.
        told[caching] = [asked(engine, wanted), asked(engine, wanted[::-2], names="again-")]
    for without, cached in zip(told[False], told[True], strict=True):
        assert cached.tokens == without.tokens
        assert cached.counts == without.counts
        hits = sum(output.num_cached_tokens for output in cached.outputs)
        assert hits > 0
        assert without.computed - cached.computed == hits
        assert all(output.num_cached_tokens == 0 for output in without.outputs)
    assert told[True][0].engine.prefixes is not None
    looked_for = [*prompts(), *prompts()[::-2]]
    assert told[True][0].engine.prefixes.queries == sum(map(len, looked_for))


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("name", METHODS)
def test_answers_and_drafts_are_those_without_caching(made: Directories, name: str, batch: int) -> None:
    same_as_without(made, name, batch, False)


@pytest.mark.parametrize("name", [*METHODS, *ASSISTANTS])
def test_sampled_answers_and_drafts_are_those_without_caching(made: Directories, name: str) -> None:
    same_as_without(made, name, 3, True)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("name", "kind"), [("eagle", "dense"), ("eagle3", "sliding window")])
def test_trees_of_drafts_are_those_without_caching(made: Directories, name: str, kind: str, sampled: bool) -> None:
    same_as_without(made, name, 3, sampled, kind=kind, tree=TreeDraftingConfig(4, 3, 14))


@pytest.mark.full
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("name", [*OTHERS, *MORE, *ASSISTANTS])
def test_every_other_method_drafts_as_without_caching(made: Directories, name: str, batch: int) -> None:
    same_as_without(made, name, batch, False)


def free(length: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, **more)


def eagle3_engine(caching: bool = True, *, slots: int = 2, tokens_a_pass: int = 2048) -> Engine:
    stock = random_verifier(32)
    verifier = Counting(stock.model, None)
    limits = EngineLimits(slots, 128, tokens_a_pass, caching)
    proposer = DraftHeadProposer(random_speculator(verifier).draft, 3, limits.num_slots)
    return Engine(verifier, proposer, limits=limits, metrics_level="detailed")


def numbers(length: int, first: int = 0) -> list[int]:
    """Tokens by a rule, another row of them for each `first`."""
    return [(first + 3 * i + i * i * (1 + first)) % 31 for i in range(length)]


def cached(told: Told) -> list[int]:
    return [output.num_cached_tokens for output in told.outputs]


@pytest.mark.parametrize("tokens_a_pass", [1, 7, 2048])
def test_what_is_copied_is_what_both_begin_with_but_for_one_token(tokens_a_pass: int) -> None:
    """Of a request that has ended; by hand, however prompts are cut for their passes."""
    engine, base = eagle3_engine(slots=8, tokens_a_pass=tokens_a_pass), numbers(40)
    first = asked(engine, [(base, free(8))], names="first-")
    said = first.outputs[0].outputs[0].token_ids
    # Not known are the drafts of the last verification and what it added, of at most four tokens.
    going_on = [*base, *said, 1, 2, 3]
    cases: list[tuple[list[int], range]] = [
        (base, range(39, 40)),  # the last token of a prompt is always computed
        (base[:20], range(19, 20)),
        (base[:16], range(1)),  # too short
        ([*base[:17], 31, 31], range(16, 17)),
        ([*base[:30], (base[30] + 1) % 31, *base[31:]], range(29, 30)),
        ([(base[0] + 1) % 31, *base[1:]], range(1)),
        (going_on, range(43, 48)),
    ]
    plain = eagle3_engine(False)
    for place, (prompt, expected) in enumerate(cases):
        told = asked(engine, [(prompt, free(6))], names=f"{place}-")
        without = asked(plain, [(prompt, free(6))], names=f"{place}-")
        assert cached(told)[0] in expected, place
        assert (told.tokens, told.counts) == (without.tokens, without.counts)
        assert without.computed - told.computed == cached(told)[0]


def test_requests_share_with_those_that_run_and_with_those_that_start_together() -> None:
    system = numbers(50)
    wanted = [([*system, 1 + i, 2], free(5 + i)) for i in range(3)]
    without = asked(eagle3_engine(False, slots=4), wanted)
    engine = eagle3_engine(slots=4)
    engine.add_request("running", [*system, 9, 9, 9], free(60))
    engine.step()
    told = asked(engine, wanted)
    assert cached(told) == [49] * 3
    assert (told.tokens, told.counts) == (without.tokens, without.counts)
    # All at once: the first is computed, and the others wait for it within the same step.
    fresh = eagle3_engine(slots=4)
    together = asked(fresh, wanted)
    assert cached(together) == [0, 49, 49]
    assert (together.tokens, together.counts) == (without.tokens, without.counts)
    assert without.computed - together.computed == 98
    assert fresh.prefixes is not None
    assert (fresh.prefixes.queries, fresh.prefixes.hits) == (3 * 52, 98)


def test_the_least_recently_used_makes_room() -> None:
    """Two requests at once keep two that have ended."""
    engine = eagle3_engine(slots=2)
    a, b, c = (numbers(30, first) for first in range(3))
    one_by_one = [(prompt, free(1)) for prompt in (a, b, a, c, b, a)]
    # a, b; a again, so that c takes the place of b; then b that of a, and a that of c.
    assert cached(asked(engine, one_by_one, together=False)) == [0, 0, 29, 0, 0, 0]
    # What goes on from one that is kept takes its place; what another has whole takes none.
    longer = [*a, 5, 6, 7]
    more = [(prompt, free(1)) for prompt in (longer, a[:25], b, longer)]
    assert cached(asked(engine, more, names="more-", together=False)) == [29, 24, 29, 32]


def test_aborted_requests_leave_what_they_had() -> None:
    plain, engine = eagle3_engine(False), eagle3_engine(slots=3)
    for name in ("a", "b", "c"):
        engine.add_request(name, numbers(35, ord(name) - 96), free(40))
    engine.step()
    engine.add_request("waiting", numbers(40), free(40))
    engine.step()
    engine.abort("waiting")
    engine.abort("a")
    engine.step()
    assert len(engine.running) == 2
    engine.abort_all()
    wanted = [(numbers(35, 1), free(9)), (numbers(33, 2), free(9)), (numbers(35, 3), free(9))]
    told, without = asked(engine, wanted), asked(plain, wanted)
    assert cached(told) == [34, 32, 34]
    assert (told.tokens, told.counts) == (without.tokens, without.counts)


def test_prompt_logprobs_are_of_computed_tokens() -> None:
    engine, base = eagle3_engine(), numbers(40)
    asked(engine, [(base, free(3))], names="before-")
    told = asked(engine, [(base, free(3, prompt_logprobs=1))])
    without = asked(eagle3_engine(False), [(base, free(3, prompt_logprobs=1))])
    assert (cached(told), told.computed) == ([0], without.computed)
    one, other = told.outputs[0].prompt_logprobs, without.outputs[0].prompt_logprobs
    assert one is not None
    assert other is not None
    assert len(one) == 40
    assert [list(entry or ()) for entry in one] == [list(entry or ()) for entry in other]
    assert engine.prefixes is not None
    assert engine.prefixes.queries == 40


def test_windows_look_back_over_what_was_copied() -> None:
    """Layers that see the last 8 tokens only, of drafts too."""
    verifier = Counting(model_of(TINY["gemma3_text"]()).model, None)
    base, told = [(3 + i * i) % 60 for i in range(50)], {}
    for caching in (False, True):
        engine = Engine(verifier, limits=EngineLimits(2, 128, 16, caching))
        wanted = [(base, free(9)), ([*base[:44], 5, 6], free(9)), (base[:30], free(9))]
        told[caching] = asked(engine, wanted, together=False)
    assert told[True].tokens == told[False].tokens
    assert cached(told[True]) == [0, 43, 29]


def test_what_cannot_be_cached_is_refused_with_the_reason(made: Directories, tmp_path: Path) -> None:
    recurrent = model_of(TINY["qwen3_next"]())
    with pytest.raises(EngineError, match=r"enable_prefix_caching: verifier 'random' \(qwen3_next\) has layers with a"):
        Engine(recurrent, limits=EngineLimits(2, 64, enable_prefix_caching=True))
    rotated = random_verifier(32)
    rotated.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(EngineError, match="rotates keys by how long a sequence has become"):
        Engine(rotated, limits=EngineLimits(2, 64, enable_prefix_caching=True))
    few = DraftHeadProposer(random_speculator(random_verifier(32)).draft, 3, 2)
    with pytest.raises(EngineError, match="the draft's cache has 2 rows, expected 4"):
        Engine(random_verifier(32), few, limits=EngineLimits(2, 64, enable_prefix_caching=True))
    with pytest.raises(EngineError, match="ReplayProposer lacks `copy_prefix` and `require_prefix_reuse`"):
        Engine(random_verifier(32), ReplayProposer({}, 2), limits=EngineLimits(2, 64, enable_prefix_caching=True))
    own = {"method": "custom_class", "model": "tests.runtime.custom_drafters.Counting", "num_speculative_tokens": 2}
    with pytest.raises(EngineError, match="has `observe`, and would miss prompts that are cached"):
        LLM(made.verifier(), speculative_config=own, enable_prefix_caching=True)
    case = BY_NAME["extract_hidden_states"]
    with pytest.raises(EngineError, match="hidden states are written of what is computed"):
        served(made, case, "dense", 1, enable_prefix_caching=True)
    with pytest.raises(EngineError, match="enable_prefix_caching=1: expected true or false"):
        LLM(made.verifier(), enable_prefix_caching=1)  # type: ignore[arg-type]  # what a user may write


def test_the_option_counts_in_outputs_metrics_and_over_http(made: Directories) -> None:
    case, text = BY_NAME["eagle3"], "the road was closed, and the school stayed open, and rain fell all night"
    llm = served(made, case, "dense", 3, enable_prefix_caching=True)
    count = len(llm.prompt_ids(text)[1])
    assert count > 20
    cached = [llm.generate(text, free(4), use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert cached == [0, count - 1]
    counters = {metric.name: metric.value for metric in llm.get_metrics()}
    assert counters["vllm:prefix_cache_queries"] == 2 * count
    assert counters["vllm:prefix_cache_hits"] == count - 1
    body = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    with serving(llm, "tiny") as address:
        one = httpx.post(f"{address}/v1/completions", json={**body, "prompt": text}).json()
        other = httpx.post(f"{address}/v1/completions", json={**body, "prompt": "rain"}).json()
        found = samples(address)
    assert one["usage"]["prompt_tokens_details"] == {"cached_tokens": count - 1}
    assert "prompt_tokens_details" not in other["usage"]
    assert found["vllm:prefix_cache_queries_total", ""] == count + other["usage"]["prompt_tokens"]
    assert found["vllm:prefix_cache_hits_total", ""] == count - 1
