"""Constraints on logits: each position of a draft window against transformers' processors run on its own history."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from speculators.errors import RequestError
from speculators.models.draft_model import Proposal
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.logits_processors import ConstraintBuilder, Constraints, process
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.request import Request
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.parts import random_speculator, random_verifier
from tests.tiny_models import make_tokenizer

TOKENIZER = make_tokenizer()
VOCAB, EOS = 400, 1
BUILDER = ConstraintBuilder(TOKENIZER, VOCAB, frozenset({EOS}))
PROMPT = TOKENIZER("the old oak tree")["input_ids"]


@dataclass
class Row:
    """A request as `process` sees it."""

    tokens: list[int]
    drafts: list[int]
    constraints: Constraints | None


def row(params: SamplingParams, output: Sequence[int], drafts: Sequence[int], prompt: Sequence[int] = PROMPT) -> Row:
    return Row([*prompt, *output], list(drafts), BUILDER.build(params, prompt))


def words(*texts: str) -> list[list[int]]:
    """Ids of each text at a text's beginning and after a space, as vLLM forbids it."""
    found = []
    for text in texts:
        plain = TOKENIZER.encode(text, add_special_tokens=False)
        spaced = TOKENIZER.encode(f" {text}", add_special_tokens=False)
        found += [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]
    return found


