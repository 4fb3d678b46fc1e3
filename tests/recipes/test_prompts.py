"""The shipped prompts: counts, kinds, shares, no near-duplicates, and the generator writes the same files again."""

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[2] / "recipes" / "data"
FILES = {"train": DATA / "prompts-train.jsonl", "heldout": DATA / "prompts-heldout.jsonl"}
KINDS = {
    "advice", "explain", "story", "email", "blog", "poem", "travel", "product", "speech", "description", "roleplay",
    "reasoning", "stem", "humanities", "code_write", "code_idea", "code_other", "code_explain", "code_fix",
    "arithmetic", "word_problem", "rewrite", "summary", "extraction", "passage_qa", "list", "compare", "translate",
    "brainstorm",
    "function_write", "class_write", "sql_query", "web_page", "series", "math_steps", "convert_text", "form_letter",
}  # fmt: skip
BENCHMARK_PROMPTS = (
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?",
    "David has three sisters. Each of them has one brother. How many brothers does David have?",
    "Describe a vivid and unique character, using strong imagery and creative language.",
    "Write a python function to remove first and last occurrence of a given character from the string.",
    "When rolling two dice, what is the probability that you roll a total number that is at least 3?",
)


def read(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILES[split].read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    return {split: read(split) for split in FILES}


def word_runs(text: str) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[start : start + 5]) for start in range(max(len(words) - 4, 1))}


def similar_pairs(texts: list[str], above: float) -> Iterator[tuple[str, str, float]]:
    sets = [word_runs(text) for text in texts]
    holders: defaultdict[str, list[int]] = defaultdict(list)
    for later, own in enumerate(sets):
        shared = Counter(earlier for run in own for earlier in holders[run])
        for earlier, count in shared.items():
            jaccard = count / len(own | sets[earlier])
            if jaccard > above:
                yield texts[earlier], texts[later], jaccard
        for run in own:
            holders[run].append(later)


def test_generator_writes_the_shipped_files_byte_for_byte(tmp_path: Path) -> None:
    command = [sys.executable, str(DATA / "make_prompts.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    for path in FILES.values():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in FILES.values())


@pytest.mark.parametrize(("split", "count", "structured"), [("train", 4200, 1500), ("heldout", 200, 120)])
def test_counts_ids_and_row_form(
    rows: dict[str, list[dict[str, Any]]], split: str, count: int, structured: int
) -> None:
    ids = [row["id"] for row in rows[split]]
    general = [name for name in ids if "structured" not in name]
    assert general == [f"{split}-{number:05d}" for number in range(1, count + 1)]
    others = [name for name in ids if "structured" in name]
    assert others == [f"{split}-structured-{number:05d}" for number in range(1, structured + 1)]
    # Any stretch of the file holds both in proportion.
    expected = 64 * structured / (count + structured)
    assert sum("structured" in name for name in ids[:64]) == pytest.approx(expected, abs=1)
    for row in rows[split]:
        assert set(row) <= {"id", "kind", "turns", "system"}
        assert 1 <= len(row["turns"]) <= 2
        assert all(text == text.strip() and text for text in [*row["turns"], row.get("system", "a")])


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_kind_is_there_and_none_dominates(rows: dict[str, list[dict[str, Any]]], split: str) -> None:
    counts = Counter(row["kind"] for row in rows[split])
    assert set(counts) == KINDS
    assert max(counts.values()) <= 0.08 * len(rows[split])
    # Each part of the set has kinds of its own; none of them is rarer than 1 in 100 there.
    for part in (False, True):
        within = Counter(row["kind"] for row in rows[split] if ("structured" in row["id"]) is part)
        assert min(within.values()) >= 0.01 * within.total()


def test_shares_of_second_turns_and_system_messages(rows: dict[str, list[dict[str, Any]]]) -> None:
    train = rows["train"]
    assert 0.06 <= sum(len(row["turns"]) == 2 for row in train) / len(train) <= 0.10
    assert 0.035 <= sum("system" in row for row in train) / len(train) <= 0.065
    assert any(len(row["turns"]) == 2 for row in rows["heldout"])
    assert any("system" in row for row in rows["heldout"])


def test_lengths(rows: dict[str, list[dict[str, Any]]]) -> None:
    lengths = [len(row["turns"][0].split()) for row in rows["train"] + rows["heldout"]]
    assert max(lengths) <= 175
    assert min(lengths) >= 4
    assert sum(10 <= length <= 60 for length in lengths) / len(lengths) >= 0.7


def test_no_near_duplicates_in_the_whole_set(rows: dict[str, list[dict[str, Any]]]) -> None:
    texts = [row["turns"][0] for row in rows["train"] + rows["heldout"]]
    assert len(set(texts)) == len(texts)
    assert list(similar_pairs(texts, above=0.7)) == []


def test_near_duplicate_search_finds_a_planted_pair() -> None:
    text = "Write a short story about a young inventor in a library that is open only at night"
    assert [pair[2] for pair in similar_pairs([text, "Something else entirely.", text + "!"], above=0.7)] == [1.0]
    # 13 runs of five words and one more in the longer text
    assert [pair[2] for pair in similar_pairs([text, text + " long"], above=0.7)] == [13 / 14]


@pytest.mark.parametrize(("file", "section"), [("topics", "history"), ("topics", "product"), ("places", "region")])
def test_held_out_subjects_are_not_trained_on(rows: dict[str, list[dict[str, Any]]], file: str, section: str) -> None:
    words = (DATA / "prompts" / "words" / f"{file}.txt").read_text(encoding="utf-8")
    subjects = words.split(f"== {section}*\n")[1].split("\n")[0].split(" | ")
    used = {
        split: {name for name in subjects if any(name in row["turns"][0] for row in rows[split])} for split in FILES
    }
    assert used["train"] & used["heldout"] == set()
    assert len(used["train"]) >= 0.85 * len(subjects)
    assert len(used["heldout"]) >= 2


def test_held_out_prompts_are_further_from_training_prompts(rows: dict[str, list[dict[str, Any]]]) -> None:
    held_out = {row["turns"][0] for row in rows["heldout"]}
    texts = [row["turns"][0] for row in rows["heldout"] + rows["train"]]
    crossing = [pair for pair in similar_pairs(texts, above=0.5) if (pair[0] in held_out) != (pair[1] in held_out)]
    assert crossing == []


def test_code_keeps_its_case(rows: dict[str, list[dict[str, Any]]]) -> None:
    for row in rows["train"] + rows["heldout"]:
        assert not re.search(r"^(Def|Class|Import|Const|Function|With open)\b.*[:;{]$", row["turns"][0], re.MULTILINE)


def test_no_slot_is_left_unfilled(rows: dict[str, list[dict[str, Any]]]) -> None:
    for row in rows["train"] + rows["heldout"]:
        text = " ".join(row["turns"])
        if "code" not in row["kind"]:
            # \boxed{} and JSON are meant; no other brace is.
            braces = r"\{[a-z_]+\d?(:[^}]*)?\}" if row["kind"] in ("math_steps", "convert_text") else r"[{}]"
            assert not re.search(braces + r"|\[\[|\|", text), text
        assert not re.search(r"@\w+@|\\n|<code>", text), text


def test_no_benchmark_prompt_is_copied(rows: dict[str, list[dict[str, Any]]]) -> None:
    texts = [row["turns"][0] for row in rows["train"] + rows["heldout"]]
    for prompt in BENCHMARK_PROMPTS:
        assert max(len(word_runs(prompt) & word_runs(text)) / len(word_runs(prompt)) for text in texts) < 0.5
