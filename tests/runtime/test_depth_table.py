"""The table of depths by batch size: what it says, what it refuses, and that the engine obeys it."""

import logging

import pytest
import torch

from speculators.errors import EngineError
from speculators.models.draft_model import Proposal
from speculators.runtime.depth_table import BatchSizeTable
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.parts import random_speculator, random_verifier

RANGES = [[9, 10, 0], [1, 2, 4], [3, 5, 2], [6, 6, 1]]
# 7 and 8 lie in a gap, 11 and 12 after the last range.
DEPTHS = [4, 4, 2, 2, 2, 1, 1, 1, 0, 0, 0, 0]


def test_gaps_and_the_tail_carry_on() -> None:
    table = BatchSizeTable(RANGES, 4, 12)
    assert [table.tokens_to_draft(size) for size in range(1, 13)] == DEPTHS
    assert [table.tokens_to_draft(size) for size in range(12, 0, -1)] == DEPTHS[::-1]
    assert table.num_tokens == 4
    assert not table.needs_certainty


def test_ranges_may_go_beyond_the_largest_batch() -> None:
    table = BatchSizeTable([(1, 64, 3), (65, 128, 1), (129, 512, 0)], 3, 16)
    assert {table.at(size) for size in range(1, 17)} == {3}
    assert table.at(1000) == 3


def test_more_than_the_static_depth_is_cut_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The example of vLLM's guide: 5 and 4 where num_speculative_tokens is 3."""
    with caplog.at_level(logging.WARNING):
        table = BatchSizeTable([[1, 16, 5], [17, 32, 4], [33, 64, 3], [65, 128, 1], [129, 512, 0]], 3, 512)
    assert [table.at(size) for size in (1, 16, 17, 33, 64, 65, 128, 129, 512)] == [3, 3, 3, 3, 3, 1, 1, 0, 0]
    (line,) = caplog.messages
    assert "[1, 16, 5], [17, 32, 4] asks for more than num_speculative_tokens=3" in line


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ("1-4", "expected a list of ranges"),
        (None, "expected a list of ranges"),
        ([], "is empty"),
        ([[1, 4]], r"\[1, 4\] is no range"),
        ([[1, 4, 3, 2]], "is no range"),
        ([[1, 4, "3"]], "is no range"),
        ([[1, 4, 3.0]], "is no range"),
        ([[True, 4, 3]], "is no range"),
        ([7], "7 is no range"),
        ([[0, 4, 3]], "has batch size 0; batch sizes are at least 1"),
        ([[1, -4, 3]], "has batch size -4"),
        ([[4, 1, 3]], "begins at 4 and ends before it, at 1"),
        ([[1, 4, -1]], "drafts -1 tokens"),
        ([[1, 4, 3], [4, 8, 1]], r"\[1, 4, 3\] and \[4, 8, 1\] overlap: both have batch size 4.*begin at 5"),
        ([[1, 8, 3], [2, 3, 1]], "overlap"),
        ([[2, 4, 3]], "first range begins at batch size 2; the lowest must begin at 1"),
    ],
)
def test_each_fault_of_a_range_is_named(ranges: object, words: str) -> None:
    with pytest.raises(EngineError, match=f"^num_speculative_tokens_per_batch_size.*{words}"):
        BatchSizeTable(ranges, 3, 16)


@pytest.mark.parametrize("hysteresis", [-1, 1.0, True, "2", None])
def test_hysteresis_is_a_whole_number(hysteresis: object) -> None:
    with pytest.raises(EngineError, match=r"hysteresis=.*expected a whole number of at least 0"):
        BatchSizeTable(RANGES, 4, 12, hysteresis)


def test_hysteresis_keeps_a_depth_at_the_border() -> None:
    """With 1, the depth changes when even the batch size one nearer has another."""
    sizes = [2, 3, 2, 3, 4, 3, 2, 3, 2, 1, 9, 8, 7, 8]
    plain, steady = BatchSizeTable(RANGES, 4, 12), BatchSizeTable(RANGES, 4, 12, hysteresis=1)
    assert [plain.tokens_to_draft(size) for size in sizes] == [4, 2, 4, 2, 2, 2, 4, 2, 4, 4, 0, 1, 1, 1]
    assert [steady.tokens_to_draft(size) for size in sizes] == [4, 4, 4, 4, 2, 2, 2, 2, 2, 4, 0, 0, 1, 1]


