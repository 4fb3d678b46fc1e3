"""Two processes train what one does, and a run that is stopped goes on as if it had not been."""

import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from speculators.errors import UsageError
from speculators.extract.store import HiddenStatesStore
from speculators.train.config import TrainConfig
from speculators.train.launching import launched_dtype, launched_strategy, require_honoured
from tests.train.processes import BOUNDS, ROOT, equivalence, judgements, resumption
from tests.train.test_family_recipes import make_recipe


def test_two_processes_are_one_with_twice_the_accumulation(tiny_verifier: Path, tmp_path: Path) -> None:
    table = equivalence(tiny_verifier, tmp_path)
    assert len(table) == 8
    for row in table:
        assert row["steps"] == 20, row
        assert row["is_dtensor"] is (row["strategy"] == "fsdp2"), row
        assert row["max_loss_diff"] <= BOUNDS[row["optimizer"]], row
        assert row["max_weight_diff"] <= BOUNDS[row["optimizer"]], row
        assert_rows_held(row["rows"], row["strategy"] == "fsdp2")


def assert_rows_held(by_rank: list[list[tuple[str, int, int]]], split: bool) -> None:
    """Between passes a process has every row of every parameter, or half of them, those of the frozen ones too.

    The verifier's head (384 tokens) is a parameter where it is split. Over all processes each row is held once.
    """
    held = [{name: rows for name, *rows in found} for found in by_rank]
    assert [len(names) for names in held] == [len(found) for found in by_rank], "held otherwise at another step"
    one, other = held
    assert one.keys() == other.keys()
    frozen = {name.removeprefix("module.") for name in one} & {"draft.embed_tokens.weight", "head_weight"}
    assert frozen == ({"draft.embed_tokens.weight", "head_weight"} if split else {"draft.embed_tokens.weight"})
    for name, (rows, total) in one.items():
        assert rows == (-(-total // 2) if split else total), name
        assert other[name] == [total - rows if split else total, total], name
    if split:
        assert one["head_weight"] == [192, 384]


@pytest.fixture(scope="module")
def resumed(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Six steps of training, and three, a signal and three, in several numbers of processes."""
    return resumption(tiny_verifier, tmp_path_factory.mktemp("resumed"))


def assert_resumed(row: dict[str, Any]) -> None:
    """Losses, rates, weights and moments are those of the run that was not stopped; to the bit in one process."""
    assert (row["steps"], row["exit_code"], row["checkpoint"]) == (6, 143, ["step-3"]), row
    differences = [row[key] for key in ("max_loss_diff", "max_lr_diff", "max_weight_diff", "max_state_diff")]
    assert max(differences) <= (0 if row["case"] == "one process" else 1e-6), row
    # What it went on from was made by three real updates of every parameter.
    assert row["updates"] == [3], row
    assert row["least_moment"] > 0, row


def test_row_51_a_resumed_run_has_the_rates_and_losses_of_one_that_was_not_stopped(
    resumed: list[dict[str, Any]],
) -> None:
    """Whichever process is told to stop; no file says where the schedule is, the step alone does (pitfall 51)."""
    # A peak of 1e-3 after one step of warm-up, and half a cosine down to 0 over the other five.
    rates = [1e-3, *(1e-3 * (1 + math.cos(math.pi * step / 5)) / 2 for step in range(5))]
    rows = [row for row in resumed if not row["is_dtensor"] and row["world"][0] == row["world"][1]]
    assert [row["case"] for row in rows] == ["one process", "two processes"]
    for row in rows:
        assert_resumed(row)
        assert row["lr"] == pytest.approx(rates), row
        assert row["files"] == ["optimizer.pt", "parameters.safetensors", "rng.pt", "state.json"], row


def test_row_52_each_part_of_a_split_draft_has_its_own_moments_back(resumed: list[dict[str, Any]]) -> None:
    """In float32 and under bfloat16 products, and at another number of processes than before (pitfall 52)."""
    rows = {row["case"]: row for row in resumed if row["case"] not in ("one process", "two processes")}
    assert {case: (row["world"], row["is_dtensor"]) for case, row in rows.items()} == {
        "two, then one": ([2, 1], False),
        "two processes, split": ([2, 2], True),
        "two processes, split, bfloat16": ([2, 2], True),
        "split, then one": ([2, 1], False),
        "one, then split": ([1, 2], True),
    }
    for row in rows.values():
        assert_resumed(row)


def test_two_processes_judge_an_average_as_one_does(tiny_verifier: Path, tmp_path: Path) -> None:
    """Of three held-out rows one process has two and the other one, and neither waits for the other."""
    for row in judgements(tiny_verifier, tmp_path):
        assert row["is_dtensor"] is (row["strategy"] == "fsdp2"), row
        assert (row["steps"], row["judged"]) == (9, [3, 6, 9]), row
        for name in ("max_loss_diff", "max_weight_diff", "max_average_diff", "max_validation_diff"):
            assert row[name] <= BOUNDS["adamw"], row


def test_what_accelerate_asks_for_is_done_or_refused() -> None:
    sharded = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert launched_strategy("auto", {}) == "ddp"
    assert launched_strategy("auto", sharded) == "fsdp2"
    assert launched_strategy("ddp", sharded) == "ddp"
    with pytest.raises(UsageError, match="fsdp_version 1; expected 2"):
        launched_strategy("auto", {"ACCELERATE_USE_FSDP": "true"})
    assert launched_dtype(TrainConfig(), {"ACCELERATE_MIXED_PRECISION": "no"}) == "auto"
    assert launched_dtype(TrainConfig(), {"ACCELERATE_MIXED_PRECISION": "bf16"}) == "bfloat16"
    for precision, dtype in (("fp16", "auto"), ("bf16", "float32")):
        with pytest.raises(UsageError, match=f"mixed_precision {precision} and the recipe train.compute_dtype {dtype}"):
            launched_dtype(TrainConfig(compute_dtype=dtype), {"ACCELERATE_MIXED_PRECISION": precision})
    usual = {"ACCELERATE_DYNAMO_BACKEND": "no", "FSDP_OFFLOAD_PARAMS": "false", "ACCELERATE_MIXED_PRECISION": "no"}
    require_honoured({**usual, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", **sharded})
    for name, value, message in (
        ("ACCELERATE_USE_DEEPSPEED", "true", "asks for DeepSpeed"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "leave dynamo_config out"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "set train.accumulation"),
        # One pass a step accumulates nothing; elsewhere 1 asks for something.
        ("ACCELERATE_GRADIENT_CLIPPING", "1", "set train.clip_norm"),
        ("ACCELERATE_USE_DEEPSPEED", "1", "asks for DeepSpeed"),
        ("FSDP_OFFLOAD_PARAMS", "1", "fsdp_offload_params"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "fsdp_activation_checkpointing"),
    ):
        with pytest.raises(UsageError, match=message):
            require_honoured({**usual, name: value})


def test_a_recipe_runs_in_two_processes(tiny_verifier: Path, tmp_path: Path) -> None:
    """Every stage, from rows to the card: shares of the extraction, one training, and one process that writes."""
    found = {}
    for name, launcher, accumulation in (
        ("one", [], 2),
        ("two", ["-m", "torch.distributed.run", "--nproc_per_node", "2"], 1),
    ):
        folder = tmp_path / name
        folder.mkdir()
        recipe = make_recipe("eagle3", tiny_verifier, folder)
        train = recipe.train.model_copy(update={"accumulation": accumulation, "compute_dtype": "float32"})
        (folder / "recipe.pickle").write_bytes(pickle.dumps(recipe.model_copy(update={"train": train})))
        script = folder / "recipe.py"
        script.write_text(
            "import pickle\nfrom pathlib import Path\nfrom speculators import run\n"
            "RECIPE = pickle.loads(Path(__file__).with_suffix('.pickle').read_bytes())\nrun(RECIPE)\n",
            encoding="utf-8",
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
        words = [sys.executable, *launcher, str(script)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("evaluate:") == 1
        out = folder / "out"
        assert (out / "speculator" / "README.md").is_file()
        assert json.loads((out / "evaluation.json").read_text())["identity"]["identical"] is True
        HiddenStatesStore.open(out / "states", verify=True)
        found[name] = load_file(out / "speculator" / "model.safetensors")
    assert found["one"].keys() == found["two"].keys()
    for name, tensor in found["one"].items():
        torch.testing.assert_close(found["two"][name], tensor, atol=1e-5, rtol=0)
