"""Which reading of a draft accepts most: drafts that know an answer by heart, read rightly and wrongly."""

import json
from collections.abc import Mapping
from math import sqrt
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
from speculators.models.speculator import Speculator
from speculators.runtime.stats import SpecDecodeStats
from tests.models.by_heart import PROMPT, depth_of, learnt_by_heart, unlearnt
from tests.models.drafts import random_speculator

TOKENS = 40


def told(family: str, **changes: Any) -> tuple[Check, Speculator]:
    """The check of a draft of this family that knows its sample, under a configuration that says otherwise."""
    learnt = learnt_by_heart(family)
    speculator = changed(learnt.speculator, changes)
    return check_speculator(speculator, learnt.verifier, [PROMPT], TOKENS), learnt.speculator


def changed(speculator: Speculator, changes: Mapping[str, Any]) -> Speculator:
    config = speculator.config
    raw = config.to_json() | dict(changes)
    raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = depth_of(config.speculators_model_type)
    return speculator.read_as(type(config).from_json(raw))


def test_the_written_reading_is_the_best_of_a_draft_that_is_read_rightly() -> None:
    found, speculator = told("eagle3")
    ids = speculator.config.aux_layer_ids
    assert [one.reading.name for one in found.measured] == [
        "as written",
        "layer ids + 1",
        "layer ids - 1",
        f"norm_before_residual {str(not speculator.config.norm_before_residual).lower()}",
        f"norm_output {str(not speculator.config.norm_output).lower()}",
    ]
    assert found.measured[1].reading.options == {"aux_layer_ids": [item + 1 for item in ids]}
    # The sample is known by heart: after the first step every draft is accepted.
    assert found.best is found.written
    assert found.written.acceptance_length > 1 + 0.8 * depth_of("eagle3")
    assert found.better is None
    assert found.warning is None
    assert found.to_json()[0]["reading"] == "as written"
    assert found.to_json()[0]["acceptance_length"] == found.written.stats.acceptance_length


@pytest.mark.parametrize(("shift", "name"), [(-1, "layer ids + 1"), (1, "layer ids - 1")])
def test_shifted_layer_ids_are_named(shift: int, name: str) -> None:
    ids = learnt_by_heart("eagle3").speculator.config.aux_layer_ids
    found, _ = told("eagle3", eagle_aux_hidden_state_layer_ids=[item + shift for item in ids])
    assert found.better is not None
    assert found.better.reading.name == name
    assert found.better.reading.options == {"aux_layer_ids": ids}
    assert found.warning is not None
    assert f"convert again with aux_layer_ids = {ids}" in found.warning


def test_a_flipped_norm_flag_is_named() -> None:
    written = learnt_by_heart("eagle3").speculator.config.norm_before_residual
    found, _ = told("eagle3", norm_before_residual=not written)
    assert found.better is not None
    assert found.better.reading.options == {"norm_before_residual": written}


def test_a_draft_that_knows_nothing_is_flagged_as_such() -> None:
    verifier = learnt_by_heart("eagle3").verifier
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
    verifier = learnt_by_heart("eagle3").verifier
    speculator = unlearnt("eagle3", verifier)
    edges = speculator.read_as(
        type(speculator.config).from_json(
            speculator.config.to_json() | {"eagle_aux_hidden_state_layer_ids": [0, 4, verifier.num_layers]}
        )
    )
    found = check_speculator(edges, verifier, [PROMPT], 4)
    assert [one.reading.name for one in found.measured if "ids" in one.reading.name] == []


def test_a_difference_counts_beyond_its_standard_error() -> None:
    def measured(name: str, histogram: list[int]) -> Measured:
        stats = SpecDecodeStats(len(histogram) - 1)
        for accepted, count in enumerate(histogram):
            for _ in range(count):
                stats.add_step(len(histogram) - 1, accepted)
        return Measured(Reading(name), stats)

    written, other = measured("as written", [60, 40]), measured("other", [50, 50])
    # A share p of n has the sample variance n p (1 - p) / (n - 1).
    assert written.error == pytest.approx(sqrt(0.6 * 0.4 / 99))
    assert other.error == pytest.approx(sqrt(0.25 / 99))
    assert Check((written, other)).best is other
    assert Check((written, other)).better is None
    surely = measured("other", [20, 80])
    assert Check((written, surely)).better is surely


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


def test_a_directory_is_checked_with_its_verifier(tiny_speculator) -> None:
    found = check(tiny_speculator, max_new_tokens=4)
    assert len(found.measured) == 5
    assert all(one.stats.num_drafts >= 20 for one in found.measured)
    with pytest.raises(UsageError, match="no prompts"):
        check_speculator(random_speculator("eagle3"), learnt_by_heart("eagle3").verifier, [])
