"""A small template grammar: slots filled from word lists, numbers from ranges, and inline alternatives.

In a template ``{city}`` is an entry of the word list ``city`` (the same one wherever it is repeated in the template),
``{city2}`` another one, ``{n:4-20}`` a whole number, ``{n:10-90:10}`` one in steps of ten, and ``[[a|b]]`` is ``a`` or
``b``. ``\\n`` written in a template file is a line break.
"""

import random
import re
from pathlib import Path

ROOT = Path(__file__).parent
RESERVED_EVERY = 9
"""In a list with reserved entries every ninth one is kept for the held-out prompts."""

_CHOICE = re.compile(r"\[\[((?:[^\[\]]|\[(?!\[)|\](?!\]))*)\]\]")
_SLOT = re.compile(r"\{([a-z_]+)(\d?)(?::(\d+)-(\d+)(?::(\d+))?)?\}")
_CODE_SLOT = re.compile(r"@([a-z_]+)(\d?)(?::(\d+)-(\d+)(?::(\d+))?)?@")
_ARTICLE = re.compile(r"\b([Aa]) (?=(?!one\b|once\b|euro|uni|use)[aeiouAEIO])")


def read_lines(path: Path) -> list[str]:
    """Return the non-empty lines of a template file, comments (``#``) left out and ``\\n`` turned into line breaks."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.strip().replace("\\n", "\n") for line in lines if line.strip() and not line.startswith("# ")]


def read_sections(path: Path) -> dict[str, list[str]]:
    """Return the entries of a word-list file by section; entries stand on lines of their own or between `` | ``."""
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in read_lines(path):
        if line.startswith("== "):
            name = line[3:].strip()
            if name in sections:
                raise ValueError(f"{path.name}: the section {name!r} appears twice; merge the two")
            current = sections[name] = []
        else:
            current.extend(entry.strip() for entry in line.split(" | ") if entry.strip())
    return sections


def load_word_lists(folder: Path = ROOT / "words") -> dict[str, list[str]]:
    """Return all word lists of a folder; a section named ``city*`` is the list ``city`` with reserved entries."""
    lists: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.txt")):
        for name, entries in read_sections(path).items():
            if name in lists or f"{name}*" in lists:
                raise ValueError(f"{path.name}: the word list {name!r} is defined twice; rename one")
            lists[name] = list(dict.fromkeys(entries))
    return lists


def split_entries(entries: list[str], held_out: bool) -> list[str]:
    """Return the entries that one side of the split may use: every ninth is held out, all others are for training."""
    return [entry for index, entry in enumerate(entries) if (index % RESERVED_EVERY == 4) == held_out]


class Decks:
    """Shuffled decks of entries: each is dealt once before any is dealt again, so that all are used about equally."""

    def __init__(self, lists: dict[str, list[str]], rng: random.Random, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out
        self._entries: dict[str, list[str]] = {}
        self._decks: dict[str, list[str]] = {}
        for name, entries in lists.items():
            self.add(name.rstrip("*"), entries, reserved=name.endswith("*"))

    def add(self, name: str, entries: list[str], reserved: bool = False) -> None:
        """Add a list of entries; of a reserved one only this side's share is kept."""
        self._entries[name] = split_entries(entries, self.held_out) if reserved else entries

    def deal(self, name: str) -> str:
        """Return the next entry of a list; `KeyError` when no list has that name."""
        if name not in self._entries:
            raise KeyError(f"no word list is named {name!r}; add a section '== {name}' to a file of words/")
        if not self._decks.get(name):
            self._decks[name] = self.rng.sample(self._entries[name], len(self._entries[name]))
        return self._decks[name].pop()

    def expand(self, template: str, code: bool = False) -> str:
        """Fill a template; with `code` slots are written ``@name@`` and braces stay as they are."""
        while _CHOICE.search(template):
            template = _CHOICE.sub(lambda found: self.rng.choice(found[1].split("|")), template)
        chosen: dict[str, str] = {}

        def fill(found: re.Match[str]) -> str:
            key = found[1] + found[2]
            if key not in chosen:
                chosen[key] = self._draw(found, chosen)
            return chosen[key]

        pattern = _CODE_SLOT if code else _SLOT
        text = pattern.sub(fill, template)
        if not code and pattern.search(text):
            text = pattern.sub(fill, text)
        return text if code else _ARTICLE.sub(r"\1n ", text)

    def _draw(self, found: re.Match[str], chosen: dict[str, str]) -> str:
        if found[3] is not None:
            return str(self.rng.randrange(int(found[3]), int(found[4]) + 1, int(found[5] or 1)))
        value = self.deal(found[1])
        while value in chosen.values():
            value = self.deal(found[1])
        return value