class Watched(DraftHeadProposer):
    """A draft that keeps count of what it was asked for."""

    def __init__(self, verifier: Verifier, num_tokens: int) -> None:
        super().__init__(random_speculator(verifier).draft, num_tokens, 10)
        self.asked: list[tuple[int, int]] = []
        self.drafts: dict[tuple[int, ...], list[int]] = {}

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        proposal = super().propose(new, num_tokens)
        self.asked.append((len(new.requests), num_tokens))
        for request, row in zip(new.requests, proposal.token_ids_BK.tolist(), strict=True):
            self.drafts[tuple(request.tokens)] = row
        return proposal


def serve_up_and_down(verifier: Verifier, depth: BatchSizeTable | None) -> tuple[list[list[int]], Watched, list[int]]:
    """A request more each round until ten run, then one after another ends; answers, proposer, sizes of batches."""
    proposer, sizes = Watched(verifier, 4), []
    limits = EngineLimits(max_num_seqs=10, max_model_len=200)
    engine = Engine(verifier, proposer, limits=limits, depth=depth)
    answers: dict[str, list[int]] = {}
    step = 0
    while step < 10 or engine.has_unfinished:
        if step < 10:
            # The first to come has the shortest answer, but none ends before all are there.
            params = SamplingParams(temperature=0, max_tokens=60 + 6 * step)
            engine.add_request(str(step), [step + 1, 2 * step, 7], params)
        for output in engine.step():
            answers[output.request_id] = output.outputs[0].token_ids
        if engine.running:
            sizes.append(len(engine.running))
            if depth is not None:
                expected = DEPTHS[len(engine.running) - 1]
                assert [len(request.drafts) for request in engine.running] == [
                    min(expected, request.room) for request in engine.running
                ]
        step += 1
    return [answers[str(place)] for place in range(10)], proposer, sizes


def test_the_engine_obeys_the_table_at_every_batch_size() -> None:
    """Nothing is drafted by nine and ten requests; the draft is in step all the same when fewer are left."""
    verifier = random_verifier(32)
    fixed, static, _ = serve_up_and_down(verifier, None)
    answers, proposer, sizes = serve_up_and_down(verifier, BatchSizeTable(RANGES, 4, 10))
    assert answers == fixed
    assert set(sizes) == set(range(1, 11))
    peak = sizes.index(10)
    assert sizes[: peak + 1] == sorted(sizes[: peak + 1])
    assert sizes[peak:] == sorted(sizes[peak:], reverse=True)
    assert {size for size, _ in proposer.asked} == set(range(1, 9))
    assert all(tokens == DEPTHS[size - 1] for size, tokens in proposer.asked)
    shared = [prefix for prefix in proposer.drafts if prefix in static.drafts]
    assert len(shared) > 50
    for prefix in shared:
        drafts = proposer.drafts[prefix]
        assert drafts == static.drafts[prefix][: len(drafts)]


def test_drafts_after_a_pause_are_those_of_a_draft_that_never_paused() -> None:
    """The draft's keys and values after rounds without drafts equal those of the same tokens in one pass."""
    verifier = random_verifier(32)
    engine = Engine(
        verifier,
        proposer := Watched(verifier, 4),
        limits=EngineLimits(10, 200),
        depth=BatchSizeTable([[1, 9, 0]], 4, 10),
    )
    engine.add_request("a", [3, 1, 4], SamplingParams(temperature=0, max_tokens=40))
    for _ in range(12):
        engine.step()
    (request,) = engine.running
    assert proposer.asked == []
    again = Engine(verifier, fresh := Watched(verifier, 4), limits=EngineLimits(10, 200))
    again.add_request("b", request.tokens[:-1], SamplingParams(temperature=0, max_tokens=9))
    again.step()
    length = len(request.tokens) - 1
    for mine, other in zip(proposer._cache.keys, fresh._cache.keys, strict=True):
        torch.testing.assert_close(mine[0, :, :length], other[0, :, :length], atol=1e-5, rtol=1e-4)
