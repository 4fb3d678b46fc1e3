"""Atomic text files."""

import os
import stat
from pathlib import Path

import pytest

from speculators.formats.files import write_text


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
