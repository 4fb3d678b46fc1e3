"""Which reading of a draft accepts most: drafts that know an answer by heart, read rightly and wrongly."""

import json
from pathlib import Path
from typing import Any

import pytest

from speculators.convert.check import (
    PROMPTS,
    Check,
    Measured,
    Reading,
    built_in_prompts,
    check,
    check_speculator,
    readings,
)
from speculators.errors import FormatError, UsageError
from speculators.runtime.stats import SpecDecodeStats
from tests.convert.trained_drafts import Trained, trained
from tests.models.by_heart import PROMPT, tiny_verifier, unlearnt
from tests.models.drafts import random_speculator

TOKENS = 40


def draft(**changes: Any) -> tuple[Trained, Check]:
    """A draft that tells answers apart by the verifier's states, and its check under keys that say otherwise."""
    found = trained("eagle3", draft_vocab_size=32, norm_before_residual=False, norm_before_fc=False, norm_output=False)
    config = found.speculator.config
    speculator = found.speculator.read_as(type(config).from_json(config.to_json() | changes))
    return found, check_speculator(speculator, found.verifier, found.prompts, found.length)


def test_the_written_reading_is_the_best_of_a_draft_that_is_read_rightly() -> None:
    found, seen = draft()
    ids = found.speculator.config.aux_layer_ids
    assert [one.reading.name for one in seen.measured] == [
        "as written",
        "layer ids + 1",
        "layer ids - 1",
        "norm_before_residual true",
        "norm_output true",
    ]
    assert seen.measured[1].reading.options == {"aux_layer_ids": [item + 1 for item in ids]}
    assert seen.best is seen.written
    assert seen.better is None
    assert seen.warning is None
    row = seen.to_json()[0]
    drafts, accepted = row["num_drafts"], row["num_accepted_tokens"]
    assert row["reading"] == "as written"
    assert row["acceptance_length"] == pytest.approx(1 + accepted / drafts)
    # It knows the answers by heart: of three drafts a step nearly all are accepted.
    assert row["acceptance_length"] > 3.5


@pytest.mark.parametrize(("shift", "name"), [(-1, "layer ids + 1"), (1, "layer ids - 1")])
def test_shifted_layer_ids_are_named(shift: int, name: str) -> None:
    ids = draft()[0].speculator.config.aux_layer_ids
    _, seen = draft(eagle_aux_hidden_state_layer_ids=[item + shift for item in ids])
    assert seen.better is not None
    assert seen.better.reading.name == name
    assert seen.better.reading.options == {"aux_layer_ids": ids}
    assert seen.warning is not None
    assert f"convert again with aux_layer_ids = {ids}" in seen.warning


def test_a_flipped_norm_flag_is_named() -> None:
    _, seen = draft(norm_before_residual=True)
    assert seen.better is not None
    assert seen.better.reading.options == {"norm_before_residual": False}


def test_a_draft_that_knows_nothing_is_flagged_as_such() -> None:
    verifier = tiny_verifier()
    found = check_speculator(unlearnt("eagle3", verifier), verifier, [PROMPT], TOKENS)
    assert found.better is None
    assert found.warning is not None
    assert "hardly a draft is accepted under any reading" in found.warning


def test_families_without_such_readings_are_measured_as_written() -> None:
    assert [one.name for one in readings(random_speculator("medusa").config)] == ["as written"]
    names = [one.name for one in readings(random_speculator("dflash", num_layers=1).config)]
    assert names == [
        "as written",
        "layer ids + 1",
        "layer ids - 1",
        "sample_from_anchor true",
        "sliding_window_non_causal false",
    ]


def test_readings_that_the_verifier_cannot_have_are_left_out() -> None:
    """Depth 0 has none below it, depth 8 none above."""
    verifier = tiny_verifier()
    speculator = unlearnt("eagle3", verifier)
    edges = speculator.read_as(
        type(speculator.config).from_json(
            speculator.config.to_json() | {"eagle_aux_hidden_state_layer_ids": [0, 4, verifier.num_layers]}
        )
    )
    found = check_speculator(edges, verifier, [PROMPT], 4)
    assert [one.reading.name for one in found.measured if "ids" in one.reading.name] == []


def measured(name: str, verifications: list[int]) -> Measured:
    """A reading that took so many verifications for each prompt's answer of 40 tokens."""
    each = [SpecDecodeStats(3, num_drafts=count, num_accepted_tokens=40 - count) for count in verifications]
    return Measured(Reading(name), tuple(each))


def test_a_difference_counts_beyond_the_noise_between_prompts() -> None:
    """Saved are 2, 1, 0, 2, 1: 6 in all, with a deviation of sqrt(2.8 / 4) and a limit of 2 sqrt(0.7 * 5) = 3.74."""
    written = measured("as written", [30, 28, 35, 31, 29])
    better = measured("other", [28, 27, 35, 29, 28])
    assert better.acceptance_length == pytest.approx(1 + (200 - 147) / 147)
    assert Check((written, better)).better is better
    assert Check((better, written)).better is None
    # Saved are 8, -5, 6, -4, 1: 6 in all again, with a limit of 2 sqrt(33.7 * 5) = 26.
    by_chance = measured("other", [22, 33, 29, 35, 28])
    assert Check((written, by_chance)).best is by_chance
    assert Check((written, by_chance)).better is None


def test_a_reading_needs_the_same_tensors() -> None:
    speculator = random_speculator("eagle3")
    with pytest.raises(FormatError, match=r"has other tensors \(input_norm.weight\)"):
        speculator.read_as(type(speculator.config).from_json(speculator.config.to_json() | {"norm_before_fc": False}))
    other = speculator.read_as(type(speculator.config).from_json(speculator.config.to_json() | {"norm_output": False}))
    mine, theirs = speculator.draft.state_dict(), other.draft.state_dict()
    assert all(mine[name].data_ptr() == theirs[name].data_ptr() for name in mine)


def test_the_prompts_of_the_package() -> None:
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len({row["prompt"] for row in rows}) == 20
    assert [one[0]["content"] for one in built_in_prompts()] == [row["prompt"] for row in rows]


def test_no_prompts_are_not_those_of_the_package(tiny_speculator: Path) -> None:
    with pytest.raises(UsageError, match="there is nothing to check with"):
        check(tiny_speculator, [])


def test_a_directory_is_checked_with_its_verifier(tiny_speculator: Path) -> None:
    found = check(tiny_speculator, max_new_tokens=4)
    assert len(found.measured) == 5
    assert all(one.num_drafts >= 20 for one in found.measured)
    with pytest.raises(UsageError, match="no prompts"):
        check_speculator(random_speculator("eagle3"), tiny_verifier(), [])
