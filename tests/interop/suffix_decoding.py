"""Does our suffix decoding propose what `arctic-inference` proposes, draft for draft?

    PYTHONPATH=. ENVIRONMENT/bin/python tests/interop/suffix_decoding.py --out out/suffix.json

ENVIRONMENT has `arctic-inference==0.1.1` (installed with --no-deps; it compiles for some minutes) and numpy; torch is
not needed. Random request streams over small vocabularies, with repeats, evictions, aborted and reused ids; after every
step both caches speculate, and tokens, score and match length must be equal.
"""

import argparse
import json
import random
import sys
from pathlib import Path

from arctic_inference.suffix_decoding import SuffixDecodingCache

from speculators.runtime.proposers.suffix_cache import SuffixCache, SuffixOptions

FACTORS, PROBABILITIES = (0.0, 0.5, 1.0, 1.7, 3.0), (0.0, 0.1, 0.3, 0.9, 1.0)


class Pair:
    """Both caches, told the same."""

    def __init__(self, options: SuffixOptions) -> None:
        self.options = options
        self.ours = SuffixCache(options)
        self.theirs = SuffixDecodingCache(options.max_tree_depth, options.max_cached_requests)
        self.texts: dict[str, list[int]] = {}
        self.drafts = self.drafted = 0

    def start(self, name: str, prompt: list[int]) -> None:
        self.ours.start(name, prompt)
        if name in self.theirs.cached_requests:
            self.theirs.evict_cached_response(name)
        self.theirs.start_request(name, prompt)
        self.texts[name] = list(prompt)

    def stop(self, name: str) -> None:
        self.ours.stop(name)
        self.theirs.stop_request(name)
        del self.texts[name]

    def extend(self, name: str, tokens: list[int]) -> None:
        self.ours.extend(name, tokens)
        self.theirs.add_active_response(name, tokens)
        self.texts[name] += tokens

    def compare(self, name: str, most: int) -> list[int]:
        options = self.options
        context = self.texts[name][-options.max_tree_depth :]
        ours = self.ours.speculate(name, context, most)
        theirs = self.theirs.speculate(
            name,
            context,
            max_spec_tokens=most,
            max_spec_factor=options.max_spec_factor,
            min_token_prob=options.min_token_prob,
        )
        same = ours.token_ids == theirs.token_ids and ours.score == theirs.score
        # A match that nothing follows has a length only there.
        same = same and (not ours.token_ids or ours.match_length == theirs.match_len)
        if not same:
            raise SystemExit(f"{options}: after {context} ours proposes {ours}, theirs {theirs}")
        self.drafts += bool(ours.token_ids)
        self.drafted += len(ours.token_ids)
        return ours.token_ids


def pieces(random_: random.Random, vocabulary: int, phrases: list[list[int]], length: int) -> list[int]:
    """Tokens that partly repeat phrases."""
    tokens: list[int] = []
    while len(tokens) < length:
        if random_.random() < 0.5:
            tokens += random_.choice(phrases)
        else:
            tokens.append(random_.randrange(vocabulary))
    return tokens[:length]


def stream(seed: int, steps: int) -> Pair:
    """One random history of requests."""
    random_ = random.Random(seed)
    options = SuffixOptions(
        random_.choice([1, 2, 3, 5, 8, 24]),
        random_.choice([0, 1, 2, 5, 1000]),
        random_.choice(FACTORS),
        random_.choice(PROBABILITIES),
    )
    pair = Pair(options)
    vocabulary = random_.choice([1, 2, 3, 6, 40])
    phrases = [[random_.randrange(vocabulary) for _ in range(random_.randint(1, 30))] for _ in range(4)]
    for step in range(steps):
        active = list(pair.texts)
        if not active or (len(active) < 5 and random_.random() < 0.15):
            name = random_.choice([f"new{step}", *[f"again{i}" for i in range(4)]])
            if name not in active:
                pair.start(name, pieces(random_, vocabulary, phrases, random_.randint(1, 40)))
            continue
        if random_.random() < 0.05:
            pair.stop(random_.choice(active))
            continue
        name = random_.choice(active)
        most = random_.choice([0, 1, 3, 16, 32])
        draft = pair.compare(name, most) if step % 2 else []
        kept = draft[: random_.randint(0, len(draft))]
        pair.extend(name, kept + pieces(random_, vocabulary, phrases, random_.randint(1, 6)))
        pair.compare(name, most)
    return pair


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pairs = [stream(seed, options.steps) for seed in range(options.streams)]
    found = {
        "streams": len(pairs),
        "drafts": sum(pair.drafts for pair in pairs),
        "drafted_tokens": sum(pair.drafted for pair in pairs),
        "different": 0,
    }
    print(json.dumps(found))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
