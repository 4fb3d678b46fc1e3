"""Writers of hidden states that are killed at random moments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("crash.py")


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.full)])
def test_a_killed_writer_leaves_nothing_torn_and_nothing_locked(tmp_path, kills: int) -> None:
    out = tmp_path / "crash.json"
    command = [sys.executable, SCRIPT, "--kills", str(kills), "--seed", str(kills), "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert (found["kills"], found["torn"], found["locks_left"], found["rerun_finished"]) == (kills, 0, 0, True)
    # Otherwise nothing was tested: files were read, and kills came while others were being written.
    assert found["files_read"] > kills
    assert found["locks_swept"] > kills
