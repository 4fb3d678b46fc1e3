"""Prompt lookup against a search written down as the rule is told: longest n-gram, first occurrence, what follows."""

import random

import pytest

from speculators.errors import EngineError
from speculators.runtime.proposers.ngram import NgramProposer, VectorisedNgramProposer
from speculators.runtime.request import Request
from tests.runtime.lookups import proposed, request_of

BOTH = [NgramProposer, VectorisedNgramProposer]


def searched(tokens: list[int], count: int, shortest: int, longest: int, max_model_len: int) -> list[int]:
    """The rule by search."""
    count = min(count, max_model_len - len(tokens))
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                return tokens[start + size :][: max(0, count)]
    return []


@pytest.mark.parametrize("proposer", BOTH)
def test_examples(proposer: type) -> None:
    def lookup(tokens: list[int], shortest: int = 1, longest: int = 3, limit: int = 100) -> list[int]:
        one = proposer(3, prompt_lookup_min=shortest, prompt_lookup_max=longest, max_model_len=limit)
        return proposed(one, [request_of("x", tokens)])[0]

    # "1 2" occurs twice before: the first one counts.
    assert lookup([1, 2, 3, 4, 5, 1, 2, 6, 1, 2]) == [3, 4, 5]
    # "9 1 2" is longer than "1 2", though later.
    assert lookup([1, 2, 3, 4, 9, 1, 2, 7, 7, 7, 9, 1, 2]) == [7, 7, 7]
    # Nothing of two tokens occurs before, though one does.
    assert lookup([1, 2, 3, 4, 2], shortest=2) == []
    # A match may overlap the end that it matches, and drafts end with the text.
    assert lookup([5, 5, 5]) == [5]
    assert lookup([4, 7, 4]) == [7, 4]
    assert lookup([4]) == lookup([4, 5, 6]) == []
    # Two positions are left below the limit.
    assert lookup([1, 2, 3, 4, 5, 6, 1, 2], limit=10) == [3, 4]
    assert lookup([1, 2, 3, 4, 5, 6, 1, 2], limit=8) == []


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 10])
@pytest.mark.parametrize("bounds", [(1, 1), (1, 4), (2, 3), (5, 5), (3, 9)])
def test_both_equal_a_search_as_texts_grow_and_rows_move(vocabulary: int, bounds: tuple[int, int]) -> None:
    """Requests of mixed lengths gain tokens, end, move into the hole and give room to others of the same name."""
    random_ = random.Random(vocabulary * 100 + bounds[0] * 10 + bounds[1])
    options = {"prompt_lookup_min": bounds[0], "prompt_lookup_max": bounds[1], "max_model_len": 70}
    proposers = [made(4, **options) for made in BOTH]
    requests: list[Request] = []
    found = 0
    for _ in range(60):
        while len(requests) < 5:
            free = next(name for name in "abcdefg" if name not in [one.request_id for one in requests])
            prompt = [random_.randrange(vocabulary) for _ in range(random_.randint(1, 40))]
            requests.append(request_of(free, prompt))
        gained = [random_.randint(1, 5) for _ in requests]
        for request, count in zip(requests, gained, strict=True):
            request.tokens += [random_.randrange(vocabulary) for _ in range(count)]
        expected = [searched(request.tokens, 4, *bounds, 70) for request in requests]
        assert [proposed(one, requests, gained) for one in proposers] == [expected, expected]
        found += sum(bool(draft) for draft in expected)
        for row in reversed(range(len(requests))):
            if len(requests[row].tokens) > 64 or random_.random() < 0.1:
                last = requests.pop()
                for one in proposers:
                    one.forget(requests[row] if row < len(requests) else last)
                if row < len(requests):
                    for one in proposers:
                        one.move(len(requests), row, len(last.tokens) - 1)
                    requests[row] = last
    assert found > 0 or (vocabulary == 10 and bounds[0] > 2)


@pytest.mark.parametrize("proposer", BOTH)
@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3)])
def test_bounds_are_checked(proposer: type, shortest: int, longest: int) -> None:
    with pytest.raises(EngineError, match=f"prompt_lookup_min={shortest}, prompt_lookup_max={longest}"):
        proposer(3, prompt_lookup_min=shortest, prompt_lookup_max=longest, max_model_len=10)
