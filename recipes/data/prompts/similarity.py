"""Near-duplicates by word shingles: an inverted index that finds the most similar earlier text."""

import re
from collections import Counter, defaultdict

SHINGLE_WORDS = 5
_WORD = re.compile(r"\w+")


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """Return the set of runs of five words of a text in lower case (of the whole text where it is shorter)."""
    words = _WORD.findall(text.lower())
    last = max(len(words) - SHINGLE_WORDS, 0)
    return frozenset(tuple(words[start : start + SHINGLE_WORDS]) for start in range(last + 1))


class ShingleIndex:
    """The shingle sets of the texts taken so far, each found by any shingle it has."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._holders: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)

    def highest_similarity(self, text: str) -> float:
        """Return the highest Jaccard similarity (shared over united shingles, 0 to 1) with any text taken so far."""
        own = shingles(text)
        shared = Counter(holder for shingle in own for holder in self._holders.get(shingle, ()))
        return max((count / (len(own) + self._sizes[holder] - count) for holder, count in shared.items()), default=0.0)

    def take(self, text: str) -> None:
        """Add a text."""
        own = shingles(text)
        for shingle in own:
            self._holders[shingle].append(len(self._sizes))
        self._sizes.append(len(own))
