"""Names of repositories and directories: what is resolved, what is refused, all without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speculators.errors import FormatError, SpeculatorsError
from speculators.formats.files import looks_like_path
from speculators.formats.hub import is_local, push, resolve
from tests.formats.eagle3_directory import GOLDEN, make_config, write_directory

ROOT = GOLDEN.parent.parent


@pytest.mark.parametrize("name", ["/models/x", "./x", "../x", "~/x", "a/b/c", "x/", ".", "C:\\models"])
def test_names_that_can_only_be_paths(name: str) -> None:
    assert looks_like_path(name)


@pytest.mark.parametrize("name", ["owner/name", "gpt2", "owner/name-1.5_x"])
def test_names_that_can_be_repositories(name: str) -> None:
    assert not looks_like_path(name)


def test_a_directory_is_returned_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name") == Path("owner/name")
    assert is_local("owner/name")
    assert not is_local("owner/other")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/owner") == tmp_path / "owner"


def test_a_missing_path_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(SpeculatorsError, match="not there"):
        resolve(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpeculatorsError, match="it is a file"):
        resolve(tmp_path / "file")


def test_a_repository_that_cannot_be_had_is_explained() -> None:
    with pytest.raises(SpeculatorsError, match="hub repository somebody/absent@v2 cannot be had") as caught:
        resolve("somebody/absent", revision="v2")
    assert "\n" not in str(caught.value)
    with pytest.raises(SpeculatorsError, match="neither a directory nor a hub id"):
        resolve("not a name")


def test_a_downloaded_repository_is_found_without_a_network(tmp_path: Path) -> None:
    """A hub cache laid out as the hub's client keeps it: a reference that names a commit, and that commit's files."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--somebody--draft"
    write_directory(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    code = "from speculators.formats.hub import resolve; print(resolve('somebody/draft'))"
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert Path(run.stdout.strip()) == repository / "snapshots" / commit


@pytest.mark.parametrize("verifier", ["/models/verifier", "./verifier", "out/models/verifier"])
def test_a_verifier_given_as_a_path_is_not_pushed(tmp_path: Path, verifier: str) -> None:
    config = make_config(block={"verifier": {"name_or_path": verifier, "architectures": []}})
    with pytest.raises(FormatError, match="write the verifier's hub id before pushing") as caught:
        push(write_directory(tmp_path, config), "somebody/draft")
    assert caught.value.code == "F010"
    assert verifier in str(caught.value)


def test_a_relative_directory_is_a_path_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebody" / "verifier").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match="somebody/verifier"):
        push(write_directory(tmp_path / "draft"), "somebody/draft")


def test_an_unfinished_directory_is_not_pushed(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        push(tmp_path, "somebody/draft")
    write_directory(tmp_path)
    config = make_config(block={"verifier": {"architectures": []}})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="name_or_path is missing"):
        push(tmp_path, "somebody/draft")


def test_a_push_that_fails_is_explained(tmp_path: Path) -> None:
    with pytest.raises(SpeculatorsError, match="could not be pushed to somebody/draft"):
        push(write_directory(tmp_path), "somebody/draft")


def test_an_unreachable_hub_is_explained(tmp_path: Path) -> None:
    write_directory(tmp_path)
    code = (
        "import sys; from speculators.formats.hub import push; from speculators.errors import SpeculatorsError\n"
        "try:\n    push(sys.argv[1], 'somebody/draft', token='none')\n"
        "except SpeculatorsError as error:\n    print(error)"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert "could not be pushed to somebody/draft" in run.stdout
