"""Constraints through the engine: with drafts that are partly accepted, outputs equal those without drafts."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList, MinNewTokensLengthLogitsProcessor

from speculators.errors import RequestError
from speculators.runtime.additional import AdditionalConfig, TreeDraftingConfig
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.outputs import NO_TOKEN_ALLOWED, RequestOutput
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.tree_engine import TreeEngine
from speculators.runtime.verifier import Verifier
from tests.runtime.parts import random_speculator
from tests.runtime.replaying import ReplayProposer, ReplayTrees

PROMPTS = ["The quick brown fox", "rain fell all night, the road was closed", "What is the sum of twelve?"]
LIMITS = EngineLimits(max_num_seqs=2, max_model_len=200)
LENGTH = 20
GREEDY = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> Verifier:
    return Verifier.from_pretrained(tiny_verifier, dtype="float32")


@pytest.fixture(scope="module")
def free(verifier: Verifier) -> list[RequestOutput]:
    """Greedy outputs without constraints."""
    return LLM.from_parts(verifier, limits=LIMITS).generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False)


def with_replay(
    verifier: Verifier, known: Sequence[RequestOutput], params: SamplingParams, num_tokens: int, *, trees: bool = False
) -> tuple[list[RequestOutput], Engine]:
    """Outputs for the prompts of `known`, drafted from what it answered with every third token wrong, or as trees."""
    llm = LLM.from_parts(verifier, limits=LIMITS)
    continuations = {tuple(one.prompt_token_ids): one.outputs[0].token_ids for one in known}
    engine, proposer = (TreeEngine, ReplayTrees) if trees else (Engine, ReplayProposer)
    llm.engine = engine(verifier, proposer(continuations, num_tokens), limits=LIMITS, metrics_level="summary")
    return llm.generate(PROMPTS, params, use_tqdm=False), llm.engine


def said(output: RequestOutput) -> tuple[object, ...]:
    """Everything that speculation must leave as it is."""
    completion = output.outputs[0]
    entries = [
        (token, pytest.approx(entry.logprob, abs=1e-4), entry.rank)
        for at in completion.logprobs or []
        for token, entry in at.items()
    ]
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason, entries


def forbidden(verifier: Verifier, outputs: Sequence[RequestOutput]) -> list[str]:
    """Words of one token and of two that outputs have, and that are these tokens in any text."""
    tokenizer, found = verifier.tokenizer, {}
    assert tokenizer is not None
    for output in outputs:
        ids = output.outputs[0].token_ids
        for length, start in itertools.product((1, 2), range(LENGTH - 1)):
            text = tokenizer.decode(ids[start : start + length])
            if text == text.strip() and tokenizer.encode(text) == ids[start : start + length]:
                found[length] = text
    return [found[1], found[2]]


def wishes(name: str, verifier: Verifier, free: Sequence[RequestOutput]) -> dict[str, object]:
    """A constraint that the free outputs break, so that it has to act."""
    often = [token for output in free for token in output.outputs[0].token_ids]
    token = max(set(often), key=often.count)
    text = free[0].outputs[0].text
    known: dict[str, dict[str, object]] = {
        "presence": {"presence_penalty": 2.0},
        "frequency": {"frequency_penalty": 1.5},
        "repetition": {"repetition_penalty": 1.8},
        "bias": {"logit_bias": {token: -100, 70: 3.0}},
        "allowed": {"allowed_token_ids": [one for one in range(60, 384) if one != token]},
        "bad words": {"bad_words": forbidden(verifier, free)},
        "min_tokens": {"min_tokens": 12, "stop_token_ids": sorted(set(often))[::3]},
        "stop ids": {"stop_token_ids": [free[0].outputs[0].token_ids[10], free[1].outputs[0].token_ids[13]]},
        "stop string": {"stop": [text[len(text) // 2 :][:2], "zz"], "include_stop_str_in_output": True},
        "stop string late": {"stop": [text[3:5], text[len(text) // 2 :][:2]], "min_tokens": 9},
        "logprobs": {"logprobs": 3, "repetition_penalty": 1.4},
    }
    return known[name]


NAMES = (
    "presence", "frequency", "repetition", "bias", "allowed", "bad words", "min_tokens", "stop ids", "stop string",
    "stop string late", "logprobs",
)  # fmt: skip


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_constraints_act_inside_the_draft_window(
    verifier: Verifier, free: list[RequestOutput], name: str, trees: bool
) -> None:
    """In a tree, along each draft's own path."""
    params = SamplingParams(**{**GREEDY, **wishes(name, verifier, free)})
    plain = LLM.from_parts(verifier, limits=LIMITS).generate(PROMPTS, params, use_tqdm=False)
    assert any(one.outputs[0].token_ids != other.outputs[0].token_ids for one, other in zip(plain, free, strict=True))
    drafted, engine = with_replay(verifier, plain, params, 4, trees=trees)
    assert [said(one) for one in drafted] == [said(one) for one in plain]
    assert engine.stats is not None
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    # Drafts of the unconstrained answers go astray, which changes nothing but the pace.
    astray, engine = with_replay(verifier, free, params, 3, trees=trees)
    assert [said(one) for one in astray] == [said(one) for one in plain]
    # So do those of a draft model that has learnt nothing.
    additional = AdditionalConfig(tree_drafting=TreeDraftingConfig(3, 3, 10) if trees else None)
    speculator = random_speculator(verifier)
    llm = LLM.from_parts(verifier, speculator, num_speculative_tokens=3, additional=additional, limits=LIMITS)
    assert [said(one) for one in llm.generate(PROMPTS, params, use_tqdm=False)] == [said(one) for one in plain]


