"""A suffix tree over growing token sequences that counts what followed what, for suffix decoding (arXiv 2411.04975).

The tree holds every substring of at most `max_depth` tokens; a node's count is how often its string occurs. Edges are
compressed, so that memory is proportional to the number of tokens. Two things keep an added token cheap: a suffix that
occurs once is a leaf that reads its sequence and grows by itself, and the places where the repeated suffixes of a
sequence end (its `tips`) are kept, so that matching its own end against the tree is no search.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Optional

_SINGLE = struct.Struct("f")


def float32(number: float) -> float:
    """The nearest float32: scores decide between drafts, and ties must be those of the reference implementation."""
    rounded: float = _SINGLE.unpack(_SINGLE.pack(number))[0]
    return rounded


class Node:
    """An edge and its lower end: the tokens `tokens[start:stop]`, cut where the sequence ends, as in a leaf that grows.

    `owner` is the sequence of a leaf whose suffix occurs once. Children are linked from `first` to `last` by falling
    count; `heads` has the first child of each count, where there are two children or more.
    """

    __slots__ = (
        "children",
        "count",
        "first",
        "heads",
        "last",
        "next",
        "owner",
        "parent",
        "previous",
        "start",
        "stop",
        "tokens",
    )

    def __init__(self, count: int, tokens: list[int], start: int, stop: int, parent: Optional["Node"]) -> None:
        self.count, self.tokens, self.start, self.stop, self.parent = count, tokens, start, stop, parent
        self.owner: TrackedSequence | None = None
        # Most nodes are leaves, and share this.
        self.children = _NO_CHILDREN
        self.first: Node | None = None
        self.last: Node | None = None
        self.previous: Node | None = None
        self.next: Node | None = None
        self.heads: dict[int, Node] | None = None

    @property
    def length(self) -> int:
        """Number of tokens of the edge."""
        return min(self.stop, len(self.tokens)) - self.start

    def add(self, token: int, child: "Node") -> None:
        """Take in a child of the lowest count; it comes after all others."""
        if self.last is None:
            self.children = {}
        self.children[token] = child
        child.parent = self
        last = self.last
        if last is None:
            self.first = self.last = child
            self.heads = None
            return
        if self.heads is None:
            self.heads = {last.count: last}
        self.heads.setdefault(child.count, child)
        last.next, child.previous, self.last = child, last, child

    def replace(self, token: int, old: "Node", new: "Node") -> None:
        """Put `new`, of the same count, where the child `old` was."""
        self.children[token] = new
        new.parent = self
        before, after = old.previous, old.next
        new.previous, new.next = before, after
        if before is None:
            self.first = new
        else:
            before.next = new
        if after is None:
            self.last = new
        else:
            after.previous = new
        if self.heads is not None and self.heads[old.count] is old:
            self.heads[old.count] = new

    def remove(self, token: int) -> None:
        """Drop a child and all below it."""
        child = self.children.pop(token)
        if self.heads is not None:
            self._leave(child, self.heads)
        self._unlink(child)
        child.parent = None

    def increment(self, child: "Node") -> None:
        """Count a child once more.

        The first of its count comes before those that have the new count, any other after them: the order among equals
        decides which token is proposed.
        """
        heads, count = self.heads, child.count
        if heads is not None:
            before: Node | None = heads[count]
            if before is child:
                self._leave(child, heads)
                before = heads.get(count + 1)
                heads[count + 1] = child
            else:
                heads.setdefault(count + 1, child)
            if before is not None:
                self._unlink(child)
                self._link_before(child, before)
        child.count = count + 1

    def decrement(self, child: "Node") -> None:
        """Count a child once less; it comes before those that have the new count."""
        heads, count = self.heads, child.count
        if heads is not None:
            self._leave(child, heads)
            after = heads.get(count - 1)
            if after is None:
                lower = [other for other in heads if other < count]
                after = heads[max(lower)] if lower else None
            heads[count - 1] = child
            if after is not child.next:
                self._unlink(child)
                self._link_before(child, after)
        child.count = count - 1

    def _leave(self, child: "Node", heads: dict[int, "Node"]) -> None:
        """Let the next child of the same count be the first of it."""
        if heads[child.count] is child:
            following = child.next
            if following is not None and following.count == child.count:
                heads[child.count] = following
            else:
                del heads[child.count]

    def _unlink(self, child: "Node") -> None:
        before, after = child.previous, child.next
        if before is None:
            self.first = after
        else:
            before.next = after
        if after is None:
            self.last = before
        else:
            after.previous = before
        child.previous = child.next = None

    def _link_before(self, child: "Node", after: Optional["Node"]) -> None:
        before = self.last if after is None else after.previous
        child.previous, child.next = before, after
        if before is None:
            self.first = child
        else:
            before.next = child
        if after is None:
            self.last = child
        else:
            after.previous = child


_NO_CHILDREN: dict[int, Node] = {}


@dataclass(eq=False)
class TrackedSequence:
    """Tokens of one sequence of a tree; `tips[n - 1]` is where its last n end, while these occur elsewhere too."""

    tokens: list[int] = field(default_factory=list)
    tips: list[Node] = field(default_factory=list)
    growing: bool = True

    def close(self) -> None:
        """Nothing will be added any more."""
        self.tips, self.growing = [], False


@dataclass(frozen=True)
class Continuation:
    """Tokens that are likely to follow, the sum of their estimated probabilities, and how long the match was."""

    token_ids: list[int] = field(default_factory=list)
    score: float = 0.0
    match_length: int = 0


class SuffixTree:
    """Counts of all strings of at most `max_depth` tokens in the sequences that were added and not removed."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._root = Node(0, [], 0, 0, None)

    def extend(self, sequence: TrackedSequence, token_ids: Sequence[int]) -> None:
        """Append tokens to a sequence of this tree."""
        tokens, deepest, advance = sequence.tokens, self.max_depth - 1, self._advance
        for token in token_ids:
            place = len(tokens)
            tokens.append(token)
            tips: list[Node] = []
            begin = place + 1
            for node in (self._root, *sequence.tips[:deepest]):
                begin -= 1
                child = node.children.get(token)
                # Most suffixes of a text that repeats itself slide along an edge that is theirs and one other's.
                if child is not None and node.count == child.count + 1 and node.parent is not None:
                    first, known = child.start + 1, child.tokens
                    if first < child.stop and first < len(known):
                        node.start, node.stop, node.tokens = place + node.start - node.stop, place + 1, tokens
                        child.start, following = first, known[first]
                        if following != token:
                            del node.children[token]
                            node.children[following] = child
                        tips.append(node)
                        continue
                tip = advance(node, child, token, sequence, begin)
                if tip is not None:
                    tips.append(tip)
            sequence.tips = tips

    def _advance(
        self, node: Node, child: Node | None, token: int, sequence: TrackedSequence, begin: int
    ) -> Node | None:
        """Let the suffix that begins at `begin` and ends at `node` go on, to `child` where that token was seen there.

        None where it occurs once from now on.
        """
        tokens, end = sequence.tokens, len(sequence.tokens)
        if child is None:
            leaf = node
            if node.count != 1 or node.parent is None:
                leaf = Node(1, tokens, end - 1, begin + self.max_depth, node)
                node.add(token, leaf)
            else:
                # Whatever else ended here was removed.
                leaf.tokens, leaf.start = tokens, end - 1 - leaf.length
                leaf.stop = begin + self.max_depth
            leaf.owner = sequence
            return None
        if child.length > 1:
            return self._split(node, token, child, tokens)
        if child.owner is not None:
            _make_inner(child, child.owner)
        if node.count == child.count + 1 and node.parent is not None:
            # All others that pass here go on to this child, so that no node has to stand between.
            child.start, child.stop, child.tokens = end - 1 - node.length, end, tokens
            child.count += 1
            node.parent.replace(tokens[child.start], node, child)
            return child
        child.start, child.stop, child.tokens = end - 1, end, tokens
        if node.heads is None:
            child.count += 1
        else:
            node.increment(child)
        return child

    def _split(self, node: Node, token: int, child: Node, tokens: list[int]) -> Node:
        """Put a node after the first token of a child's edge, for a suffix that ends there."""
        end = len(tokens)
        middle = Node(child.count, tokens, end - 1, end, node)
        node.replace(token, child, middle)
        child.previous = child.next = None
        child.start += 1
        middle.add(child.tokens[child.start], child)
        node.increment(middle)
        return middle

    def remove(self, sequence: TrackedSequence) -> None:
        """Take back all that a sequence added."""
        sequence.close()
        tokens = sequence.tokens
        for begin in range(len(tokens)):
            node, place = self._root, begin
            while place < min(begin + self.max_depth, len(tokens)):
                child = node.children[tokens[place]]
                if child.count == 1:
                    node.remove(tokens[place])
                    break
                node.decrement(child)
                place += child.length
                node = child
            if node.parent is not None and node.first is not None and node.first.count == node.count:
                _merge(node, node.parent, node.first)

    def _locate(self, string: Sequence[int]) -> tuple[Node, int] | None:
        node, place, within = self._root, 0, 0
        while place < len(string):
            child = node.children.get(string[place])
            if child is None:
                return None
            label = child.tokens[child.start : child.stop]
            within = min(len(label), len(string) - place)
            if list(string[place : place + within]) != label[:within]:
                return None
            node, place = child, place + within
        return node, within

    def continuation(
        self,
        context: Sequence[int],
        sequence: TrackedSequence | None,
        limits: Sequence[int],
        min_probability: float,
        best: Continuation,
    ) -> Continuation:
        """The continuation of highest score over all match lengths, the longest among equals; `best` if none beats it.

        After a match of m tokens at most `limits[m - 1]` follow, each the most frequent child as long as the product of
        the shares count(child) / count(node) on the way is at least `min_probability`. The score is the sum of these
        products (arXiv 2411.04975, section 3), in float32.
        """
        longest = len(context) - 1
        tips = sequence.tips[:longest] if sequence is not None else []
        if len(tips) == (0 if sequence is None else len(sequence.tokens)):
            # All of the sequence is matched, and what came before it may be, too.
            points: list[tuple[Node, int]] = []
            for length in range(len(tips) + 1, longest + 1):
                point = self._locate(context[len(context) - length :])
                if point is None:
                    break
                points.append(point)
            for place in range(len(points) - 1, -1, -1):
                best = _better(*points[place], len(tips) + place + 1, limits, min_probability, best)
        for length in range(len(tips), 0, -1):
            tip = tips[length - 1]
            child = tip.first
            # The sum is at most that of the first share at every place; the slack is for rounding.
            if child is not None and limits[length - 1] * child.count * 1.0001 > best.score * tip.count:
                best = _better(tip, tip.stop - tip.start, length, limits, min_probability, best)
        return best

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents before their children."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()


