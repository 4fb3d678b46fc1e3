"""Policies of depth in the engine: what it refuses, and that no policy changes what is generated."""

import logging
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from speculators.errors import EngineError
from speculators.models.draft_model import Proposal
from speculators.models.speculator import Speculator
from speculators.runtime.adaptive import AdaptiveVerification
from speculators.runtime.confidence import ConfidenceBudget
from speculators.runtime.depth import DepthPolicy, DraftContextLimit, StaticDepth, depth_of
from speculators.runtime.depth_table import BatchSizeTable
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.request import Request
from speculators.runtime.sampling import SamplingParams, probabilities
from speculators.runtime.step_costs import CostTable, StepCosts
from speculators.runtime.verifier import Verifier
from tests.models.by_heart import fresh_speculator, tiny_verifier
from tests.models.drafts import randomize
from tests.runtime.parts import random_speculator, random_verifier


class Silent:
    """A proposer that says nothing about how sure it is."""

    num_tokens, aux_layer_ids, verifier_ids_D = 3, (), None


class Random:
    """Verifies a random number of drafts, which is as much trimming as there can be."""

    needs_certainty = False

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self._generator = num_tokens, torch.Generator().manual_seed(0)

    def tokens_to_draft(self, num_requests: int) -> int:
        return int(torch.randint(self.num_tokens + 1, (), generator=self._generator))

    def verification_lengths(self, proposal: Proposal, requests: Sequence[Request]) -> list[int]:
        rates = torch.rand(len(requests), generator=self._generator)
        return (rates * (proposal.lengths_B + 1)).long().tolist()

    def learn(self, request: Request, num_accepted: int) -> None:
        assert 0 <= num_accepted <= len(request.drafts)


def costs(flat: float = 10.0, token: float = 1.0, *, padded: bool = False) -> StepCosts:
    """A pass costs `flat` and `token` for every token; drafting is free."""
    table = {
        count: CostTable({count: flat + token * count, 20 * count: flat + 20 * token * count}) for count in (1, 64)
    }
    return StepCosts(table, {1: CostTable({0: 0.0})}, padded)


def policies(most: int) -> dict[str, DepthPolicy]:
    return {
        "random": Random(most),
        "table": BatchSizeTable([[1, 1, 1], [2, 3, most], [4, 5, 0], [6, 9, 2]], most, 9),
        "budget": ConfidenceBudget(
            most, from_head=False, initial_verify_budget_per_req=2, budget_update_interval=2, min_verify_tokens=0
        ),
        "adaptive": AdaptiveVerification(most, costs()),
        "padded": AdaptiveVerification(most, costs(padded=True)),
        "short context": DraftContextLimit(StaticDepth(most), 24),
    }


def test_what_an_engine_cannot_follow_is_refused() -> None:
    assert depth_of(None, None).num_tokens == 0
    assert depth_of(Silent(), None).tokens_to_draft(5) == 3
    with pytest.raises(EngineError, match="there is no speculation; give a proposer"):
        depth_of(None, StaticDepth(2))
    with pytest.raises(EngineError, match="asks for up to 4 tokens, but the proposer drafts 3"):
        depth_of(Silent(), StaticDepth(4))
    with pytest.raises(EngineError, match="needs the draft's confidence in each token, which Silent does not tell"):
        depth_of(Silent(), AdaptiveVerification(3, costs()))


PROMPTS = [[1, 2, 3], [7] * 20, [4], [9, 8, 7, 6, 5], [2, 4, 2, 4, 2, 4], [11, 30], [5, 5, 9]]


def serve(
    verifier: Verifier, speculator: Speculator | None, depth: DepthPolicy | None, params: Sequence[SamplingParams]
) -> tuple[list[list[int]], Engine]:
    """Seven requests in five slots, which begin and end at different times."""
    proposer = None
    if speculator is not None:
        most = 3 if depth is None else depth.num_tokens
        proposer = DraftHeadProposer(speculator.draft, most, 5, probabilistic=True)
    engine = Engine(verifier, proposer, limits=EngineLimits(5, 64, 32), depth=depth)
    answers: dict[str, list[int]] = {}
    for place, (prompt, one) in enumerate(zip(PROMPTS, params, strict=True)):
        engine.add_request(str(place), prompt, one)
    while engine.has_unfinished:
        for output in engine.step():
            answers[output.request_id] = output.outputs[0].token_ids
    return [answers[str(place)] for place in range(len(PROMPTS))], engine