def test_requests_of_different_wishes_share_a_batch(verifier: Verifier, free: list[RequestOutput]) -> None:
    """Each row is processed for itself, whatever its neighbours ask; finished rows make room for waiting ones."""
    names = ("repetition", "bad words")
    params = [SamplingParams(**{**GREEDY, **wishes(name, verifier, free)}) for name in names]
    params.insert(1, SamplingParams(**{**GREEDY, "max_tokens": 5}))
    alone = [
        LLM.from_parts(verifier, limits=LIMITS).generate(prompt, one, use_tqdm=False)[0]
        for prompt, one in zip(PROMPTS, params, strict=True)
    ]
    continuations = {tuple(one.prompt_token_ids): one.outputs[0].token_ids for one in alone}
    llm = LLM.from_parts(verifier, limits=LIMITS)
    llm.engine = Engine(verifier, ReplayProposer(continuations, 4), limits=LIMITS)
    assert [said(one) for one in llm.generate(PROMPTS, params, use_tqdm=False)] == [said(one) for one in alone]


def test_min_tokens_keeps_the_end_away_as_transformers_does(tiny_verifier: Path, verifier: Verifier) -> None:
    """With a verifier that wants to end at once: independent generation, plain and drafted agree."""
    end = verifier.tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=7, logit_bias={end: 60})
    expected = []
    for prompt in PROMPTS:
        ids = verifier.tokenizer(prompt)["input_ids"]
        rows = torch.tensor([ids])
        out = model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=20,
            do_sample=False,
            sequence_bias=[[[end], 60.0]],
            logits_processor=LogitsProcessorList([MinNewTokensLengthLogitsProcessor(len(ids), 7, [end])]),
        )
        expected.append(out[0, len(ids) :].tolist())
    assert {len(ids) for ids in expected} == {8}
    assert {ids[-1] for ids in expected} == {end}
    plain = LLM.from_parts(verifier, limits=LIMITS).generate(PROMPTS, params, use_tqdm=False)
    drafted, engine = with_replay(verifier, plain, params, 5)
    assert engine.stats is not None
    assert engine.stats.num_accepted_tokens > 0
    for outputs in (plain, drafted):
        assert [one.outputs[0].token_ids for one in outputs] == expected
        assert {one.outputs[0].finish_reason for one in outputs} == {"stop"}


def test_seeded_samples_repeat_and_obey(verifier: Verifier, free: list[RequestOutput]) -> None:
    """A seed fixes a constrained request's tokens alone and among others; none of them is forbidden."""
    token = free[0].outputs[0].token_ids[0]
    params = [
        SamplingParams(
            temperature=1.2, seed=seed, max_tokens=20, ignore_eos=True, min_p=0.01, repetition_penalty=1.3,
            allowed_token_ids=[one for one in range(60, 384) if one != token], logprobs=0,
        )
        for seed in range(3)
    ]  # fmt: skip
    known = LLM.from_parts(verifier, limits=LIMITS).generate(PROMPTS, params, use_tqdm=False)
    continuations = {tuple(one.prompt_token_ids): one.outputs[0].token_ids for one in known}

    def drafting() -> LLM:
        llm = LLM.from_parts(verifier, limits=LIMITS)
        llm.engine = Engine(verifier, ReplayProposer(continuations, 3), limits=LIMITS)
        return llm

    together = drafting().generate(PROMPTS, params, use_tqdm=False)
    alone = drafting().generate(PROMPTS[2], params[2], use_tqdm=False)[0]
    assert said(alone) == said(together[2])
    for output in (*known, *together):
        assert len(output.outputs[0].token_ids) == 20
        assert not {*range(60), token} & set(output.outputs[0].token_ids)


