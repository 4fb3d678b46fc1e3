"""inspect and validate: what they say, their JSON, their exit codes."""

import json
import shutil
from math import prod
from pathlib import Path

import pytest
from safetensors import safe_open

from speculators.cli import main

GOLDEN = Path(__file__).parent.parent / "golden"


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def copy(tiny_speculator: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_speculator, tmp_path / "copy")


def edit(directory: Path, change) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config)
    path.write_text(json.dumps(config), encoding="utf-8")


def test_inspect_reports_what_the_directory_holds(tiny_speculator: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "report.json"
    assert run("inspect", tiny_speculator, "--json", target) == 0
    report = json.loads(target.read_text(encoding="utf-8"))
    hidden, intermediate, heads, draft_vocab = 64, 128, 64, 128
    key_values = heads // 2
    attention = heads * 2 * hidden + 2 * key_values * 2 * hidden + hidden * heads
    norms = 4 * hidden + 3 * hidden
    expected = 3 * hidden * hidden + attention + 3 * hidden * intermediate + norms + (draft_vocab + 384) * hidden
    assert report["parameters"] == expected
    assert report["family"] == "eagle3"
    assert report["verifier"] == str(tiny_verifier)
    assert report["depth"] == report["num_speculative_tokens"] == 3
    assert report["method"] == "eagle3"
    assert report["layers"] == 1
    assert report["vocabulary"] == {"draft": 128, "verifier": 384, "coverage": 128 / 384}
    assert report["aux_layer_ids"] == [2, 4, 5]
    assert report["tensors"]["fc.weight"] == {"dtype": "BF16", "shape": [64, 192]}
    assert report["vllm"]["method"] == "eagle3"
    assert report["vllm"]["capture_layer_ids"] == [2, 4, 5]
    assert report["bytes"] == 2 * expected + 8 * draft_vocab + 384


def test_json_on_standard_output_stands_alone(tiny_speculator: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", tiny_speculator, "--json", "-") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["family"] == "eagle3"
    assert "eagle3" in captured.err


def test_inspect_refuses_what_it_does_not_know(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(copy, lambda config: config.update(speculators_model_type="xpress"))
    assert run("inspect", copy) == 1
    assert "speculators_model_type is 'xpress'" in capsys.readouterr().err


def test_validate_finds_nothing_wrong_with_what_we_write(
    tiny_speculator: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("validate", tiny_speculator, "--json", "-") == 0
    captured = capsys.readouterr()
    assert [fault for fault in json.loads(captured.out) if fault["level"] == "ERROR"] == []


def test_validate_names_faults_and_fails(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(copy, lambda config: config.update(model_type="llama"))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    target = tmp_path / "faults.json"
    assert run("validate", copy, "--json", target) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ERROR F002 model-type: ") for line in lines)
    assert any(line.startswith("ERROR F025 broken-weights: ") for line in lines)
    faults = json.loads(target.read_text(encoding="utf-8"))
    assert {"F002", "F025"} <= {fault["code"] for fault in faults}
    assert len(faults) == len(lines)


def test_warnings_alone_do_not_fail(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def add_proposal(config: dict) -> None:
        methods = config["speculators_config"]["proposal_methods"]
        methods.append(dict(methods[0]))

    edit(copy, add_proposal)
    assert run("validate", copy) == 0
    assert "WARNING F009 second-proposal: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "method", "depth", "layers", "draft_ids", "vllm"),
    [
        ("eagle3", "eagle3", 3, 1, 32, "eagle3"),
        ("peagle", "eagle3", 8, 2, 32, "eagle3"),
        ("dflash", "dflash", 15, 2, 128, "dflash"),
        ("dflash2", "dflash", 7, 2, 128, "dflash"),
        ("dspark", "dspark", 8, 2, 32, "dspark"),
        ("mtp", "mtp", 3, 1, 128, None),
    ],
)
def test_inspect_reads_what_other_software_wrote(
    family: str, method: str, depth: int, layers: int, draft_ids: int, vllm: str | None, tmp_path: Path
) -> None:
    """The golden folders, which lie beside no verifier under the name that they give."""
    folder, target = GOLDEN / family, tmp_path / "report.json"
    assert run("inspect", folder, "--json", target) == 0
    report = json.loads(target.read_text(encoding="utf-8"))
    found = {key: report[key] for key in ("family", "verifier", "method", "depth", "layers")}
    assert found == {
        "family": family,
        "verifier": "golden/verifier",
        "method": method,
        "depth": depth,
        "layers": layers,
    }
    assert report["vocabulary"] == {"draft": draft_ids, "verifier": 128, "coverage": draft_ids / 128}
    with safe_open(folder / "model.safetensors", "numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    assert {name: entry["shape"] for name, entry in report["tensors"].items()} == shapes
    assert report["parameters"] == sum(prod(shape) for name, shape in shapes.items() if name not in ("d2t", "t2d"))
    assert report["vllm"]["method"] == vllm
    assert report["vllm"]["served"] is (vllm is not None)
