"""The commands that make training data: options that reach what they are for, summaries, and exit codes."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from speculators.cli import main
from speculators.extract.prepared import PreparedData
from speculators.runtime.engine import EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.verifier import Verifier
from tests.extract.templates import QWEN3
from tests.runtime.serving import serving
from tests.tiny_models import make_verifier

TALK = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Nobody knows."}]}


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_server_answers_prompts(tiny_verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write(tmp_path / "p.jsonl", {"prompt": "Name a city.", "id": "a"}, {"prompt": "x " * 300, "id": "b"})
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    out = tmp_path / "out.jsonl"
    command = ["regenerate-responses", "--data", prompts, "--output", out, "--max-tokens", "5", "--max-retries", "1"]
    with serving(LLM.from_parts(verifier, limits=EngineLimits(max_model_len=128)), "tiny") as address:
        sampling = ("--sampling-params", '{"top_k": 5}', "--temperature", "0.8")
        assert run(*command, "--endpoint", address, "--concurrency", "2", *sampling) == 1
    printed = capsys.readouterr().out
    assert "1 conversations (0 were there before), 5 answer tokens; 0 skipped, 1 failed" in printed
    assert f"failed, see {tmp_path / 'out.errors.jsonl'}: b" in printed
    settings = json.loads((tmp_path / "out.jsonl.settings.json").read_text())
    assert settings["sampling"] == {"top_k": 5}
    assert settings["verifier"] == "tiny"
    assert run(*command[:-2], "--model", tiny_verifier, "--sampling-params", '{"top_kk": 5}') == 2
    assert "top_kk" in capsys.readouterr().err
    assert run(*command) == 2
    assert "--model or --endpoint is missing" in capsys.readouterr().err


def test_what_cannot_be_answered_is_named_and_skipped(
    tiny_verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write(
        tmp_path / "p.jsonl", {"prompt": "Name a city."}, {"prompt": ""}, {**TALK, "tools": [{"name": "f"}]}
    )
    out = tmp_path / "out.jsonl"
    command = (
        "regenerate-responses",
        "--model",
        tiny_verifier,
        "--data",
        prompts,
        "--output",
        out,
        "--max-tokens",
        "2",
    )
    assert run(*command) == 1
    assert "p.jsonl:2: user turn 0 is ''" in capsys.readouterr().err
    assert run(*command, "--skip-bad-rows") == 1
    assert "0 skipped, 2 failed" in capsys.readouterr().out
    faults = [json.loads(line)["error"] for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert "user turn 0" in faults[0]
    assert "uses tools" in faults[1]


def test_options_of_the_template_reach_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verifier = make_verifier(tmp_path / "verifier", num_layers=1)
    tokenizer = QWEN3.tokenizer()
    tokenizer.save_pretrained(verifier)
    config = json.loads((verifier / "config.json").read_text())
    (verifier / "config.json").write_text(json.dumps({**config, "vocab_size": len(tokenizer)}))
    data = write(tmp_path / "d.jsonl", TALK)
    command = ("prepare-data", "--model", verifier, "--data", data)
    thinking, switched_off = tmp_path / "on", tmp_path / "off"
    assert run(*command, "--output", thinking) == 0
    assert run(*command, "--output", switched_off, "--chat-template-kwargs", '{"enable_thinking": false}') == 0
    ids, mask = PreparedData(switched_off)[0]
    assert PreparedData(thinking)[0][0].tolist() == ids.tolist()
    assert tokenizer.decode(ids[~mask]) == (
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n\n"
    )
    request = PreparedData(switched_off).manifest["request"]
    assert request["template_options"] == {"enable_thinking": False}
    capsys.readouterr()
    assert run(*command, "--output", tmp_path / "o", "--chat-template-kwargs", '{"enable_thinkin": false}') == 2
    assert "does not read 'enable_thinkin'" in capsys.readouterr().err
    assert run(*command, "--output", tmp_path / "o", "--chat-template-kwargs", "no") == 2


def test_shares_bad_rows_and_reasons_are_reported(
    tiny_verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = write(tmp_path / "many.jsonl", *({**TALK, "id": i} for i in range(40)))
    bad = write(tmp_path / "bad.jsonl", {"prompt": "x" * 2000}, {"prompt": "Why?"}, ["no"], {"id": "good", **TALK})
    statistics = tmp_path / "s.json"
    command = ("prepare-data", "--model", tiny_verifier, "--data", f"{many}@0.25", "--data", bad, "--seed", "7")
    options = ("--max-row-bytes", "1000", "--stats-json", statistics)
    assert run(*command, "--output", tmp_path / "out", *options) == 1
    assert "bad.jsonl:1: the row has more than 1000 bytes" in capsys.readouterr().err
    assert run(*command, "--output", tmp_path / "out", *options, "--skip-bad-rows") == 0
    found = json.loads(statistics.read_text())
    assert (found["read"], found["rows"], found["skipped"]) == (14, 11, 3)
    assert found["skipped_why"] == {"bad row": 2, "no assistant message": 1}
    printed = capsys.readouterr().out
    assert "bad row: " in printed
    assert "no assistant message" in printed
    assert run(*command, "--output", tmp_path / "none", "--skip-bad-rows", "--minimum-valid-tokens", "1000") == 1
    assert "fewer than 1000 tokens to learn" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["regenerate-responses", "extract"])
def test_a_silent_server_does_not_hold_an_interrupted_run(tiny_verifier: Path, tmp_path: Path, name: str) -> None:
    rows = write(tmp_path / "p.jsonl", *({**TALK, "id": i} for i in range(3)))
    more = {
        "regenerate-responses": ["--model", "m"],
        "extract": ["--source", "server", "--served-model", "m", "--model", tiny_verifier, "--layers", "2"],
    }[name]
    code = "import sys; from speculators.cli import main; main(sys.argv[1:])"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(120)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [name, "--data", rows, "--output", tmp_path / "o.jsonl", "--endpoint", address, *more]
        process = subprocess.Popen([sys.executable, "-c", code, *map(str, command)])
        try:
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(4) == b"POST"
                process.send_signal(signal.SIGINT)
                # Nobody waits for the answer; a request's timeout is ten minutes.
                assert process.wait(timeout=120) == 128 + signal.SIGINT
        finally:
            process.kill()
            process.wait()


def test_sweep_removes_what_dead_writers_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Locks that nobody holds and halves of files; whole files only on request, and nothing that is young."""
    names = ["a.safetensors.lock", ".b.safetensors.0a1b.partial", "c.safetensors"]
    for name in [*names, "notes.txt"]:
        (tmp_path / name).touch()
    assert run("sweep", tmp_path) == 0
    assert "removed 0 locks, 0 partial files, 0 files" in capsys.readouterr().out
    for name in names:
        os.utime(tmp_path / name, (0, 0))
    held = (tmp_path / "held.safetensors.lock").open("w")
    with held:
        fcntl.flock(held, fcntl.LOCK_EX)
        os.utime(held.name, (0, 0))
        assert run("sweep", tmp_path, "--ttl", "60") == 0
        assert "removed 1 locks, 1 partial files, 0 files" in capsys.readouterr().out
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "c.safetensors",
            "held.safetensors.lock",
            "notes.txt",
        ]
        assert run("sweep", tmp_path, "--files-too") == 0
    assert "removed 0 locks, 0 partial files, 1 files" in capsys.readouterr().out
    assert run("sweep", tmp_path / "nowhere") == 1
    assert "nowhere" in capsys.readouterr().err
