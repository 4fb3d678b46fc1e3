"""The kinds of prompts, their shares of the data set, and how one prompt of each kind is written."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from .compose import Composer
from .grammar import ROOT, Decks, read_lines

TAIL_SHARE = 0.4
OPENING_SHARE = 0.12
REQUESTS = ("Write", "Compare", "Describe", "Explain", "Give", "How", "List", "Name", "Suggest", "What", "Which", "Why")


class Kind(NamedTuple):
    """A kind of prompt: its name, its weight in the data set, and the lists of its second turns and added wishes."""

    name: str
    weight: int
    followup: str
    tail: str | None


KINDS = (
    Kind("advice", 290, "followup_explain", "tail_explain"),
    Kind("explain", 350, "followup_explain", "tail_explain"),
    Kind("story", 220, "followup_writing", "tail_writing"),
    Kind("email", 180, "followup_writing", "tail_writing"),
    Kind("blog", 170, "followup_writing", "tail_writing"),
    Kind("poem", 110, "followup_writing", "tail_writing"),
    Kind("travel", 140, "followup_writing", "tail_writing"),
    Kind("product", 130, "followup_writing", "tail_writing"),
    Kind("speech", 100, "followup_writing", "tail_writing"),
    Kind("description", 110, "followup_writing", "tail_writing"),
    Kind("roleplay", 180, "followup_role", "tail_writing"),
    Kind("reasoning", 190, "followup_math", None),
    Kind("stem", 240, "followup_explain", "tail_explain"),
    Kind("humanities", 220, "followup_explain", "tail_explain"),
    Kind("code_write", 290, "followup_code", "tail_code"),
    Kind("code_idea", 60, "followup_code", "tail_code"),
    Kind("code_other", 150, "followup_code", None),
    Kind("code_explain", 100, "followup_code", None),
    Kind("code_fix", 80, "followup_code", None),
    Kind("arithmetic", 130, "followup_math", None),
    Kind("word_problem", 330, "followup_math", None),
    Kind("rewrite", 170, "followup_text", None),
    Kind("summary", 160, "followup_text", None),
    Kind("extraction", 140, "followup_text", None),
    Kind("passage_qa", 140, "followup_text", None),
    Kind("list", 200, "followup_list", "tail_list"),
    Kind("compare", 150, "followup_explain", "tail_explain"),
    Kind("translate", 70, "followup_explain", None),
    Kind("brainstorm", 140, "followup_list", "tail_list"),
)

# Answers with a fixed form: code, tables, series, calculations by steps.
STRUCTURED_KINDS = (
    Kind("function_write", 42, "followup_code", None),
    Kind("class_write", 30, "followup_code", None),
    Kind("sql_query", 16, "followup_code", None),
    Kind("web_page", 20, "followup_code", None),
    Kind("series", 33, "followup_list", None),
    Kind("math_steps", 52, "followup_math", None),
    Kind("convert_text", 32, "followup_text", None),
    Kind("form_letter", 25, "followup_writing", None),
)


def shares(kinds: Sequence[Kind], total: int) -> dict[str, int]:
    """Return how many prompts of each kind make `total` (largest remainders, so that the sum is exact)."""
    weights = sum(kind.weight for kind in kinds)
    counts = {kind.name: total * kind.weight // weights for kind in kinds}
    by_remainder = sorted(kinds, key=lambda kind: total * kind.weight % weights, reverse=True)
    for kind in by_remainder[: total - sum(counts.values())]:
        counts[kind.name] += 1
    return counts


def with_wishes(text: str, kind: Kind, decks: Decks) -> str:
    """Return a prompt, in some cases with an opening before it or with a wish about the answer after it."""
    if kind.tail is None or "\n" in text:
        return text
    if decks.rng.random() < TAIL_SHARE:
        text = f"{text} {decks.expand(decks.deal(kind.tail))}"
    if decks.rng.random() < OPENING_SHARE and text.startswith(REQUESTS):
        text = f"{decks.expand(decks.deal('opening'))} {text}"
    return text


def from_template(decks: Decks, deck: str) -> str:
    """Return a filled template of a deck."""
    return decks.expand(decks.deal(deck))


def writers(kinds: Sequence[Kind], decks: Decks) -> dict[str, Callable[[], str]]:
    """Return for each of `kinds` a function that writes one prompt."""
    composer = Composer(decks)
    made: dict[str, Callable[[], str]] = {
        "summary": composer.summary,
        "passage_qa": composer.passage_qa,
        "extraction": composer.extraction,
        "rewrite": composer.rewrite,
        "code_explain": composer.code_explain,
        "code_fix": composer.code_fix,
        "word_problem": composer.word_problem,
        "arithmetic": composer.arithmetic,
    }
    for kind in kinds:
        if kind.name not in made:
            deck = f"_{kind.name}"
            decks.add(deck, read_lines(ROOT / "templates" / f"{kind.name}.txt"))
            made[kind.name] = partial(from_template, decks, deck)
    return made
