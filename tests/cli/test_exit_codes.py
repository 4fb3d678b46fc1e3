"""Exit codes and messages of the command line as a process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from speculators.cli import main


def start(*arguments: str | Path, **keywords) -> subprocess.Popen:
    command = [sys.executable, "-c", "from speculators.cli import main; main()", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **keywords)


def code_of(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-command",),
        ("inspect",),
        ("evaluate", "somewhere"),
        ("evaluate", "somewhere", "--data", "x.jsonl", "--limit", "0"),
        ("regenerate-responses", "--model", "m", "--data", "d", "--output", "o", "--temperature", "warm"),
        ("extract", "--model", "m", "--data", "d", "--output", "o", "--target-layer-ids", "two"),
        ("generate", "somewhere", "--prompt", "a", "--chat", "b"),
        ("generate", "somewhere", "--prompt", "a", "--speculative-config", "{"),
        ("train", "no-such-recipe.py"),
        ("fetch-verifier", "no-such-verifier"),
    ],
)
def test_a_wrong_command_line_is_2(arguments: tuple[str, ...]) -> None:
    assert code_of(*arguments) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "{empty}"), "config.json is missing"),
        (("evaluate", "{empty}", "--data", "{prompts}"), "config.json is missing"),
        (("evaluate", "{empty}", "--data", "{broken}"), "broken.jsonl:2: "),
        (("prepare-data", "--model", "{empty}", "--data", "{prompts}", "--output", "{empty}/o"), "verifier"),
        (("generate", "{empty}", "--prompt", "a"), "{empty}"),
    ],
)
def test_failed_work_is_1_in_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    places = {name: tmp_path / f"{name}.jsonl" for name in ("prompts", "broken")} | {"empty": tmp_path / "empty"}
    places["prompts"].write_text('{"prompt": "Hello"}\n', encoding="utf-8")
    places["broken"].write_text('{"prompt": "Hello"}\n{"prompt": \n', encoding="utf-8")
    assert code_of(*[argument.format(**places) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message.format(**places) in error
    assert "Traceback" not in error


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with start("--debug", "inspect", tmp_path) as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" in error
    assert "FaultsError" in error


def test_a_report_that_cannot_be_written_is_a_message(
    tiny_speculator: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert code_of("inspect", str(tiny_speculator), "--json", str(tmp_path / "file" / "report.json")) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_128_and_its_number(signum: signal.Signals, tmp_path: Path) -> None:
    pipe = tmp_path / "prompts.jsonl"
    os.mkfifo(pipe)
    process = start("evaluate", tmp_path, "--data", pipe)
    # The command blocks on the pipe until someone writes; opening our end returns once it has opened its own.
    with pipe.open("w", encoding="utf-8"):
        time.sleep(0.2)
        process.send_signal(signum)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert error.endswith("the same command continues from there\n")
