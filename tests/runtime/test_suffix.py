"""Suffix decoding against a plain trie of counts: the same drafts, scores and match lengths, through every history."""

import random
import struct
from dataclasses import dataclass, field

import pytest

from speculators.errors import EngineError
from speculators.runtime.proposers.suffix import SuffixProposer
from speculators.runtime.proposers.suffix_cache import SuffixCache, SuffixOptions
from speculators.runtime.proposers.suffix_tree import Continuation, SuffixTree, TrackedSequence
from tests.runtime.lookups import proposed, request_of


def single(number: float) -> float:
    """Rounded to float32."""
    return struct.unpack("f", struct.pack("f", number))[0]


@dataclass
class Trie:
    """A node for every string; children in the order in which they are preferred."""

    count: int = 0
    children: list[tuple[int, "Trie"]] = field(default_factory=list)

    def child(self, token: int) -> "Trie | None":
        return dict(self.children).get(token)

    def bump(self, token: int) -> "Trie":
        """Count a child once more; it overtakes the group that stands before it, if it catches up with that."""
        counts = [node.count for _, node in self.children]
        places = [place for place, (known, _) in enumerate(self.children) if known == token]
        if not places:
            self.children.append((token, Trie(1)))
            return self.children[-1][1]
        place = places[0]
        target = counts.index(counts[place - 1]) if place and counts[place - 1] <= counts[place] + 1 else place
        self.children.insert(target, self.children.pop(place))
        self.children[target][1].count += 1
        return self.children[target][1]

    def drop(self, token: int) -> "Trie":
        """Count a child once less; it goes behind those of the count it had."""
        place = next(place for place, (known, _) in enumerate(self.children) if known == token)
        entry = self.children.pop(place)
        before = [node.count >= entry[1].count for _, node in self.children]
        if entry[1].count > 1:
            self.children.insert(sum(before), entry)
        entry[1].count -= 1
        return entry[1]


class PlainCache:
    """The two tries, all strings added and taken back one by one."""

    def __init__(self, options: SuffixOptions) -> None:
        self.options = options
        self.all, self.outputs = Trie(), {}
        self.own: dict[str, tuple[Trie, list[int]]] = {}

    def add(self, trie: Trie, tokens: list[int], new: list[int]) -> None:
        for token in new:
            tokens.append(token)
            for start in range(max(0, len(tokens) - self.options.max_tree_depth), len(tokens)):
                node = trie
                for known in tokens[start:-1]:
                    node = node.child(known)
                node.bump(token)

    def take_back(self, tokens: list[int]) -> None:
        for start in range(len(tokens)):
            node = self.all
            for token in tokens[start : start + self.options.max_tree_depth]:
                node = node.drop(token)

    def start(self, name: str, prompt: list[int]) -> None:
        self.own[name] = Trie(), []
        self.add(*self.own[name], prompt)
        if self.options.max_cached_requests:
            if name in self.outputs:
                self.take_back(self.outputs.pop(name))
            self.outputs[name] = []
            if len(self.outputs) > self.options.max_cached_requests:
                self.take_back(self.outputs.pop(next(iter(self.outputs))))

    def extend(self, name: str, tokens: list[int]) -> None:
        self.add(*self.own[name], tokens)
        if name in self.outputs:
            self.add(self.all, self.outputs[name], tokens)

    def stop(self, name: str) -> None:
        del self.own[name]

    def speculate(self, name: str, context: list[int], most: int) -> Continuation:
        best = Continuation()
        for trie in (self.own[name][0], self.all):
            best_here = Continuation()
            for length in range(1, len(context)):
                node = trie
                for token in context[-length:]:
                    node = node and node.child(token)
                if node is None:
                    break
                draft = self.follow(node, min(most, int(single(length * self.options.max_spec_factor) + 1e-6)))
                if draft.token_ids and draft.score >= best_here.score:
                    best_here = Continuation(draft.token_ids, draft.score, length)
            best = best_here if best_here.score > best.score else best
        return best

    def follow(self, node: Trie, most: int) -> Continuation:
        tokens, probability, score = [], 1.0, 0.0
        while node.children and len(tokens) < most:
            token, child = node.children[0]
            assert child.count == max(other.count for _, other in node.children)
            if child.count < node.count:
                probability = single(probability * single(child.count / node.count))
            if probability < single(self.options.min_token_prob):
                break
            tokens.append(token)
            score = single(score + probability)
            node = child
        return Continuation(tokens, score)


def test_the_most_frequent_continuation_of_the_longest_match() -> None:
    """Probabilities by hand: the end of the text itself is an occurrence that nothing follows."""
    cache = SuffixCache(SuffixOptions())
    cache.start("x", [1, 2, 3, 1, 2, 3, 1, 2, 4, 9])
    cache.extend("x", [1, 2])
    # "2" occurs 4 times, followed by 3 twice and 4 once; then 1 follows 3 always: 2/4 + 2/4 within 2 tokens of match.
    draft = cache.speculate("x", [9, 1, 2], 16)
    assert (draft.token_ids, draft.score, draft.match_length) == ([3, 1], 1.0, 2)
    # A match of one token admits one draft, a factor of 1.5 admits 3 after two.
    assert cache.speculate("x", [1, 2], 16).token_ids == [3]
    wide = SuffixCache(SuffixOptions(max_spec_factor=1.5))
    wide.start("x", [1, 2, 3, 1, 2, 3, 1, 2, 4, 9, 1, 2])
    assert wide.speculate("x", [9, 1, 2], 16).token_ids == [3, 1, 2]
    assert wide.speculate("x", [9, 1, 2], 2).token_ids == [3, 1]
    strict = SuffixCache(SuffixOptions(min_token_prob=0.6))
    strict.start("x", [1, 2, 3, 1, 2, 3, 1, 2, 4, 9, 1, 2])
    assert strict.speculate("x", [9, 1, 2], 16).token_ids == []


