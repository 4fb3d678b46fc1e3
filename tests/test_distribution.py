"""What is shipped: the wheel's contents, and a README whose examples work."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from speculators import Recipe, run
from tests.convert.layouts_eagle import specforge

ROOT = Path(__file__).resolve().parent.parent
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_wheel_holds_the_package_and_the_quickstarts_data(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        quickstart = "speculators/train/quickstart.py"
        assert archive.read(quickstart).decode() == (ROOT / quickstart).read_text(encoding="utf-8")
    shipped = {name for name in names if name.startswith("speculators/data/")}
    there = {f"speculators/data/{path.name}" for path in (ROOT / "recipes" / "data").glob("*.jsonl*")}
    assert shipped == there
    assert {name.split("/")[0] for name in names} == {"speculators", "speculators-0.1.0.dist-info"}
    assert "speculators/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("number", range(len(PYTHON_BLOCKS)))
def test_examples_of_the_readme_work(
    number: int,
    tiny_verifier: Path,
    tiny_speculator: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code = PYTHON_BLOCKS[number].replace("out/quickstart/speculator", str(tiny_speculator))
    code = code.replace("owner/verifier", str(tiny_verifier))
    specforge().write(tmp_path / "theirs")
    found: dict[str, object] = {"__name__": "example"}
    exec(compile(code, f"README block {number}", "exec"), found)
    if "llm" in found:
        assert '"mean_acceptance_length"' in capsys.readouterr().out.replace("'", '"')
    if "speculator" in found:
        assert (tmp_path / "somewhere" / "else" / "config.json").is_file()
    if "conversion" in found:
        exported = json.loads((tmp_path / "for-sglang" / "config.json").read_text(encoding="utf-8"))
        assert exported["architectures"] == ["LlamaForCausalLMEagle3"]
    if "RECIPE" in found:
        recipe = found["RECIPE"]
        assert isinstance(recipe, Recipe)
        run(recipe, ["--plan", "train.learning_rate=5e-4"])
        plan = json.loads(capsys.readouterr().out)
        assert plan["recipe"]["train"]["learning_rate"] == 5e-4
