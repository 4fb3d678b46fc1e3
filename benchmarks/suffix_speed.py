"""How long does suffix decoding think about a step, and how does that compare with `arctic-inference`?

    PYTHONPATH=. python benchmarks/suffix_speed.py [--out out/suffix_speed.json]

For contexts of 1,024 to 8,192 tokens of two kinds (`varied`: words drawn by a power law; `repetitive`: phrases that
come again), beside a global tree of 200 outputs: microseconds of processor time to begin a request (its prompt is read)
and, for steps that gain three tokens each, to read these and to draft. `arctic-inference`, where it can be imported,
does the same in the same process; the ratio is ours over theirs. Neither needs torch.
"""

import argparse
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from speculators.runtime.proposers.suffix_cache import SuffixCache, SuffixOptions

GAINED, STEPS, DRAFTS = 3, 300, 16


class Cache(Protocol):
    """What both caches are asked for here."""

    def begin(self, name: str, prompt: Sequence[int]) -> None: ...

    def gain(self, name: str, tokens: Sequence[int]) -> None: ...

    def draft(self, name: str, context: Sequence[int]) -> list[int]: ...

    def end(self, name: str) -> None: ...


class Ours:
    """This project's cache."""

    def __init__(self) -> None:
        self.cache = SuffixCache(SuffixOptions())

    def begin(self, name: str, prompt: Sequence[int]) -> None:
        self.cache.start(name, prompt)

    def gain(self, name: str, tokens: Sequence[int]) -> None:
        self.cache.extend(name, tokens)

    def draft(self, name: str, context: Sequence[int]) -> list[int]:
        return self.cache.speculate(name, context, DRAFTS).token_ids

    def end(self, name: str) -> None:
        self.cache.stop(name)


def arctic() -> Cache:
    """The cache of `arctic-inference`."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    class Theirs:
        def __init__(self) -> None:
            self.cache = SuffixDecodingCache(24, 10000)

        def begin(self, name: str, prompt: Sequence[int]) -> None:
            self.cache.start_request(name, prompt)

        def gain(self, name: str, tokens: Sequence[int]) -> None:
            self.cache.add_active_response(name, tokens)

        def draft(self, name: str, context: Sequence[int]) -> list[int]:
            return self.cache.speculate(name, context, max_spec_tokens=DRAFTS).token_ids

        def end(self, name: str) -> None:
            self.cache.stop_request(name)

    return Theirs()


def text(kind: str, length: int, seed: int) -> list[int]:
    """Tokens of one of the two kinds."""
    random_ = random.Random(seed)
    words = [int(random_.paretovariate(0.8)) % 32000 for _ in range(length)]
    if kind == "varied":
        return words
    shared = random.Random(0)
    phrases = [[shared.randrange(32000) for _ in range(shared.randint(5, 60))] for _ in range(20)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += [*random_.choice(phrases), *words[:3]]
    return tokens[:length]


def measure(make: Callable[[], Cache], kind: str, context: int) -> dict[str, float]:
    """Microseconds to begin a request, to read a step's tokens and to draft, and drafted tokens a step."""
    cache = make()
    for other in range(200):
        cache.begin(f"other{other}", [1, 2])
        cache.gain(f"other{other}", text(kind, 256, 1000 + other))
        cache.end(f"other{other}")
    tokens = text(kind, context + GAINED * STEPS, 7)
    begun = time.process_time()
    cache.begin("measured", tokens[:context])
    begin_us = (time.process_time() - begun) * 1e6
    gains, drafts, drafted = [], [], 0
    for end in range(context + GAINED, len(tokens) + 1, GAINED):
        new, last = tokens[end - GAINED : end], tokens[end - 24 : end]
        start = time.process_time()
        cache.gain("measured", new)
        middle = time.process_time()
        drafted += len(cache.draft("measured", last))
        drafts.append(time.process_time() - middle)
        gains.append(middle - start)
    return {
        "begin_us": begin_us,
        "read_us": statistics.mean(gains) * 1e6,
        "draft_us": statistics.mean(drafts) * 1e6,
        "drafted_tokens": drafted / STEPS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    makers: dict[str, Callable[[], Cache]] = {"ours": Ours}
    if importlib.util.find_spec("arctic_inference") is not None:
        makers["arctic-inference"] = arctic
    rows = []
    print(f"{'text':12}{'context':>8}  {'':18}{'begin us':>10}{'read us':>9}{'draft us':>9}{'drafted':>9}")
    for kind in ("varied", "repetitive"):
        for context in options.contexts:
            found = {name: measure(make, kind, context) for name, make in makers.items()}
            for name, one in found.items():
                print(
                    f"{kind:12}{context:8}  {name:18}{one['begin_us']:10.0f}{one['read_us']:9.1f}"
                    f"{one['draft_us']:9.1f}{one['drafted_tokens']:9.2f}"
                )
            steps = [one["read_us"] + one["draft_us"] for one in found.values()]
            rows.append({"text": kind, "context": context, **found, "step_ratio": steps[0] / steps[-1]})
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
