"""Loss and every gradient norm of checkpoints that independent software wrote and computed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "golden"
CASES: dict[str, dict] = json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))
OURS = sorted(case for case in CASES if (GOLDEN / case.partition("|")[0]).is_dir())


def load_run():
    spec = importlib.util.spec_from_file_location("golden_run", GOLDEN / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_cases_of_eagle3_are_among_them() -> None:
    assert sum(case.startswith("eagle3|") for case in OURS) == 3


@pytest.mark.parametrize("case", OURS)
def test_loss_and_gradient_norms(case: str) -> None:
    folder = GOLDEN / case.partition("|")[0]
    found = load_run().compute(folder, GOLDEN / "golden_inputs.safetensors", case)
    assert found["loss"] == pytest.approx(CASES[case]["loss"], rel=1e-5)
    assert found["grad_norms"] == pytest.approx(CASES[case]["grad_norms"], rel=1e-4)


def test_accuracy_counts() -> None:
    case = next(case for case in OURS if case.startswith("eagle3|") and "kl_div" in case)
    found = load_run().compute(GOLDEN / "eagle3", GOLDEN / "golden_inputs.safetensors", case)["metrics"]
    expected = CASES[case]["metrics"]
    for step in range(3):
        assert found[f"full_acc_{step}"][0] == expected[f"full_acc_{step}_sum"]
        assert tuple(found[f"cond_acc_{step}"]) == (
            expected[f"cond_acc_{step}_sum"],
            expected[f"cond_acc_{step}_total"],
        )
        # The golden sums hold the mean over supervised positions, weighted by the step's decay.
        total, count = found[f"loss_{step}"]
        assert 0.8**step * total / count == pytest.approx(expected[f"loss_{step}_sum"], rel=1e-5)


def test_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    arguments = [GOLDEN / "eagle3", "--inputs", GOLDEN / "golden_inputs.safetensors", "--case", OURS[0], "--json", out]
    subprocess.run([sys.executable, GOLDEN / "run.py", *map(str, arguments)], check=True, cwd=GOLDEN.parent.parent)
    assert json.loads(out.read_text(encoding="utf-8"))["loss"] == pytest.approx(CASES[OURS[0]]["loss"], rel=1e-5)
