"""Write the prompts of the shipped data set: ``python recipes/data/make_prompts.py [--out DIR]``.

The output is the same on every machine: ``prompts-train.jsonl`` and ``prompts-heldout.jsonl``, rows of ``id``,
``kind``, ``turns`` and, in some, ``system``. Held-out prompts draw their subjects, tasks and situations from entries
of the word lists that no training prompt draws, and no two prompts of the whole set share more than half of their
five-word shingles (openings and wishes about the answer, which many prompts have in common, left out of the count).
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

from prompts.grammar import Decks, load_word_lists
from prompts.kinds import KINDS, STRUCTURED_KINDS, Kind, shares, with_wishes, writers
from prompts.similarity import ShingleIndex

SEED = 20240611
# Structured prompts follow with a stream of their own, so that either part can grow without the other's changing.
NUM_PROMPTS = {"heldout": 200, "train": 4200}
NUM_STRUCTURED_PROMPTS = {"heldout": 120, "train": 1500}
MAX_SIMILARITY = 0.5
MAX_SIMILARITY_TO_HELD_OUT = 0.4
SYSTEM_SHARE = 0.05
FOLLOWUP_SHARE = 0.08
MAX_TRIES = 300


class Row(TypedDict, total=False):
    """A prompt as it is written; `system` is there only for the prompts that have one."""

    id: str
    kind: str
    turns: list[str]
    system: str


class Taken:
    """The prompts taken so far, in all and held-out ones: the text that carries the request, and the whole text."""

    def __init__(self) -> None:
        self.cores = ShingleIndex()
        self.held_out_cores = ShingleIndex()
        self.texts = ShingleIndex()

    def admits(self, core: str, split: str) -> bool:
        """Return whether a request differs enough from all others, and a training one even more from held-out ones."""
        if self.cores.highest_similarity(core) > MAX_SIMILARITY:
            return False
        return split == "heldout" or self.held_out_cores.highest_similarity(core) <= MAX_SIMILARITY_TO_HELD_OUT

    def take(self, core: str, text: str, split: str) -> None:
        """Add a prompt."""
        self.cores.take(core)
        self.texts.take(text)
        if split == "heldout":
            self.held_out_cores.take(core)


def write_prompts(kinds: Sequence[Kind], num_prompts: int, split: str, stream: str, taken: Taken) -> list[Row]:
    """Return prompts of one split in random order; `taken` holds those written before and takes the new ones.

    Raises `ValueError` when a kind has too few templates and words for its share.
    """
    rng = random.Random(stream)
    decks = Decks(load_word_lists(), rng, held_out=split == "heldout")
    write = writers(kinds, decks)
    counts = shares(kinds, num_prompts)
    rows = [
        finish_row(kind, next_text(write[kind.name], kind, split, decks, taken), decks)
        for kind in kinds
        for _ in range(counts[kind.name])
    ]
    rng.shuffle(rows)
    return rows


def interleaved(first: list[Row], second: list[Row]) -> list[Row]:
    """Return both lists as one in which every stretch holds them in proportion, each in its own order."""
    places = [((number + 0.5) / len(rows), row) for rows in (first, second) for number, row in enumerate(rows)]
    return [row for _, row in sorted(places, key=lambda place: place[0])]


def next_text(write: Callable[[], str], kind: Kind, split: str, decks: Decks, taken: Taken) -> str:
    """Return a new prompt of a kind that is no near-duplicate of one taken before, and take it."""
    for _ in range(MAX_TRIES):
        core = write()
        if not kind.name.startswith("code_"):
            core = core[0].upper() + core[1:]
        if not taken.admits(core, split):
            continue
        text = with_wishes(core, kind, decks)
        if taken.texts.highest_similarity(text) <= MAX_SIMILARITY:
            taken.take(core, text, split)
            return text
    raise ValueError(f"{split}: no new {kind.name!r} prompt in {MAX_TRIES} tries; add templates or words")


def finish_row(kind: Kind, text: str, decks: Decks) -> Row:
    """Return a row without its id: some prompts get a second turn and some a system message."""
    row: Row = {"kind": kind.name, "turns": [text]}
    if decks.rng.random() < FOLLOWUP_SHARE:
        row["turns"].append(decks.deal(kind.followup))
    if decks.rng.random() < SYSTEM_SHARE:
        row["system"] = decks.deal("system")
    return row


def write_jsonl(path: Path, rows: list[Row]) -> None:
    """Write rows as JSON lines; the file appears only when it is complete."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def main() -> None:
    """Write both files; the held-out prompts come first, so that training prompts keep away from them."""
    parser = argparse.ArgumentParser(description="Write the prompts of the shipped data set.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the two files")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    taken, written = Taken(), {}
    for kinds, counts, name in ((KINDS, NUM_PROMPTS, ""), (STRUCTURED_KINDS, NUM_STRUCTURED_PROMPTS, "-structured")):
        for split, count in counts.items():
            rows = write_prompts(kinds, count, split, f"{SEED}-{split}{name}", taken)
            rows = [{"id": f"{split}{name}-{number:05d}", **row} for number, row in enumerate(rows, start=1)]
            written[split] = interleaved(written.get(split, []), rows)
    for split, rows in written.items():
        write_jsonl(folder / f"prompts-{split}.jsonl", rows)
        sys.stdout.write(f"{folder / f'prompts-{split}.jsonl'}: {len(rows)} prompts\n")


if __name__ == "__main__":
    main()
