"""Two processes train what one does, and a run that is stopped goes on as if it had not been."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

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


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tiny_verifier: Path, tmp_path: Path) -> None:
    """To the bit in one process, whichever process is told to stop, and at another number of processes.

    Rates go on where they were (pitfall 51), and each part of a split draft has its own moments back (pitfall 52).
    """
    table = {row["case"]: row for row in resumption(tiny_verifier, tmp_path)}
    assert len(table) == 4
    for row in table.values():
        assert (row["steps"], row["exit_code"], row["checkpoint"]) == (6, 143, ["step-3"]), row
        differences = [row[key] for key in ("max_loss_diff", "max_lr_diff", "max_weight_diff", "max_state_diff")]
        assert max(differences) <= (0 if row["case"] == "one process" else 1e-6), row


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