def _better(
    node: Node, within: int, length: int, limits: Sequence[int], min_probability: float, best: Continuation
) -> Continuation:
    """What follows a match of `length` tokens that ends `within` the edge of a node, where it beats `best`."""
    limit = limits[length - 1]
    # No probability is above 1.
    if limit <= best.score:
        return best
    drafts: list[int] = []
    probability, score = 1.0, 0.0
    while len(drafts) < limit and probability >= min_probability:
        start = node.start + within
        label = node.tokens[start : min(node.stop, start + limit - len(drafts))]
        drafts += label
        if probability == 1.0:
            score += len(label)
        else:
            for _ in label:
                score = float32(score + probability)
        child = node.first
        if child is None:
            break
        probability = float32(probability * float32(child.count / node.count))
        node, within = child, 0
    return Continuation(drafts, score, length) if score > best.score else best


def _make_inner(leaf: Node, owner: TrackedSequence) -> None:
    """A second suffix has come to the end of a leaf of one token: the leaf grows by itself no more."""
    leaf.owner, leaf.stop = None, leaf.start + 1
    if owner.growing and leaf.stop == len(owner.tokens):
        # Shorter suffixes are led on first, so that this is the shortest one that was still unique.
        owner.tips.append(leaf)


def _merge(node: Node, parent: Node, child: Node) -> None:
    """Let the only child that is left take the place of a node at which nothing ends."""
    child.previous = child.next = None
    first = node.tokens[node.start]
    child.start -= node.length
    parent.replace(first, node, child)