def test_logprobs_are_of_the_logits_before_constraints(verifier: Verifier) -> None:
    """The chosen token's entry has the rank that the model itself gave it."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, allowed_token_ids=[77, 78])
    output = LLM.from_parts(verifier, limits=LIMITS).generate(PROMPTS[0], params, use_tqdm=False)[0]
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    law = verifier.model(torch.tensor([ids])).logits[0].log_softmax(-1)[len(output.prompt_token_ids) - 1 :]
    for place, (token, entry) in enumerate(
        zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True)
    ):
        assert list(entry) == [token, int(law[place].argmax())]
        assert abs(entry[token].logprob - float(law[place, token])) < 1e-4
        assert entry[token].rank == int((law[place] > law[place, token]).sum()) + 1


@pytest.mark.parametrize("tokens_a_pass", [5, 2048])
def test_prompt_logprobs_are_those_of_the_model(verifier: Verifier, tokens_a_pass: int) -> None:
    """Whatever part of the prompt a pass takes, and whoever shares it."""
    limits = EngineLimits(3, 200, tokens_a_pass)
    params = [SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=count) for count in (0, None, 3)]
    llm = LLM.from_parts(verifier, random_speculator(verifier), limits=limits)
    for output, one in zip(llm.generate(PROMPTS, params, use_tqdm=False), params, strict=True):
        if one.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        ids = output.prompt_token_ids
        law = verifier.model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(ids)
        assert output.prompt_logprobs[0] is None
        for place, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            likeliest = np.argsort(-law[place])[: one.prompt_logprobs].tolist()
            assert list(entry) == list(dict.fromkeys([ids[place + 1], *likeliest]))
            for token, told in entry.items():
                assert abs(told.logprob - law[place, token]) < 1e-4
                assert told.rank == (law[place] > law[place, token]).sum() + 1


@pytest.mark.parametrize("drafting", ["nothing", "chains", "trees"])
def test_a_request_without_a_token_left_ends_with_the_reason(verifier: Verifier, drafting: str) -> None:
    """It keeps what it has, and its neighbours go on."""
    end = verifier.tokenizer.eos_token_id
    only = SamplingParams(temperature=0, max_tokens=9, allowed_token_ids=[end, 70], min_tokens=5, bad_words=["zzz"])
    word = verifier.tokenizer.decode([70])
    stuck = SamplingParams(temperature=0, max_tokens=9, allowed_token_ids=[end, 70], min_tokens=5, bad_words=[word * 3])
    assert verifier.tokenizer.encode(word * 3) == [70, 70, 70]
    llm = LLM.from_parts(verifier, limits=LIMITS)
    if drafting != "nothing":
        prompts = [tuple(verifier.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS[:2]]
        engine, proposer = (TreeEngine, ReplayTrees) if drafting == "trees" else (Engine, ReplayProposer)
        llm.engine = engine(verifier, proposer({one: [70] * 9 for one in prompts}, 2), limits=LIMITS)
    first, second = llm.generate(PROMPTS[:2], [stuck, only], use_tqdm=False)
    completion = first.outputs[0]
    assert (completion.token_ids, completion.text) == ([70, 70], word * 2)
    assert (completion.finish_reason, completion.stop_reason) == ("error", NO_TOKEN_ALLOWED)
    assert first.error is not None
    assert "after 2 tokens of output, allowed_token_ids, bad_words, min_tokens together leave no token" in first.error
    assert second.outputs[0].token_ids[:5] == [70] * 5
    assert second.error is None


def test_a_wrong_wish_is_refused_before_anything_runs(verifier: Verifier) -> None:
    llm = LLM.from_parts(verifier, limits=LIMITS)
    with pytest.raises(RequestError, match=r"logit_bias has token id 384, which is outside 0\.\.383"):
        llm.generate(PROMPTS, SamplingParams(logit_bias={384: 1.0}), use_tqdm=False)
    assert not llm.engine.has_unfinished
