"""Rows of 32k tokens train within bounded memory, and what bounds it changes no number."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.models import FAMILIES, attention
from speculators.models.dflash import blocks
from tests.allocations import Allocations
from tests.models.contract import contract_of
from tests.models.drafts import gradients, pack, random_speculator, verifier_head
from tests.models.eagle3.dense import dense_loss
from tests.models.long_rows import OPTIONS
from tests.models.pitfalls import BLOCKS

ROOT = Path(__file__).resolve().parent.parent.parent
LENGTH = 32_768
# A grid of bool is 1024 MiB, and the weights of one head are 4096.
BOUND_MIB = {"eagle3": 400, "dflash": 128}


@pytest.mark.full
@pytest.mark.parametrize("family", BOUND_MIB)
def test_a_document_of_32k_tokens_trains_in_less_than_any_grid_takes(family: str) -> None:
    command = [sys.executable, "-m", "tests.models.long_rows", family, str(LENGTH)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    assert math.isfinite(found["loss"])
    assert found["counted"] >= 1500
    assert found["mib"] < BOUND_MIB[family]


def step_of(family: str, options: dict[str, Any], **knobs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients over documents of 90, 1 and 40 tokens."""
    speculator = random_speculator(family, **options)
    batch = pack([[1] * 90, [1], [0] * 3 + [1] * 37], row=131, num_aux=len(speculator.draft.aux_layer_ids))
    output = FAMILIES[family].objective(**knobs).step(speculator.draft, batch, verifier_head())
    output.loss.backward()
    return output.loss.detach(), gradients(speculator.draft)


@pytest.mark.parametrize("family", ["eagle3", "eagle", "peagle", "dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("window", [None, 7])
def test_many_small_blocks_without_kept_weights_are_one_large_one(
    family: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a document of 32k tokens does, at a size where the whole grid is made too."""
    options: dict[str, Any] = {} if window is None else {"sliding_window": window}
    if family in ("eagle3", "peagle") and window is not None:
        options["layer_type"] = "qwen3"
    if family == "eagle":
        options = {}
    if family in BLOCKS:
        options = {**contract_of(family).variants["plain"], **options}
    knobs = {"feature_noise": 0.0} if family == "eagle" else {"down_sample_ratio": 1.0} if family == "peagle" else {}
    loss, expected = step_of(family, options, **knobs)
    monkeypatch.setattr(attention, "MAX_SCORES", 100)
    monkeypatch.setattr(attention, "MAX_KEPT_WEIGHTS", 0)
    monkeypatch.setattr(blocks, "MAX_SCORES", 100)
    again, found = step_of(family, options, **knobs)
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-6)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def test_small_blocks_are_the_dense_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against EAGLE-3 written out position by position over the whole document."""
    monkeypatch.setattr(attention, "MAX_SCORES", 60)
    monkeypatch.setattr(attention, "MAX_KEPT_WEIGHTS", 0)
    speculator = random_speculator("eagle3", **OPTIONS["eagle3"])
    batch = pack([[0, 0, *[1] * 22], [1] * 9], row=33)
    output = FAMILIES["eagle3"].objective(ttt_steps=2).step(speculator.draft, batch, verifier_head())
    output.loss.backward()
    found = gradients(speculator.draft)
    expected, _ = dense_loss(speculator, batch, verifier_head(), steps=2, decay=0.8)
    expected.backward()
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients(speculator.draft).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_blocks_bound_scores_and_cover_every_query_once() -> None:
    """40,000 tokens, of which every second is a query: no block has more scores a head than the bound."""
    slots = torch.arange(0, 40_000, 2)
    planned = attention.plan_blocks(slots, [30_000, 10_000], None)
    assert [block.rows.start for block in planned] == [0, *(block.rows.stop for block in planned[:-1])]
    assert planned[-1].rows.stop == len(slots)
    assert max(block.size for block in planned) <= attention.MAX_SCORES
    assert max(block.rows.stop - block.rows.start for block in planned) <= attention.BLOCK_ROWS
    with Allocations() as allocations:
        held = attention.plan_blocks(slots, [30_000, 10_000], None)
    assert held
    assert allocations.peak < 2**20
