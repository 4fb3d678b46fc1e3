"""push, and inspect of a repository, as processes against a hub on this machine."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.test_directories import run
from tests.formats.eagle3_directory import write_directory
from tests.formats.fake_hub import FakeHub, running_hub, with_client

COMMANDS = """
import contextlib, io
from speculators.cli import main

def speculators(name, *arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as ended:
            found[name] = {"code": ended.code, "out": out.getvalue(), "err": err.getvalue()}

folder = sys.argv[1]
speculators("pushed", "push", folder, "org/draft", "--private", "--token", "hf_owner", "--json", "-")
speculators("inspected", "inspect", "org/draft", "--revision", "main", "--token", "hf_owner", "--json", "-")
speculators("hidden", "inspect", "org/draft")
speculators("refused", "push", folder, "org/draft", "--token", "hf_guest")
found["heavy"] = sorted({"torch", "transformers"} & sys.modules.keys())
"""


@pytest.fixture
def hub() -> FakeHub:
    with running_hub() as running:
        yield running


def test_a_directory_is_pushed_and_the_repository_inspected(hub: FakeHub, tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "draft")
    found = with_client(hub, tmp_path / "home", COMMANDS, folder)
    assert [found[name]["code"] for name in ("pushed", "inspected", "hidden", "refused")] == [0, 0, 1, 1]
    pushed = json.loads(found["pushed"]["out"])
    repository = hub.repositories["org/draft"]
    assert repository.private
    assert pushed["url"] == f"{hub.url}/org/draft/commit/{repository.branches['main']}"
    assert pushed["files"] == {name: len(repository.files()[name]) for name in pushed["files"]}
    report = json.loads(found["inspected"]["out"])
    assert {name: report[name] for name in ("family", "verifier", "method", "depth")} == {
        "family": "eagle3",
        "verifier": "somebody/verifier",
        "method": "eagle3",
        "depth": 3,
    }
    assert report["tensors"]["d2t"] == {"dtype": "I64", "shape": [16]}
    assert report["vocabulary"] == {"draft": 16, "verifier": 64, "coverage": 0.25}
    assert found["hidden"]["err"].startswith(
        "error: no directory 'org/draft' here, and hub repository org/draft cannot"
    )
    assert (
        "the hub refused the token" in found["refused"]["err"]
        or "there is none of this name" in found["refused"]["err"]
    )
    assert found["heavy"] == []


def test_a_dry_run_shows_everything_and_sends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The process is offline, so that anything sent would fail."""
    folder = write_directory(tmp_path / "draft")
    assert run("push", folder, "org/draft", "--dry-run", "--json", "-") == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["url"] is None
    assert report["repo"] == "org/draft"
    assert report["files"]["model.safetensors"] == (folder / "model.safetensors").stat().st_size
    assert report["files"]["README.md"] == len(report["card"].encode())
    assert "nothing was sent" in captured.err
    assert "speculators serve org/draft" in captured.err
    assert run("push", folder, "org/draft") == 1
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err


def test_a_directory_with_a_fault_or_a_path_for_a_verifier_is_not_pushed(
    tiny_speculator: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("push", tiny_speculator, "org/draft", "--dry-run") == 1
    assert "F010 verifier-bare-path" in capsys.readouterr().err
    broken = shutil.copytree(write_directory(tmp_path / "draft"), tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert run("push", broken, "org/draft", "--dry-run") == 1
    assert "F025 broken-weights" in capsys.readouterr().err
