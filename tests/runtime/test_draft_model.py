"""Drafting with a second language model: the verifier's own answers, in every batch and depth, and what is accepted."""

import itertools
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from transformers import LlamaConfig

from speculators.errors import EngineError
from speculators.models.cache import SlotWrite
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.proposers.draft_model import (
    DraftModelProposer,
    ParallelDraftModelProposer,
    draft_model_proposer,
    mask_token_of,
)
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.proposers.vocab_mapping import VocabMapping
from speculators.runtime.request import Request
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.draft_models import CONFIGS, PROMPTS, answers, greedy_params, model_of, tokens_of
from tests.verifier_configs import SIZES, VOCAB

DEPTHS = (1, 2, 3, 5, 7, 16)
BATCHES = (1, 3, 16)
MASK = 60


def draft_of(kind: str, noise: float) -> Verifier:
    config = CONFIGS[kind]()
    config.pard_token = MASK
    return model_of(config, noise=noise, name="draft")


def check_greedy(kind: str, *, parallel: bool, pairs: Iterable[tuple[int, int]], prompts: int) -> None:
    """Answers with drafts of each (depth, batch) against answers without."""
    verifier, draft = model_of(CONFIGS[kind]()), draft_of(kind, 0.02)
    some, params = PROMPTS[-prompts:], greedy_params()[-prompts:]
    free = tokens_of(answers(verifier, None, some, params, batch=16)[0])
    # Every third request ends where its answer has its third token.
    stops = [[tokens[2]] if i % 3 == 0 else None for i, tokens in enumerate(free)]
    params = [replace(one, stop_token_ids=stop) for one, stop in zip(params, stops, strict=True)]
    plain = tokens_of(answers(verifier, None, some, params, batch=3)[0])
    accepted: dict[int, list[list[bool]]] = {}
    for depth, batch in pairs:
        proposer = draft_model_proposer(verifier, draft, depth, batch, parallel=parallel)
        outputs, engine = answers(verifier, proposer, some, params, batch=batch)
        assert tokens_of(outputs) == plain, (depth, batch)
        assert engine.stats is not None
        assert engine.stats.num_draft_tokens == depth * engine.stats.num_drafts
        assert engine.stats.num_accepted_tokens > 0
        # Rows do not disturb each other: what is accepted of a request does not depend on its batch.
        found = [output.outputs[0].accepted for output in outputs]
        assert accepted.setdefault(depth, found) == found


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_answers_are_the_verifiers_own(kind: str, parallel: bool) -> None:
    """Requests end inside the window, by length and by a stop id, and others start in the same step."""
    pairs = [(1, 16), (2, 3), (3, 1), (5, 16), (7, 3), (16, 1), (16, 3)]
    check_greedy(kind, parallel=parallel, pairs=pairs, prompts=7)


@pytest.mark.full
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_answers_in_every_depth_and_batch(kind: str, parallel: bool) -> None:
    check_greedy(kind, parallel=parallel, pairs=itertools.product(DEPTHS, BATCHES), prompts=len(PROMPTS))


