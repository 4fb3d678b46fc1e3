"""Drafting without a trained draft, in the engine: the tokens of plain decoding, and counts of what was drafted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from speculators.models.draft_model import Proposal
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.proposers.custom import CustomProposer
from speculators.runtime.proposers.ngram import NgramProposer, VectorisedNgramProposer
from speculators.runtime.proposers.proposer import NewTokens, Proposer
from speculators.runtime.proposers.suffix import SuffixProposer
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.parts import random_verifier

LENGTH = 160
PROMPTS = [[(7 * i + place % (i + 2)) % 32 for place in range(3 + 5 * (i % 7))] for i in range(16)]


def ngram(_: Verifier, depth: int) -> Proposer:
    return NgramProposer(depth, prompt_lookup_min=1, prompt_lookup_max=3, max_model_len=LENGTH)


def ngram_gpu(_: Verifier, depth: int) -> Proposer:
    return VectorisedNgramProposer(depth, prompt_lookup_min=1, prompt_lookup_max=3, max_model_len=LENGTH)


def suffix(_: Verifier, depth: int) -> Proposer:
    return SuffixProposer(num_tokens=depth, max_spec_factor=2.0)


def custom(verifier: Verifier, depth: int) -> Proposer:
    path = "tests.runtime.custom_drafters.Repeating"
    return CustomProposer(path, num_tokens=depth, verifier=verifier, max_model_len=LENGTH, max_num_seqs=16)


METHODS: list[Callable[[Verifier, int], Proposer]] = [ngram, ngram_gpu, suffix, custom]


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return random_verifier(32, num_layers=2)


def greedy(max_tokens: int | None = 24, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def decode(
    verifier: Verifier,
    proposer: Proposer | None,
    params: Sequence[SamplingParams],
    *,
    batch: int = 3,
    length: int = LENGTH,
) -> tuple[list[RequestOutput], Engine]:
    """Run the first prompts, one for each of `params`."""
    engine = Engine(verifier, proposer, limits=EngineLimits(batch, length, 64), metrics_level="detailed")
    for place, one in enumerate(params):
        engine.add_request(str(place), PROMPTS[place], one)
    done = {}
    while engine.has_unfinished:
        done.update((output.request_id, output) for output in engine.step())
    return [done[str(place)] for place in range(len(params))], engine


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain(verifier: Verifier) -> list[list[int]]:
    """Plain greedy continuations, longer than any test asks for."""
    return tokens(decode(verifier, None, [greedy(60)] * len(PROMPTS), batch=16)[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", [1, 2, 3, 5, 7, 16])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_greedy_output_is_that_of_plain_decoding(
    verifier: Verifier, plain: list[list[int]], method: Callable[[Verifier, int], Proposer], depth: int, batch: int
) -> None:
    """Mixed lengths: some requests finish in the step in which others begin."""
    lengths = [9 + 4 * (i % 5) for i in range(5 if batch == 1 else 16)]
    outputs, engine = decode(verifier, method(verifier, depth), [greedy(n) for n in lengths], batch=batch)
    assert tokens(outputs) == [known[:n] for known, n in zip(plain, lengths, strict=False)]
    assert engine.stats is not None
    assert engine.stats.num_accepted_tokens > 0
    assert engine.stats.num_draft_tokens <= depth * engine.stats.num_drafts


@dataclass
class Recording:
    """A proposer whose drafts are written down: request, tokens it had, draft."""

    inner: Proposer

    def __post_init__(self) -> None:
        self.num_tokens, self.aux_layer_ids = self.inner.num_tokens, self.inner.aux_layer_ids
        self.verifier_ids_D = self.inner.verifier_ids_D
        self.observe, self.move, self.forget = self.inner.observe, self.inner.move, self.inner.forget
        self.drafts: list[tuple[str, int, list[int]]] = []

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        proposal = self.inner.propose(new, num_tokens)
        for request, ids, length in zip(
            new.requests, proposal.token_ids_BK.tolist(), proposal.lengths_B.tolist(), strict=True
        ):
            self.drafts.append((request.request_id, len(request.output_token_ids), ids[:length]))
        return proposal


@pytest.mark.parametrize("method", METHODS)
def test_counts_are_those_of_the_drafts_that_were_made(
    verifier: Verifier, plain: list[list[int]], method: Callable[[Verifier, int], Proposer]
) -> None:
    """Steps without a draft are not counted; accepted drafts are those that plain decoding agrees with."""
    proposer = Recording(method(verifier, 5))
    outputs, engine = decode(verifier, proposer, [greedy(24)] * 16, batch=16)
    steps: dict[str, tuple[list[int], list[int]]] = {str(i): ([], []) for i in range(16)}
    for name, start, draft in proposer.drafts:
        if draft:
            same = [one == known for one, known in zip(draft, plain[int(name)][start:], strict=False)]
            steps[name][0].append(len(draft))
            steps[name][1].append(([*same, False]).index(False))
    assert any(not draft for _, _, draft in proposer.drafts)
    assert len({len(draft) for _, _, draft in proposer.drafts}) > 1
    for output, (drafted, accepted) in zip(outputs, steps.values(), strict=True):
        assert output.outputs[0].spec_decode_metrics is not None
        found = output.outputs[0].spec_decode_metrics.to_dict()
        assert found.get("per_step_drafted", []) == drafted
        assert found.get("per_step_accepted", []) == accepted
    assert engine.stats is not None
    assert engine.stats.num_drafts == sum(len(drafted) for drafted, _ in steps.values())
    assert engine.stats.num_draft_tokens == sum(sum(drafted) for drafted, _ in steps.values())
    assert engine.stats.num_accepted_tokens == sum(sum(accepted) for _, accepted in steps.values()) > 0


@pytest.mark.parametrize("method", METHODS)
def test_ends_inside_the_window(
    verifier: Verifier, plain: list[list[int]], method: Callable[[Verifier, int], Proposer]
) -> None:
    """An end of sequence, the last token allowed and the length limit fall among accepted drafts; nothing follows."""
    inside = 0
    for limit in range(8, 20, 4):
        outputs, _ = decode(verifier, method(verifier, 7), [greedy(limit)] * 6)
        assert tokens(outputs) == [known[:limit] for known in plain[:6]]
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
        inside += sum(output.outputs[0].accepted[-1] for output in outputs)
        ends = [known[limit] for known in plain[:6]]
        cut = [known[: known.index(end) + 1] for known, end in zip(plain, ends, strict=False)]
        outputs, _ = decode(verifier, method(verifier, 7), [greedy(60, stop_token_ids=[end]) for end in ends])
        assert tokens(outputs) == cut
        assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
        inside += sum(output.outputs[0].accepted[-1] for output in outputs)
    assert inside > 2


@pytest.mark.parametrize("method", METHODS)
def test_the_length_limit_is_never_passed(
    verifier: Verifier, plain: list[list[int]], method: Callable[[Verifier, int], Proposer]
) -> None:
    length = 44
    outputs, engine = decode(verifier, method(verifier, 16), [greedy(None)] * 6, length=length)
    assert tokens(outputs) == [known[: length - len(ask)] for known, ask in zip(plain, PROMPTS, strict=False)][:6]
    assert engine.stats is not None
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_kept_of_requests_that_have_left(
    verifier: Verifier, plain: list[list[int]], method: Callable[[Verifier, int], Proposer]
) -> None:
    """An aborted request's id comes again with another prompt, beside one that never left."""
    engine = Engine(verifier, method(verifier, 5), limits=EngineLimits(3, LENGTH, 64))
    for name, prompt in [("again", 0), ("left", 1), ("stays", 2)]:
        engine.add_request(name, PROMPTS[prompt], greedy(40))
    for _ in range(4):
        engine.step()
    engine.abort("again")
    engine.abort("left")
    engine.add_request("again", PROMPTS[3], greedy(40))
    done: dict[str, list[int]] = {}
    while engine.has_unfinished:
        done.update((output.request_id, output.outputs[0].token_ids) for output in engine.step())
    assert done == {"stays": plain[2][:40], "again": plain[3][:40]}
