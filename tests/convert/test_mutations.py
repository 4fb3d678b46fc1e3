"""No checkpoint with one thing wrong becomes another draft in silence."""

from collections import Counter
from pathlib import Path

import pytest

from speculators.convert.options import ConversionVerifier
from tests.convert import trained_mutations
from tests.convert.mutation_kinds import is_native
from tests.convert.mutations import CASES, Make, tried


@pytest.mark.parametrize("make", CASES, ids=lambda make: getattr(make, "__name__", "native"))
def test_some_mutations_of_every_layout(make: Make, tiny_verifier: Path) -> None:
    rows = tried(make(), ConversionVerifier(str(tiny_verifier)), every=16)
    assert rows
    assert [row for row in rows if row.outcome == "silent"] == []


@pytest.mark.full
def test_every_mutation_is_refused_or_flagged(tiny_verifier: Path) -> None:
    verifier = ConversionVerifier(str(tiny_verifier))
    rows = [row for make in CASES for row in tried(make(), verifier)]
    assert [row for row in rows if row.outcome == "silent"] == []
    counts = Counter(row.outcome for row in rows)
    assert counts["refused"] > 3000
    assert counts["flagged"] > 300
    assert len({row.layout for row in rows}) == len(CASES)
    assert any(is_native(make()) for make in CASES)


@pytest.mark.full
@pytest.mark.parametrize("layout", trained_mutations.LAYOUTS)
def test_what_only_acceptance_shows_is_flagged_by_a_check(layout: str) -> None:
    rows = list(trained_mutations.table([layout]))
    assert len(rows) >= 4
    assert [row for row in rows if row.outcome == "silent"] == []


@pytest.mark.full
def test_a_check_names_the_shift_of_layer_ids() -> None:
    rows = {row.mutation: row.said for row in trained_mutations.table(["sglang"])}
    assert "with layer ids - 1 against" in rows["layer ids one more"]
    assert "with layer ids + 1 against" in rows["layer ids one less"]
    assert "with norm_before_residual false against" in rows["norm_before_residual True"]
