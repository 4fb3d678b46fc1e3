"""The matrix of methods at a small scale; `python -m tests.runtime.methods` runs all of it."""

from pathlib import Path

import pytest

from speculators.runtime.config import METHODS
from speculators.runtime.sampling import SamplingParams
from tests.runtime.methods import (
    CASES,
    DEPTHS,
    Asked,
    Case,
    differences,
    refused_depths,
    sampled_p,
    served,
    table,
    table_in,
)
from tests.runtime.served import KINDS, Directories

README = Path(__file__).resolve().parent.parent.parent / "README.md"
BY_KIND: dict[str, Asked] = {}


@pytest.mark.parametrize("place", range(len(CASES)), ids=[case.name for case in CASES])
def test_greedy_answers_are_those_without_drafts(place: int, made: Directories) -> None:
    """Of the matrix, one cell a method, another kind of verifier, depth and batch for each."""
    case = CASES[place]
    kind = case.verifiers[place % len(case.verifiers)]
    depths = case.depths()
    asked = BY_KIND.setdefault(kind, Asked(made, kind))
    assert not differences(asked, case, depths[(2 + place) % len(depths)], (3, 1, 16)[place % 3])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_other_depth_is_a_named_error(case: Case, made: Directories) -> None:
    assert refused_depths(made, case) == case.refused()
    assert set(case.depths()) | set(case.refused()) >= set(DEPTHS)


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_what_repeats_itself_is_accepted(name: str, made: Directories) -> None:
    case = next(case for case in CASES if case.name == name)
    llm = served(made, case, "dense", 5)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    llm.generate([[5, 9] * 6, [11, 12, 13] * 4], params, use_tqdm=False)
    assert llm.stats is not None
    assert llm.stats.num_accepted_tokens > 10


@pytest.mark.parametrize("name", ["eagle3", "dspark", "draft_model", "ngram_gpu", "medusa", "mtp (Gemma 4 assistant)"])
def test_sampled_answers_follow_the_verifiers_law(name: str, made: Directories) -> None:
    p = sampled_p(made, next(case for case in CASES if case.name == name), 300)
    assert p is not None
    assert p > 1e-3


def test_every_method_has_a_case() -> None:
    assert {case.name.partition(" ")[0] for case in CASES} == set(METHODS)
    assert {kind for case in CASES for kind in case.verifiers} > set(KINDS)


def test_the_readmes_table_is_of_these_methods() -> None:
    """Its numbers come from a run (`--readme`); what does not depend on one is as the cases say."""
    lines = table_in(README).splitlines()
    assert lines[:2] == table([]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0] for row in cells] == [case.name for case in CASES]
    assert [row[5] for row in cells] == [case.vllm_032 for case in CASES]
    assert all(row[1] == row[3] == row[4] == "yes" for row in cells)
    assert all(row[2].startswith("yes (") == bool(case.small) for row, case in zip(cells, CASES, strict=True))
