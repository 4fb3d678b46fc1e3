"""Codes and wording of faults, and the exceptions that carry them."""

import re
from pathlib import Path

import pytest

from speculators import errors
from speculators.errors import DataError, FormatError, SpeculatorsError, UsageError
from speculators.formats.config import ProposalConfig
from speculators.formats.faults import FAULTS, error_of, fault, nearest, refused_as_format_error, shown


def test_codes_are_unique_and_slugs_are_words() -> None:
    codes = [code for code, _ in FAULTS.values()]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"F\d{3}", code) for code in codes)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug) for slug in FAULTS)


def test_codes_that_scripts_know_stay_what_they_are() -> None:
    known = {"F002": "model-type", "F004": "no-speculative-tokens", "F009": "second-proposal", "F012": "d2t-absolute"}
    known |= {"F016": "no-lm-head", "F019": "fc-width", "F022": "norms-all-ones", "F025": "broken-weights"}
    known |= {"F041": "norms-before-fc", "F042": "fc-norm-not-read", "F043": "norm-output-not-read"}
    known |= {"F044": "anchor-sampling", "F045": "mixed-causality", "F046": "causality-not-read"}
    known |= {"F047": "markov-head", "F048": "no-sample-from-anchor", "F049": "context-short"}
    known |= {"F050": "tokens-exceed-block", "F051": "mask-token-id", "F052": "not-served"}
    known |= {"F053": "integer-width", "F054": "reduced-vocabulary", "F055": "default-differs"}
    assert {code: slug for slug, (code, _) in FAULTS.items() if code in known} == known


def test_a_fault_is_one_line() -> None:
    assert str(fault("d2t-absolute", "first\n  second")) == "ERROR F012 d2t-absolute: first second"
    assert str(fault("second-proposal", "two")) == "WARNING F009 second-proposal: two"


def test_an_error_carries_the_first_code_and_every_fault() -> None:
    single = error_of([fault("no-verifier", "none")], "draft")
    assert (str(single), single.code) == ("draft: F005 no-verifier: none", "F005")
    both = error_of([fault("no-verifier", "none"), fault("bad-value", "worse")], "draft")
    assert str(both).splitlines() == ["draft: 2 faults", "  F005 no-verifier: none", "  F033 bad-value: worse"]
    assert [item.slug for item in both.faults] == ["no-verifier", "bad-value"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true (boolean)"),
        (3, "3 (integer)"),
        ("a", '"a" (string)'),
        ([1], "[1] (list)"),
        ({"a": 1}, '{"a": 1} (object)'),
        ({1}, "set (set)"),
        ("x" * 100, '"' + "x" * 56 + "... (string)"),
    ],
)
def test_values_are_shown_with_their_json_type(value: object, text: str) -> None:
    assert shown(value) == text


def test_nearest_names() -> None:
    assert nearest("hiden_size", ["hidden_size", "vocab_size"]) == " (did you mean 'hidden_size'?)"
    assert nearest("qqq", ["hidden_size"]) == ""


def test_values_put_together_by_a_program_are_refused_in_the_same_way() -> None:
    words = "draft: F033 bad-value: speculative_tokens is 0 (integer); expected greater than 0"
    with pytest.raises(FormatError, match=re.escape(words)), refused_as_format_error("draft"):
        ProposalConfig(speculative_tokens=0)
    words = "F031 unknown-key: tokens is not a known key"
    with pytest.raises(FormatError, match=words), refused_as_format_error("draft"):
        ProposalConfig.model_validate({"speculative_tokens": 1, "tokens": 2})


def test_exit_codes() -> None:
    assert SpeculatorsError.exit_code == FormatError.exit_code == 1
    assert UsageError.exit_code == 2


def test_every_exception_is_drawn_in_the_tree() -> None:
    assert errors.__doc__ is not None
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) == 10
    assert all(issubclass(kind, SpeculatorsError) and kind.__name__ in errors.__doc__ for kind in classes)


def test_data_errors_say_where() -> None:
    assert str(DataError("bad", path=Path("a.jsonl"), line=3)) == "a.jsonl:3: bad"
    assert str(DataError("bad", path="a.jsonl")) == "a.jsonl: bad"
    assert str(DataError("bad")) == "bad"
    assert FormatError("x").code is None
