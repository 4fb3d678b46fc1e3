"""Triton's verification, in its interpreter, against the readable reference: equal ids, on random and on odd shapes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speculators.runtime import rejection, rules
from speculators.runtime.kernels import verification
from tests.runtime.verification_cases import LAWS, SHAPES, Case, batch, cases


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("laws", LAWS)
def test_kernels_are_the_reference(shape: tuple[int, int, int], laws: str) -> None:
    for case in cases(shape, laws):
        # Greedy requests and coins read no laws.
        if laws == "plain" or case.function in ("verify_standard", "verify_block"):
            assert case.agrees(verification), (case.function, case.drafts)


@pytest.mark.parametrize(
    ("rows", "slots"), [(1, 9), (2, 8), (4, 7), (3, 6), (6, 5), (7, 4), (11, 3), (16, 2), (17, 1), (13, 0)]
)
def test_any_number_of_rows_and_drafts(rows: int, slots: int) -> None:
    arguments = batch((rows, slots, 7 + rows))
    for name in ("verify_standard", "verify_block"):
        assert Case(name, "probabilistic", arguments).agrees(verification)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_drafts_of_other_precision(dtype: torch.dtype) -> None:
    arguments = batch((9, 4, 67), dtype=dtype)
    for name in ("verify_standard", "verify_block"):
        assert Case(name, "probabilistic", arguments).agrees(verification)


def test_tensors_need_not_lie_in_one_piece() -> None:
    """One law for all rows, drafts that are a part of what the verifier read, columns of a larger tensor."""
    target, ids, lengths, draft, coins, noise = batch((6, 3, 21))
    wide = torch.cat([torch.zeros(6, 1, dtype=torch.int64), ids], 1)
    strided = (
        target[:1].expand(6, 4, 21),
        wide[:, 1:],
        torch.stack([lengths, lengths + 5], 1)[:, 0],
        torch.stack([draft, draft], -1)[..., 0],
        coins.T.contiguous().T,
        torch.stack([noise, noise], 1)[:, 1],
    )
    for name in ("verify_standard", "verify_block"):
        assert Case(name, "probabilistic", strided).agrees(verification)
    greedy = (target.argmax(-1).T.contiguous().T, *strided[1:3])
    assert Case("verify_greedy", "one-hot", greedy).agrees(verification)


def test_kernels_are_taken_on_a_gpu_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rules.implementation(torch.device("cpu")) is rejection
    rules.implementation.cache_clear()
    # A C compiler, which launches kernels, is all that is asked of the machine.
    monkeypatch.setenv("CC", sys.executable)
    assert rules.implementation(torch.device("cuda", 0)) is verification
    rules.implementation.cache_clear()


def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """To machine code of two generations, which needs none of them here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.runtime.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    # Three of the six have a form for one-hot drafts besides.
    assert len(lines) == 2 * (6 + 3)
    assert {line[-1] for line in lines} == {"cubin"}
