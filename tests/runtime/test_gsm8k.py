"""The comparison on GSM8K at a tiny scale; `python -m tests.runtime.gsm8k` runs it on a trained speculator."""

import json
from pathlib import Path
from typing import Any

import pytest

from speculators.formats.checkpoint import read_config
from tests.runtime.gsm8k import PARTS, agreements, faults, final_number, main, read_questions


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"9 + 9 = 18, so \boxed{\$1,018} of 20 eggs", "1018"),
        (r"\boxed{3} is wrong, it is \boxed{4.50}", "4.5"),
        (r"that is 12 in all, \boxed{twelve}", "12"),
        ("from 7 to -2", "-2"),
        ("none", None),
    ],
)
def test_the_final_number_is_the_boxed_one_or_the_last(text: str, number: str | None) -> None:
    assert final_number(text) == number


def test_the_questions_are_fifty() -> None:
    questions = read_questions(50)
    assert len(set(questions)) == 50
    assert all(question.endswith("\\boxed{}.") for question in questions)
    assert agreements(["1", None, "3"], ["1", None, "4"]) == 2


def test_parts_are_kept_and_told_together(tiny_speculator: Path, tmp_path: Path) -> None:
    """Verifier, method and depth are those that the directory names."""
    out = tmp_path / "gsm8k.json"
    few = ["--speculator", str(tiny_speculator), "--out", str(out), "--prompts", "2", "--max-tokens", "6"]
    assert main([*few, "--parts", "float32", "bfloat16"]) == 0
    assert not out.exists()
    parts = {path.name: path.stat().st_mtime_ns for path in out.with_suffix(".parts").iterdir()}
    assert parts.keys() == {"float32.json", "bfloat16.json"}
    main(few)
    kept = {path.name: path.stat().st_mtime_ns for path in out.with_suffix(".parts").iterdir()}
    assert len(kept) == len(PARTS)
    assert kept.items() >= parts.items()
    told = json.loads(out.read_text(encoding="utf-8"))
    named = read_config(tiny_speculator)["speculators_config"]
    assert told["verifier"] == named["verifier"]["name_or_path"]
    assert (told["method"], told["num_speculative_tokens"]) == (
        "eagle3",
        named["proposal_methods"][0]["speculative_tokens"],
    )
    assert told["float32"]["identical"] is True
    assert (told["num_prompts"], told["max_tokens"]) == (2, 6)


def test_what_fails_is_named() -> None:
    fine: dict[str, Any] = {
        "float32": {"identical": True, "top2_gaps": {}},
        "bfloat16": {"same_first_tokens": 0.66, "same_numbers": 0.5, "same_numbers_of_plain_runs": 0.6, "p": 0.2},
    }
    assert faults(fine) == []
    wrong = {
        "float32": {"identical": False, "top2_gaps": {3: 1e-6}},
        "bfloat16": {"same_first_tokens": 0.64, "same_numbers": 0.5, "same_numbers_of_plain_runs": 0.8, "p": 0.001},
    }
    assert [line.partition(":")[0] for line in faults(wrong)] == ["float32", "bfloat16", "bfloat16"]