@pytest.mark.parametrize("name", policies(3))
def test_greedy_answers_are_the_verifiers_whatever_the_depth(name: str) -> None:
    verifier = random_verifier(32)
    params = [SamplingParams(temperature=0, max_tokens=8 + 3 * place) for place in range(len(PROMPTS))]
    plain, _ = serve(verifier, None, None, params)
    answers, engine = serve(verifier, random_speculator(verifier), policies(3)[name], params)
    assert answers == plain
    assert engine.stats is not None
    assert engine.stats.num_drafts > 0
    assert engine.num_speculative_tokens == 3
    _, static = serve(verifier, random_speculator(verifier), None, params)
    assert static.stats is not None
    assert engine.stats.num_draft_tokens < static.stats.num_draft_tokens


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_block_drafts_tell_how_sure_they_are(family: str) -> None:
    """Without a head, the top probability; with one, its confidence. Greedy answers stay the verifier's."""
    verifier = tiny_verifier()
    speculator = fresh_speculator(family, verifier)
    randomize(speculator, 5)
    params = [SamplingParams(temperature=0, max_tokens=8 + 3 * place) for place in range(len(PROMPTS))]
    plain, _ = serve(verifier, None, None, params)
    depth = ConfidenceBudget(3, from_head=family == "dspark", budget_update_interval=2, budget_threshold=0.5)
    answers, engine = serve(verifier, speculator, depth, params)
    assert answers == plain
    assert engine.stats is not None
    assert engine.stats.drafted_per_position[0] == engine.stats.num_drafts
    if family == "dflash":
        with pytest.raises(EngineError, match="this draft does not give a confidence head"):
            serve(verifier, speculator, ConfidenceBudget(3, from_head=True), params)


def test_short_drafts_stop_for_the_long_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    verifier = random_verifier(32)
    proposer = DraftHeadProposer(random_speculator(verifier).draft, 3, 2)
    engine = Engine(verifier, proposer, limits=EngineLimits(2, 200), depth=DraftContextLimit(StaticDepth(3), 30))
    for name, prompt in (("short", [1, 2]), ("long", [3] * 40), ("longer", [4] * 50)):
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=12))
    seen: dict[str, set[int]] = {"short": set(), "long": set(), "longer": set()}
    with caplog.at_level(logging.WARNING):
        while engine.has_unfinished:
            engine.step()
            for request in engine.running:
                seen[request.request_id].add(len(request.drafts))
    assert seen == {"short": {3}, "long": {0}, "longer": {0}}
    (line,) = caplog.messages
    assert line.startswith("request long has 41 tokens and the draft a context of 30")


DRAWS = 6000


def exact_law(verifier: Verifier, prompt: list[int]) -> np.ndarray:
    """Probabilities of the first two tokens after a prompt, [V * V]."""
    vocab, params = verifier.vocab_size, SamplingParams(temperature=1.0)
    first = probabilities(verifier.model(torch.tensor([prompt])).logits[:, -1].detach(), [params])[0].double()
    rows = torch.tensor([[*prompt, token] for token in range(vocab)])
    second = probabilities(verifier.model(rows).logits[:, -1].detach(), [params] * vocab).double()
    return (first[:, None] * second).flatten().numpy()


@pytest.mark.parametrize("name", ["random", "budget", "adaptive"])
def test_sampled_law_is_the_verifiers_whatever_the_depth(name: str) -> None:
    """Joint law of the second and third token; the first is drawn without drafts. Chi-square, V = 6."""
    verifier = random_verifier(6, hidden_size=16, num_layers=3, wide=0.4)
    speculator = random_speculator(verifier)
    prompt = [1, 2, 3]
    proposer = DraftHeadProposer(speculator.draft, 3, 100, probabilistic=True)
    engine = Engine(verifier, proposer, limits=EngineLimits(100, 16), depth=policies(3)[name])
    for place in range(DRAWS):
        engine.add_request(str(place), prompt, SamplingParams(temperature=1.0, max_tokens=3), decode_text=False)
    triples = []
    while engine.has_unfinished:
        triples += [output.outputs[0].token_ids for output in engine.step() if output.finished]
    assert engine.stats is not None
    assert 0 < engine.stats.num_draft_tokens < 2 * engine.stats.num_drafts
    counts = torch.zeros(6, 6, 6, dtype=torch.float64)
    for one in triples:
        counts[tuple(one)] += 1
    statistic, freedom = 0.0, 0
    for first in range(6):
        row = counts[first].flatten().numpy()
        expected = exact_law(verifier, [*prompt, first]) * row.sum()
        kept = expected >= 5
        rest = expected[~kept].sum()
        statistic += float(((row[kept] - expected[kept]) ** 2 / expected[kept]).sum())
        if rest > 1:
            statistic += float((row[~kept].sum() - rest) ** 2 / rest)
        freedom += int(kept.sum()) - (rest <= 1)
    assert freedom > 60
    assert statistic < chi2.ppf(1 - 1e-5, freedom)


def test_a_pass_computes_the_tokens_that_rows_have_and_not_their_padding() -> None:
    """Counted where the first layer's keys are made; a multiple of 8, while rows have up to five tokens."""
    verifier, rows = random_verifier(32), [0]
    counted = verifier.model.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda module, inputs, output: rows.__setitem__(0, rows[0] + inputs[0].shape[:-1].numel())
    )
    proposer = DraftHeadProposer(random_speculator(verifier).draft, 4, 8)
    engine = Engine(verifier, proposer, limits=EngineLimits(8, 64), depth=Random(4))
    for place in range(8):
        engine.add_request(str(place), [place + 1], SamplingParams(temperature=0, max_tokens=30))
    padded = 0
    while len(engine.running) == 8 or engine.waiting:
        before = rows[0]
        lengths = [1 + len(request.drafts) for request in engine.running] or [1] * 8
        engine.step()
        size = 8 * max(lengths)
        assert rows[0] - before == min(size, 8 * -(-sum(lengths) // 8))
        padded += size
    counted.remove()
    assert rows[0] < 0.8 * padded
