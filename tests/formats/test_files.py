"""Atomic text files, and folders that are written beside the name that they are going to have."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from speculators.formats.files import staging_folder, write_text

KILLED = """
import os, signal, sys
from pathlib import Path
from speculators.formats.files import staging_folder
with staging_folder(Path(sys.argv[1])) as folder:
    (folder / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_text_is_written_readable_and_alone(tmp_path: Path) -> None:
    target = tmp_path / "new" / "report.json"
    write_text(target, "grün\n")
    assert target.read_bytes() == "grün\n".encode()
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    write_text(target, "again")
    assert target.read_text() == "again"
    assert [path.name for path in target.parent.iterdir()] == ["report.json"]


def test_a_failure_keeps_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.json"
    write_text(target, "old")

    def refuse(source: object, target: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space"):
        write_text(target, "new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_staging_folder_is_gone_unless_it_was_renamed(tmp_path: Path) -> None:
    target = tmp_path / "new" / "draft"

    def fail_half_way() -> None:
        with staging_folder(target) as folder:
            (folder / "part").write_bytes(b"half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail_half_way()
    assert names(target.parent) == []
    with staging_folder(target) as folder:
        assert folder.parent == target.parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
        (folder / "part").write_bytes(b"whole")
        folder.rename(target)
    assert names(target.parent) == ["draft"]
    assert (target / "part").read_bytes() == b"whole"


def test_what_a_killed_writer_left_is_removed_by_the_next_of_its_name_alone(tmp_path: Path) -> None:
    for name in ("draft", "other", "draft"):
        ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path / name], check=False)
        assert ended.returncode == -signal.SIGKILL
    left = names(tmp_path)
    # The second writer of "draft" has removed what the first had left.
    assert [name.rsplit(".", 2)[0] for name in left] == [".draft", ".other"]
    (tmp_path / ".draft.mine.partial").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".draft.abcd1234.partial").symlink_to(tmp_path / "elsewhere")
    with staging_folder(tmp_path / "draft") as living, staging_folder(tmp_path / "draft") as another:
        assert living != another
        assert living.is_dir()
    assert names(tmp_path) == [".draft.abcd1234.partial", ".draft.mine.partial", left[1], "elsewhere"]