def reference(logits_V: Tensor, params: SamplingParams, output: list[int]) -> np.ndarray:
    """One position by transformers' processors, in vLLM's order; presence and frequency by their definition."""
    whole, own = torch.tensor([[*PROMPT, *output]]), torch.tensor([[VOCAB - 1, *output]])
    steps: list[tuple[LogitsProcessor, Tensor]] = []
    if params.allowed_token_ids is not None:
        steps.append((PrefixConstrainedLogitsProcessor(lambda *_: params.allowed_token_ids, 1), whole))
    if params.bad_words:
        # Bad words look at the output alone; the first token stands for "nothing before".
        steps.append((NoBadWordsLogitsProcessor(words(*params.bad_words)), own))
    if params.min_tokens:
        ends = sorted({EOS, *(params.stop_token_ids or ())})
        steps.append((MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, ends), whole))
    if params.logit_bias:
        steps.append((SequenceBiasLogitsProcessor([[[t], float(b)] for t, b in params.logit_bias.items()]), whole))
    if params.repetition_penalty != 1:
        steps.append((RepetitionPenaltyLogitsProcessor(params.repetition_penalty), whole))
    scores = logits_V[None].clone()
    for processor, ids in steps:
        scores = processor(ids, scores)
    found = scores[0].numpy().copy()
    for token in set(output):
        found[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return found


OAK = words("oak")[-1]
CASES = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.75},
    "repetition": {"repetition_penalty": 1.3},
    "repetition below one": {"repetition_penalty": 0.8},
    "bias": {"logit_bias": {7: 4.5, 300: -100, 60: 0.25}},
    "allowed": {"allowed_token_ids": [3, 60, 61, 62, 200, 399]},
    "bad words": {"bad_words": ["oak", "tree", "a river", "x"]},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [61, 90]},
    "everything": {
        "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {61: 9.0, 1: 50.0},
        "allowed_token_ids": [1, *range(50, 300)], "bad_words": ["oak tree", "z"], "min_tokens": 5,
        "stop_token_ids": [62],
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_position_is_processed_as_its_own_history_asks(case: str) -> None:
    params = SamplingParams(**CASES[case])
    a_river = TOKENIZER.encode(" a river", add_special_tokens=False)
    histories = [
        ([], [60, 60, OAK[0]]),
        ([61, 61, 3], [61, 200, 61]),
        (OAK[:-1], [OAK[-1], a_river[0], a_river[1] if len(a_river) > 1 else 5]),
        ([60] * 7, []),
        (list(range(60, 64)), [EOS]),
    ]
    rows = [row(params, output, drafts) for output, drafts in histories]
    rows.insert(2, Row([5, 6, 7], [8, 9, 10], None))
    logits = 3 * torch.randn(6, 4, VOCAB, generator=torch.Generator().manual_seed(1))
    given = logits.clone()
    processed = process(logits, rows)
    assert torch.equal(logits, given)
    assert torch.equal(processed[2], given[2])
    changed = 0
    for b, one in enumerate(rows):
        if one.constraints is None:
            continue
        for t in range(len(one.drafts) + 1):
            output = [*one.tokens[len(PROMPT) :], *one.drafts[:t]]
            expected = reference(given[b, t], params, output)
            np.testing.assert_allclose(processed[b, t], expected, atol=1e-5, err_msg=f"row {b} position {t}")
            changed += not np.array_equal(expected, given[b, t].numpy())
        assert one.constraints.exhausted == {}
    assert changed > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_committed_tokens_are_counted_once_and_rejected_drafts_never(dtype: torch.dtype) -> None:
    """Over the steps of a request, drafts that were not kept leave no trace."""
    params = SamplingParams(**CASES["everything"])
    one = row(params, [], [])
    generator = torch.Generator().manual_seed(2)
    for step in range(6):
        one.drafts = [60 + step, 61, 60 + step][: step % 4]
        logits = (3 * torch.randn(1, 4, VOCAB, generator=generator)).to(dtype)
        processed = process(logits, [one])
        assert processed.dtype == torch.float32
        output = one.tokens[len(PROMPT) :]
        for t in range(len(one.drafts) + 1):
            expected = reference(logits[0, t].float(), params, [*output, *one.drafts[:t]])
            np.testing.assert_allclose(processed[0, t], expected, atol=1e-5)
        one.tokens += [*one.drafts[:1], 70 + step]


def test_a_request_without_constraints_costs_nothing() -> None:
    logits = torch.randn(2, 3, VOCAB)
    params = SamplingParams(temperature=0.5, top_k=3, min_p=0.1, logprobs=2, stop="x", logit_bias={}, bad_words=[])
    rows = [row(params, [1], [2, 3]), row(SamplingParams(), [], [])]
    assert process(logits, rows) is logits


def test_positions_of_a_tree_follow_their_own_branch() -> None:
    """Paths say which drafts lie before a position: siblings do not see each other."""
    params = SamplingParams(presence_penalty=1.0, repetition_penalty=1.5, bad_words=["oak"])
    paths = [[[], [60], [61], [60, OAK[0]], [61, 60]]]
    one = row(params, [62], [60, 61, OAK[0], 60])
    logits = torch.randn(1, 5, VOCAB, generator=torch.Generator().manual_seed(3))
    processed = process(logits, [one], paths)
    for t, path in enumerate(paths[0]):
        np.testing.assert_allclose(processed[0, t], reference(logits[0, t], params, [62, *path]), atol=1e-5)


def test_positions_without_a_token_left_are_told_and_stay_finite() -> None:
    params = SamplingParams(allowed_token_ids=[EOS, 60], min_tokens=3, bad_words=[TOKENIZER.decode([60]) * 2])
    assert words(TOKENIZER.decode([60]) * 2)[0] == [60, 60]
    one = row(params, [], [60, 60, EOS])
    processed = process(torch.randn(1, 4, VOCAB), [one])
    assert one.constraints is not None
    # After one token 60, another is a bad word, and the end comes too early.
    assert set(one.constraints.exhausted) == {(60,), (60, 60)}
    assert "allowed_token_ids, bad_words, min_tokens" in one.constraints.exhausted[(60,)]
    assert processed.isfinite().any(-1).all()


@pytest.mark.parametrize(
    ("params", "words_of_it"),
    [
        ({"logit_bias": {400: 1.0}}, "logit_bias has token id 400, which is outside 0..399"),
        ({"allowed_token_ids": [1, 4000]}, "allowed_token_ids has token id 4000, which is outside 0..399"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(params: dict[str, object], words_of_it: str) -> None:
    with pytest.raises(RequestError, match=words_of_it) as caught:
        BUILDER.build(SamplingParams(**params), PROMPT)
    assert caught.value.parameter == next(iter(params))


def test_bad_words_need_a_tokenizer() -> None:
    builder = ConstraintBuilder(None, 8, frozenset())
    with pytest.raises(RequestError, match="bad_words need a tokenizer"):
        builder.build(SamplingParams(bad_words=["x"]), [1])


# Sampled outputs against the exact law

SMALL, DEPTH, DRAWS = 5, 3, 5000
SAMPLED = {
    "penalties": {"repetition_penalty": 1.6, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    "bias and allowed": {"logit_bias": {0: 1.5, 3: -1.0}, "allowed_token_ids": [0, 2, 3]},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [1], "presence_penalty": -0.8},
}


def small_reference(logits_V: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """The law of one token by definition."""
    scores = logits_V.astype(np.float64)
    for token in range(SMALL):
        allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        early = len(output) < params.min_tokens and token in (params.stop_token_ids or ())
        scores[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in [*prompt, *output]:
            scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
        scores[token] -= params.frequency_penalty * output.count(token)
        scores[token] -= params.presence_penalty * (token in output)
        if early or not allowed:
            scores[token] = -np.inf
    weights = np.exp((scores - scores.max()) / params.temperature)
    return weights / weights.sum()


def exact_law(verifier: Verifier, params: SamplingParams, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Probability of each output of up to DEPTH tokens, where a stop token ends it."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DEPTH):
        after: dict[tuple[int, ...], float] = {}
        for output, mass in law.items():
            if output and output[-1] in (params.stop_token_ids or ()):
                after[output] = mass
                continue
            logits = verifier.model(torch.tensor([[*prompt, *output]])).logits[0, -1].double().numpy()
            for token, share in enumerate(small_reference(logits, params, prompt, list(output))):
                after[(*output, token)] = mass * float(share)
        law = after
    return {output: mass for output, mass in law.items() if mass > 0}


@pytest.mark.parametrize(
    ("case", "draft"), [("penalties", "probabilistic"), ("bias and allowed", "probabilistic"), ("min_tokens", "greedy")]
)
def test_sampled_outputs_follow_the_law_of_the_processed_logits(case: str, draft: str) -> None:
    """Joint law of three tokens through the engine with drafts that are partly accepted, by chi-square."""
    verifier, prompt = random_verifier(SMALL, num_layers=4, seed=5), [2, 4]
    params = SamplingParams(temperature=0.9, max_tokens=DEPTH, **SAMPLED[case])
    law = exact_law(verifier, params, prompt)
    proposer = DraftHeadProposer(random_speculator(verifier).draft, 2, 200, probabilistic=draft == "probabilistic")
    engine = Engine(verifier, proposer, limits=EngineLimits(200, 16), seed=11)
    counts = dict.fromkeys(law, 0)
    for name in range(DRAWS):
        engine.add_request(str(name), prompt, params)
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                counts[tuple(output.outputs[0].token_ids)] += 1
    assert engine.stats is not None
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    assert sum(counts.values()) == DRAWS
    rare = [output for output, mass in law.items() if mass * DRAWS < 5]
    kept = [output for output in law if output not in rare]
    observed = [*(counts[output] for output in kept), sum(counts[output] for output in rare)]
    expected = [*(law[output] * DRAWS for output in kept), sum(law[output] for output in rare) * DRAWS]
    cells = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 0]
    assert chisquare(*zip(*cells, strict=True)).pvalue > 1e-4


class FixedDrafts:
    """Drafts the same tokens whatever came before."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens, self.num_tokens = tokens, len(tokens)
        self.aux_layer_ids: Sequence[int] = ()
        self.verifier_ids_D: Tensor | None = None

    def observe(self, new: NewTokens) -> None:
        """Nothing to keep."""

    def forget(self, request: Request) -> None:
        """Nothing is kept."""

    def move(self, source: int, target: int, length: int) -> None:
        """Nothing to move."""

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        """The same for every row."""
        ids = torch.tensor([self._tokens] * len(new.requests))
        return Proposal(ids, torch.full((len(ids),), num_tokens))


def test_forbidden_drafts_are_never_emitted() -> None:
    """Every draft is a token that the request does not allow, greedy or sampled."""
    verifier = random_verifier(SMALL)
    for temperature, drafts in itertools.product((0, 1.3), ([1, 1], [3, 1])):
        engine = Engine(verifier, FixedDrafts(drafts), limits=EngineLimits(8, 32))
        for name in range(8):
            params = SamplingParams(temperature=temperature, max_tokens=20, allowed_token_ids=[0, 2, 3])
            engine.add_request(str(name), [4, 1], params)
        tokens = set()
        while engine.has_unfinished:
            tokens.update(token for output in engine.step() for token in output.outputs[0].token_ids)
        assert tokens
        assert tokens <= {0, 2, 3}