@pytest.mark.parametrize("depth", [1, 2, 5, 24])
@pytest.mark.parametrize("cached", [0, 1, 3, 1000])
def test_every_draft_is_that_of_plain_tries(depth: int, cached: int) -> None:
    """Requests side by side in lockstep and not, with repeats, ends, evictions, aborted and reused ids."""
    random_ = random.Random(depth * 7 + cached)
    drafted = 0
    for vocabulary, factor, least in [(1, 3.0, 0.0), (2, 1.7, 0.1), (4, 1.0, 0.1), (4, 3.0, 0.3)]:
        options = SuffixOptions(depth, cached, factor, least)
        ours, plain = SuffixCache(options), PlainCache(options)
        texts: dict[str, list[int]] = {}
        phrases = [[random_.randrange(vocabulary) for _ in range(12)] for _ in range(3)]
        for step in range(60):
            name = random_.choice("abcdef")
            if name not in texts:
                texts[name] = random_.choice(phrases)[: random_.randint(1, 12)]
                ours.start(name, texts[name])
                plain.start(name, texts[name])
            elif step % 11 == 0:
                ours.stop(name)
                plain.stop(name)
                del texts[name]
                continue
            new = [*random_.choice(phrases)[: random_.randint(0, 8)], random_.randrange(vocabulary)]
            texts[name] = texts[name] + new
            ours.extend(name, new)
            plain.extend(name, new)
            for other in texts:
                most = random_.choice([0, 2, 16])
                context = texts[other][-depth:]
                draft = ours.speculate(other, context, most)
                assert draft == plain.speculate(other, context, most)
                drafted += len(draft.token_ids)
        assert ours.cached == list(plain.outputs)
        assert ours.active == set(texts)
    assert drafted > 0 or depth == 1


def test_nodes_are_few() -> None:
    """Edges are compressed: at most two nodes a token, however deep the tree, and none is left by what was removed."""
    random_ = random.Random(0)
    tree, kept = SuffixTree(24), []
    for place in range(30):
        kept.append(TrackedSequence())
        tree.extend(kept[-1], [random_.randrange(5) for _ in range(60)])
        if place >= 5:
            tree.remove(kept.pop(0))
        assert sum(1 for _ in tree.nodes()) <= 2 * sum(len(one.tokens) for one in kept)
    for one in kept:
        tree.remove(one)
    assert list(tree.nodes()) == []


def test_other_requests_are_learnt_from_even_after_their_end() -> None:
    proposer = SuffixProposer(num_tokens=4)
    first = request_of("first", [50, 51], [1, 2, 3, 4, 5, 6])
    assert proposed(proposer, [first]) == [[]]
    first.tokens += [7, 8]
    proposer.forget(first)
    assert proposer.cache.active == frozenset()
    # The tail of the prompt matches as well as what the request itself has said; 7 and 8 were read at the end.
    second = request_of("second", [60, 3, 4], [5, 6])
    assert proposed(proposer, [second]) == [[7, 8]]
    alone = SuffixProposer(max_cached_requests=0, num_tokens=4)
    proposed(alone, [first])
    alone.forget(first)
    assert proposed(alone, [second]) == [[]]
    # What a request was asked is not kept for others.
    third = request_of("third", [1], [50])
    assert proposed(proposer, [third]) == [[]]


def test_the_first_output_is_forgotten_first_and_an_id_can_come_again() -> None:
    proposer = SuffixProposer(max_cached_requests=2, num_tokens=3)
    for name, token in [("a", 10), ("b", 20), ("a", 30), ("c", 40)]:
        request = request_of(name, [1], [token, token + 1, token + 2])
        proposed(proposer, [request])
        proposer.forget(request)
    assert proposer.cache.cached == ["a", "c"]
    asked = request_of("x", [2], [10, 11])
    assert proposed(proposer, [asked]) == [[]]
    assert proposer.cache.cached == ["c", "x"]
    asked.tokens += [40, 41]
    assert proposed(proposer, [asked], [2]) == [[42]]


def test_drafts_fit_below_the_length_limit() -> None:
    """The limit decides before candidates are compared: positions left, less the token that verification adds."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]
    for limit, room in [(100, 3), (15, 2), (14, 1), (13, 0)]:
        assert len(proposed(SuffixProposer(num_tokens=3), [request_of("x", tokens, max_length=limit)])[0]) == room


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tree_depth", 0),
        ("max_cached_requests", -1),
        ("max_spec_factor", -0.5),
        ("min_token_prob", 1.5),
        ("min_token_prob", -0.1),
    ],
)
def test_options_out_of_range_are_named(option: str, value: float) -> None:
    with pytest.raises(EngineError, match=f"{option}={value}"):
        SuffixProposer(num_tokens=3, **{option: value})
