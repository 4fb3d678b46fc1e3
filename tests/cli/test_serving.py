"""evaluate, generate and serve as a user calls them."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from openai import OpenAI

from speculators import LLM, SamplingParams
from speculators.cli import main


def run(*arguments: str | Path) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code


def test_evaluate_writes_the_report(
    tiny_speculator: Path, tiny_verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"turns": ["Name a city.", "And a river."]}, {"prompt": "Count to three."}]
    rows.append({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]})
    data, target = tmp_path / "prompts.jsonl", tmp_path / "evaluation.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ("--num-speculative-tokens", "2", "--max-new-tokens", "9", "--dtype", "float32", "--json", target)
    assert run("evaluate", tiny_speculator, "--data", data, *options, "--plot", tmp_path / "plot.png") == 0
    report = json.loads(target.read_text(encoding="utf-8"))
    assert report["speculator"] == str(tiny_speculator)
    assert report["verifier"] == str(tiny_verifier)
    assert (report["method"], report["num_speculative_tokens"], report["num_prompts"]) == ("eagle3", 2, 3)
    assert report["num_accepted_tokens"] == sum(report["accepted_per_position"])
    assert report["acceptance_length"] == 1 + report["num_accepted_tokens"] / report["num_drafts"]
    assert report["identity"] == {
        "dtype": "float32",
        "identical": True,
        "first_difference": [None, None, None],
        "top2_gap": [None, None, None],
    }
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "acceptance length" in capsys.readouterr().out


def test_generate_prints_what_the_engine_generates(tiny_speculator: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(str(tiny_speculator), dtype="float32")
    expected = llm.generate("The quick brown", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0].outputs[
        0
    ]
    options = ("--max-tokens", "12", "--dtype", "float32")
    assert run("generate", tiny_speculator, "--prompt", "The quick brown", *options) == 0
    captured = capsys.readouterr()
    assert captured.out == expected.text + "\n"
    assert captured.err.startswith(f"{len(expected.token_ids)} tokens in ")
    assert "acceptance length" in captured.err


def test_options_of_the_engine_are_refused_by_name(tiny_speculator: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", tiny_speculator, "--tensor-parallel-size", "2") == 1
    assert "tensor_parallel_size=2 cannot be honoured" in capsys.readouterr().err
    assert run("serve", tiny_speculator, "--no-such-option") == 1
    assert "unknown key 'no_such_option'" in capsys.readouterr().err
    assert run("serve", tiny_speculator, "stray") == 2
    assert run("serve", tiny_speculator, "-sc", '{"num_speculative_token": 2}') == 1
    assert "did you mean num_speculative_tokens?" in capsys.readouterr().err


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until_healthy(port: int, process: subprocess.Popen) -> None:
    for _ in range(600):
        assert process.poll() is None, "the server ended early"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.1)
    pytest.fail("the server did not become healthy within a minute")


def test_serve_answers_the_openai_client_and_ends_on_a_signal(tiny_speculator: Path) -> None:
    port = free_port()
    script = "from speculators.cli import main; main()"
    options = ["--port", str(port), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
    command = [sys.executable, "-c", script, "serve", str(tiny_speculator), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until_healthy(port, process)
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
            done = client.completions.create(model="tiny", prompt="The quick brown", max_tokens=8, temperature=0)
            assert done.usage is not None
            assert done.usage.completion_tokens <= 8
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, error
    assert "3 drafts a step" in out
