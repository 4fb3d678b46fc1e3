"""Rules through the whole engine: laws with batch reordering, synthetic acceptance, and noise of one's own."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.rejection import Verification
from speculators.runtime.rules import (
    AscendBlockRule,
    BlockRule,
    EntropyRule,
    Rule,
    SampledRows,
    StandardRule,
    SyntheticRule,
)
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.laws import MixedDepths, of_engine
from tests.runtime.parts import random_speculator, random_verifier

REQUESTS = 1000
LOSSLESS = [StandardRule(), BlockRule()]


@pytest.mark.parametrize("rule", LOSSLESS, ids=lambda rule: rule.name)
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_the_first_four_tokens_follow_the_verifier(rule: Rule, method: str) -> None:
    """Requests end at different times, some drafts are cut, and the draft knows two of the three tokens."""
    line = of_engine(rule, method, REQUESTS, mixed=True, draft_vocab_size=2)
    assert (line.rule, line.draft) == (rule.name, f"{method}, mixed K, reduced vocabulary")
    assert line.p > 1e-3


@dataclass(frozen=True)
class MistakenRows(Rule):
    """Takes the draft's probabilities from the row before."""

    name: ClassVar[str] = "mistaken"

    def verify_sampled(self, rows: SampledRows) -> Verification:
        draft = rows.draft_probs_BKV
        return BlockRule().verify_sampled(replace(rows, draft_probs_BKV=None if draft is None else draft.roll(1, 0)))


def test_the_law_tells_when_rows_are_mistaken() -> None:
    assert of_engine(MistakenRows(), "probabilistic", 2 * REQUESTS).p < 1e-9


def engine_of(verifier: Verifier, rule: Rule | None, *, depth: int = 3, slots: int = 16, mixed: bool = False) -> Engine:
    proposer = DraftHeadProposer(random_speculator(verifier).draft, depth, slots, probabilistic=True)
    limits = EngineLimits(max_num_seqs=slots, max_model_len=200)
    return Engine(verifier, MixedDepths(proposer) if mixed else proposer, limits=limits, rule=rule)


def tokens_of(engine: Engine, params: dict[int, SamplingParams]) -> dict[int, list[int]]:
    """What requests of these numbers get, prompts being made of their numbers."""
    for number, chosen in params.items():
        engine.add_request(str(number), [number + 1, 2 * number, 7], chosen)
    done = {}
    while engine.has_unfinished:
        for output in engine.step():
            done[int(output.request_id)] = output.outputs[0].token_ids
    return done


def mixed_params(number: int) -> SamplingParams:
    return SamplingParams(temperature=0.9 * (number % 2), max_tokens=6 + 5 * number, seed=100 + number)


@pytest.mark.parametrize("greedy", [True, False])
def test_synthetic_acceptance_is_what_was_asked(greedy: bool) -> None:
    """Over 5,000 verifications by the engine's own counts, with drafts that the verifier hardly ever agrees with."""
    rule = SyntheticRule((0.9, 0.7, 0.5))
    engine = engine_of(random_verifier(32), rule, slots=64)
    params = SamplingParams(temperature=0 if greedy else 1, max_tokens=181)
    assert engine.stats is not None
    while engine.stats.num_drafts < 5000:
        for number in range(64):
            engine.add_request(f"{engine.stats.num_drafts}-{number}", [number % 15 + 1, 7], params)
        while engine.has_unfinished:
            engine.step()
    assert engine.stats.acceptance_length == pytest.approx(1 + 0.9 + 0.63 + 0.315, rel=0.02)


@pytest.mark.parametrize(("rates", "length"), [((0.0, 0.0, 0.0), 1), ((1.0, 1.0, 1.0), 4)])
def test_a_rate_of_zero_never_accepts_and_one_always(rates: tuple[float, ...], length: int) -> None:
    engine = engine_of(random_verifier(32), SyntheticRule(rates))
    tokens_of(engine, {number: SamplingParams(temperature=number % 2, max_tokens=41) for number in range(8)})
    assert engine.stats is not None
    assert engine.stats.num_drafts > 0
    assert engine.stats.acceptance_length == length


@pytest.mark.parametrize(
    "rule", [*LOSSLESS, SyntheticRule((0.9, 0.5, 0.5)), EntropyRule(), AscendBlockRule()], ids=lambda rule: rule.name
)
def test_a_requests_tokens_do_not_depend_on_the_batch(rule: Rule) -> None:
    """Alone, or among others that start later, end sooner, and have more or fewer drafts than it."""
    verifier = random_verifier(32)
    params = {number: mixed_params(number) for number in range(6)}
    together = tokens_of(engine_of(verifier, rule, slots=3, mixed=True), params)
    for number in (1, 4, 5):
        alone = tokens_of(engine_of(verifier, rule, slots=3, mixed=True), {number: params[number]})
        assert alone[number] == together[number]


def test_greedy_requests_are_exact_under_every_rule_but_the_synthetic() -> None:
    verifier = random_verifier(32)
    params = {number: SamplingParams(temperature=0, max_tokens=30) for number in range(4)}
    plain = tokens_of(Engine(verifier, limits=EngineLimits(max_model_len=200)), params)
    for rule in (None, *LOSSLESS, EntropyRule(), AscendBlockRule()):
        assert tokens_of(engine_of(verifier, rule), params) == plain
    assert tokens_of(engine_of(verifier, SyntheticRule((1.0, 1.0, 1.0))), params) != plain


def test_rules_make_different_outputs_of_the_same_noise() -> None:
    """The rule that is given is the one that verifies; without one it is the standard rule."""
    verifier = random_verifier(32)
    params = {number: SamplingParams(max_tokens=40, seed=number) for number in range(4)}
    rules = (*LOSSLESS, SyntheticRule((0.5, 0.5, 0.5)), EntropyRule(), AscendBlockRule())
    found = [str(tokens_of(engine_of(verifier, rule), params)) for rule in rules]
    assert len(set(found)) == len(rules)
    assert str(tokens_of(engine_of(verifier, None), params)) == found[0]