@pytest.mark.parametrize("depth", DEPTHS)
def test_drafts_of_the_verifier_itself_are_all_accepted(depth: int) -> None:
    """K a step while room lasts: after the first token, r = L - p - 1 more in ceil(r / (K+1)) steps."""
    verifier, limit = model_of(CONFIGS["dense"]()), 50
    proposer = DraftModelProposer(verifier, depth, 3)
    endless = [SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)] * len(PROMPTS)
    outputs, engine = answers(verifier, proposer, PROMPTS, endless, batch=3, max_model_len=limit)
    left = [limit - len(prompt) - 1 for prompt in PROMPTS]
    assert [len(tokens) for tokens in tokens_of(outputs)] == [r + 1 for r in left]
    assert engine.stats is not None
    accepted = sum(r - -(-r // (depth + 1)) for r in left)
    assert (engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens) == (accepted, accepted)
    assert engine.stats.num_drafts == sum(r // (depth + 1) + (r % (depth + 1) >= 2) for r in left)


def test_an_end_of_sequence_inside_the_window_ends_the_answer() -> None:
    verifier = model_of(CONFIGS["dense"]())
    free, _ = answers(verifier, None, PROMPTS[:1], [SamplingParams(temperature=0, max_tokens=12)], batch=1)
    tokens = tokens_of(free)[0]
    assert verifier.model.generation_config is not None
    verifier.model.generation_config.eos_token_id = tokens[4]
    end = tokens.index(tokens[4]) + 1
    outputs, _ = answers(
        verifier,
        DraftModelProposer(verifier, 7, 1),
        PROMPTS[:1],
        [SamplingParams(temperature=0, max_tokens=12)],
        batch=1,
    )
    assert tokens_of(outputs) == [tokens[:end]]
    assert outputs[0].outputs[0].finish_reason == "stop"


def continuation(draft: Verifier, tokens: list[int], depth: int) -> list[int]:
    """The draft's greedy continuation, each token by a pass over everything before it."""
    ids = list(tokens)
    for _ in range(depth):
        ids.append(int(draft.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(tokens) :]


def filled(draft: Verifier, tokens: list[int], depth: int) -> list[int]:
    """The draft's likeliest tokens at the end of a sequence and at the masks behind it."""
    ids = torch.tensor([[*tokens, *[MASK] * (depth - 1)]])
    found: list[int] = draft.model(input_ids=ids).logits[0, len(tokens) - 1 :].argmax(-1).tolist()
    return found


class Driver:
    """Requests of two rows that grow as a verifier would have them grow."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.requests = [
            Request(
                str(i),
                list(prompt),
                SamplingParams(temperature=0),
                eos_token_ids=frozenset(),
                max_length=64,
                stats=None,
            )
            for i, prompt in enumerate(prompts)
        ]
        self.verified = [0] * len(prompts)

    def new(self, lengths: list[int]) -> NewTokens:
        """The next `lengths` tokens of each request are verified."""
        starts, self.verified = self.verified, [v + n for v, n in zip(self.verified, lengths, strict=True)]
        return NewTokens(
            slice(0, len(self.requests)),
            self.requests,
            starts,
            lengths,
            torch.zeros(len(lengths), max(lengths), dtype=torch.int64),
            None,
            torch.zeros(len(lengths), max(lengths), 1),
        )


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("parallel", [False, True])
def test_proposals_are_what_the_draft_says_without_a_cache(kind: str, parallel: bool) -> None:
    """Chunks of a prompt, a round of depth 0, ragged acceptance, a row that takes no part, and a row that moves."""
    draft = draft_of(kind, 0.02)
    expected = filled if parallel else continuation
    maker = ParallelDraftModelProposer if parallel else DraftModelProposer
    stock = draft_of(kind, 0.02)
    stock.model.set_attn_implementation("eager")
    proposer, driver = maker(draft, 4, 3), Driver([PROMPTS[10], PROMPTS[12]])
    first, second = driver.requests
    proposer.observe(driver.new([5, 2]))
    proposer.observe(driver.new([len(first.tokens) - 6, len(second.tokens) - 3]))

    def propose(lengths: list[int], depth: int) -> list[list[int]]:
        proposal = proposer.propose(driver.new(lengths), depth)
        counts = proposal.lengths_B.tolist()
        assert counts == [depth if length else 0 for length in lengths]
        found = proposal.token_ids_BK.tolist()
        for request, count, ids in zip(driver.requests, counts, found, strict=True):
            if count:
                assert ids == expected(stock, request.tokens, depth), request.request_id
        return found

    for request in driver.requests:
        request.tokens.append(9)
    ids = propose([1, 1], 4)
    # All four of the first are accepted, one of the second.
    first.tokens += [*ids[0], 30]
    second.tokens += [ids[1][0], 31]
    ids = propose([5, 2], 3)
    # The first waits; of the second nothing is accepted, whatever its drafts were.
    second.tokens.append(32)
    propose([0, 1], 2)
    first.tokens.append(33)
    second.tokens += [34, 35]
    assert proposer.propose(driver.new([1, 2]), 0).token_ids_BK.shape == (2, 0)
    first.tokens.append(36)
    second.tokens.append(37)
    propose([1, 1], 4)
    # The first ends, the second takes its row.
    proposer.move(1, 0, len(second.tokens) - 1)
    driver.requests, driver.verified = [second], driver.verified[1:]
    second.tokens.append(38)
    propose([1], 4)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_draft_that_was_not_shown_the_prompt_catches_up(parallel: bool) -> None:
    """A verifier that had the beginning in its cache already shows only what it computes."""
    draft, stock = draft_of("dense", 0.02), draft_of("dense", 0.02)
    stock.model.set_attn_implementation("eager")
    expected = filled if parallel else continuation
    maker = ParallelDraftModelProposer if parallel else DraftModelProposer
    driver = Driver([PROMPTS[10], PROMPTS[12]])
    driver.verified = [len(request.tokens) - 2 for request in driver.requests]
    proposal = maker(draft, 3, 2).propose(driver.new([1, 1]), 3)
    assert proposal.token_ids_BK.tolist() == [expected(stock, request.tokens, 3) for request in driver.requests]


@torch.no_grad()
def test_the_drafts_keys_are_those_of_the_verified_tokens() -> None:
    """Pitfall 67: after drafts that were accepted or not, the cache equals a fresh pass over the answer."""
    verifier, draft = model_of(CONFIGS["dense"]()), draft_of("dense", 0.02)
    proposer = DraftModelProposer(draft, 3, 4)
    engine = Engine(verifier, proposer, limits=EngineLimits(max_num_seqs=4, max_model_len=64))
    for i in range(4):
        engine.add_request(str(i), PROMPTS[i + 4], SamplingParams(temperature=0, max_tokens=5 + 6 * i, ignore_eos=True))
    for _ in range(7):
        engine.step()
    assert engine.stats is not None
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    assert 0 < len(engine.running) < 4
    for row, request in enumerate(engine.running):
        count = len(request.tokens)
        fresh = draft.make_cache(1)
        write = SlotWrite.at(slice(0, 1), [0], count, draft.device)
        draft.forward(torch.tensor([request.tokens]), fresh, write)
        for mine, theirs in zip(proposer._cache.keys, fresh.keys, strict=True):
            assert mine is not None
            assert theirs is not None
            torch.testing.assert_close(mine[row, :, :count], theirs[0, :, :count], atol=1e-5, rtol=1e-4)


def sampled_params(count: int, length: int, **options: Any) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=length, ignore_eos=True, seed=i, **options) for i in range(count)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_drafts_of_the_verifier_itself_are_all_accepted(temperature: float) -> None:
    """p = q at every position, whatever was drawn; greedy requests of the same batch are accepted too."""
    verifier = model_of(CONFIGS["dense"]())
    params = sampled_params(12, 14, temperature=temperature)
    params[3] = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    outputs, engine = answers(
        verifier, DraftModelProposer(verifier, 3, 5, probabilistic=True), PROMPTS[:12], params, batch=5
    )
    assert engine.stats is not None
    assert engine.stats.num_drafts > 0
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 12


def test_a_seed_fixes_the_answer_whatever_else_is_served() -> None:
    verifier, draft = model_of(CONFIGS["dense"]()), draft_of("dense", 0.05)
    params = sampled_params(7, 12, temperature=0.9)
    for maker in (DraftModelProposer, ParallelDraftModelProposer):
        together, _ = answers(verifier, maker(draft, 3, 7, probabilistic=True), PROMPTS[:7], params, batch=7)
        for i in (0, 5):
            alone, _ = answers(verifier, maker(draft, 3, 1, probabilistic=True), [PROMPTS[i]], [params[i]], batch=1)
            assert tokens_of(alone)[0] == tokens_of(together)[i]


def small(noise: float) -> Verifier:
    config = LlamaConfig(**SIZES | {"vocab_size": 6, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
    config.pard_token = 5
    return model_of(config, seed=8, noise=noise)


def exact_law(verifier: Verifier, prompt: list[int], length: int) -> torch.Tensor:
    """The probability of every answer of `length` tokens, in lexicographic order, by a pass over each."""
    size = verifier.vocab_size
    endings = torch.cartesian_prod(*[torch.arange(size)] * length)
    rows = torch.cat([torch.tensor(prompt).expand(len(endings), -1), endings], 1)
    with torch.no_grad():
        law = verifier.model(input_ids=rows).logits.double().log_softmax(-1)
    chosen = law[:, len(prompt) - 1 : -1].gather(2, endings[:, :, None])[:, :, 0]
    return chosen.sum(1).exp()


PERMUTED = VocabMapping(torch.tensor([0, 2, 3, 5]), torch.tensor([4, 1, 0, 2]), torch.tensor([3, 2, 5, 4, 0, 1]))


@pytest.mark.parametrize(
    ("maker", "options"),
    [
        (DraftModelProposer, {"probabilistic": True}),
        (DraftModelProposer, {}),
        (DraftModelProposer, {"probabilistic": True, "vocabulary": PERMUTED}),
        (ParallelDraftModelProposer, {"probabilistic": True}),
    ],
)
def test_the_joint_law_of_three_tokens_is_the_verifiers(
    maker: type[DraftModelProposer], options: dict[str, Any]
) -> None:
    """Ids that the draft calls otherwise keep their probabilities; some it can never propose."""
    verifier, draft, draws, prompt = small(0.0), small(0.1), 2000, [1, 4]
    proposer = maker(draft, 3, 100, **options)
    outputs, engine = answers(
        verifier, proposer, [prompt] * draws, sampled_params(draws, 3, temperature=1.0), batch=100, max_model_len=16
    )
    codes = torch.tensor(tokens_of(outputs)) @ torch.tensor([36, 6, 1])
    counts = torch.bincount(codes, minlength=216).double()
    expected = draws * exact_law(verifier, prompt, 3)
    assert float(expected.sum()) == pytest.approx(draws, rel=1e-6)
    # Rare answers are counted together.
    rare = expected < 5
    counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < chi2.ppf(1 - 1e-6, len(expected) - 1)
    assert engine.stats is not None
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


@pytest.mark.parametrize("parallel", [False, True])
def test_requests_that_outgrow_the_drafts_context_go_on_without_it(
    parallel: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of them by itself, with one warning; the last drafts before are those that still fit."""
    verifier, draft = model_of(CONFIGS["dense"]()), draft_of("dense", 0.0)
    prompts = [[5, 6], [7] * 10, [8] * 30, [9, 10, 11]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 25, 10, 12)]
    plain, _ = answers(verifier, None, prompts, params, batch=3)
    proposer = draft_model_proposer(verifier, draft, 5, 3, parallel=parallel, max_length=20)
    with caplog.at_level(logging.WARNING):
        outputs, _ = answers(verifier, proposer, prompts, params, batch=3)
    assert tokens_of(outputs) == tokens_of(plain)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2
    assert all("it goes on without speculation" in message for message in warned)
    assert sorted(message.split(":")[0] for message in warned) == ["request 1", "request 2"]
    drafts = [output.outputs[0].spec_decode_metrics.to_dict()["num_draft_tokens"] for output in outputs]
    assert drafts[2] == 0
    assert min(drafts[0], drafts[1], drafts[3]) > 0
    if not parallel:
        # Of 10 tokens and one more, rounds of 5 at 11 and 17 tokens; 20 + 1 - 17 = 4 of the second fit.
        assert drafts[1] == 5 + 4
        assert outputs[1].outputs[0].accepted[:11] == [False, *[True] * 5, False, *[True] * 4]


def test_an_abort_leaves_the_other_requests_as_they_are() -> None:
    verifier, draft = model_of(CONFIGS["dense"]()), draft_of("dense", 0.02)
    params = greedy_params(20)[:4]
    plain = tokens_of(answers(verifier, None, PROMPTS[:4], params, batch=4)[0])
    engine = Engine(verifier, DraftModelProposer(draft, 3, 4), limits=EngineLimits(max_num_seqs=4, max_model_len=64))
    for i in range(4):
        engine.add_request(str(i), PROMPTS[i], params[i])
    engine.step()
    engine.abort("0")
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step()}
    assert [done[str(i)].outputs[0].token_ids for i in (1, 2, 3)] == plain[1:]


def test_the_mask_token_is_the_configs() -> None:
    for key in ("pard_token", "mask_token_id", "ptd_token_id"):
        config = LlamaConfig(**SIZES)
        setattr(config, key, 17)
        draft = model_of(config)
        assert mask_token_of(draft) == 17
        assert ParallelDraftModelProposer(draft, 2, 1).mask_token_id == 17
    with pytest.raises(EngineError, match=r"'random' has none of pard_token, mask_token_id, ptd_token_id"):
        ParallelDraftModelProposer(model_of(LlamaConfig(**SIZES)), 2, 1)
    config = LlamaConfig(**SIZES)
    config.pard_token = VOCAB
    with pytest.raises(EngineError, match=r"pard_token is 64 in its config; expected a token id in 0\.\.63"):
        mask_token_of(model_of(config))


def test_what_a_draft_model_cannot_do_is_refused_by_name() -> None:
    draft = model_of(CONFIGS["dense"]())
    with pytest.raises(EngineError, match="max_model_len=65 is more than the 64 positions of draft model 'random'"):
        DraftModelProposer(draft, 2, 1, max_length=65)
    with pytest.raises(EngineError, match="expected draft_sample_method='greedy'"):
        draft_model_proposer(draft, draft, 2, 1, heterogeneous=True, probabilistic=True)
    draft.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(EngineError, match="'random' has linear_attention layers"):
        DraftModelProposer(draft, 2, 1)
