"""vLLM's spellings of options: JSON, underscores, files, keys of their own, and names that are no more."""

import json
from pathlib import Path

import pytest

from speculators import LLM, SamplingParams
from speculators.cli import main

PROMPT = ("--prompt", "The quick brown", "--max-tokens", "8", "--dtype", "float32")


def run(*arguments: str | Path) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code


@pytest.fixture(scope="module")
def expected(tiny_verifier: Path) -> str:
    params = SamplingParams(temperature=0, max_tokens=8)
    return (
        LLM(str(tiny_verifier), dtype="float32").generate("The quick brown", params, use_tqdm=False)[0].outputs[0].text
    )


def statistics_of(capsys: pytest.CaptureFixture[str], expected: str) -> str:
    captured = capsys.readouterr()
    assert captured.out == expected + "\n", captured.err
    return captured.err


@pytest.mark.parametrize("option", ["-sc", "--speculative-config", "--speculative_config"])
def test_json_under_every_spelling(
    option: str, tiny_verifier: Path, tiny_speculator: Path, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = json.dumps({"model": str(tiny_speculator), "num-speculative-tokens": 2})
    assert run("generate", tiny_verifier, *PROMPT, option, given) == 0
    positions = statistics_of(capsys, expected).rpartition("per position ")[2].split()
    assert len(positions) == 2


def test_keys_of_their_own_make_the_same(
    tiny_verifier: Path, tiny_speculator: Path, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("--spec-method", "eagle3", "--spec-model", tiny_speculator, "--spec_tokens", "1")
    assert run("generate", tiny_verifier, *PROMPT, *keys) == 0
    assert len(statistics_of(capsys, expected).rpartition("per position ")[2].split()) == 1
    given = json.dumps({"num-speculative-tokens": 2})
    assert run("generate", tiny_speculator, *PROMPT, "-sc", given, "--spec-tokens", "1") == 2
    assert "--spec-tokens 1 and --speculative-config, which has 'num_speculative_tokens' too" in capsys.readouterr().err


def test_options_of_a_file_give_way_to_the_command_line(
    tiny_verifier: Path, tiny_speculator: Path, tmp_path: Path, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        f"model: {tiny_verifier}\nmax_tokens: 3\ndtype: float32\nenforce-eager: true\nstop: absent\n"
        f"speculative-config:\n  model: {tiny_speculator}\n  num_speculative_tokens: 2\n",
        encoding="utf-8",
    )
    assert run("generate", "--config", file, "--prompt", "The quick brown", "--max-tokens", "8") == 0
    assert len(statistics_of(capsys, expected).rpartition("per position ")[2].split()) == 2
    own = json.dumps({"model": str(tiny_speculator), "num_speculative_tokens": 1})
    assert run("generate", tiny_verifier, *PROMPT, "--config", file, "-sc", own) == 0
    assert len(statistics_of(capsys, expected).rpartition("per position ")[2].split()) == 1


def test_a_file_that_is_none_is_a_wrong_command_line(
    tiny_verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.yaml"
    for text, message in (("- a\n", "expected a mapping"), ("a: [\n", "cannot be read"), (None, "cannot be read")):
        path = file if text is not None else tmp_path / "absent.yaml"
        file.write_text(text or "", encoding="utf-8")
        assert run("generate", tiny_verifier, *PROMPT, "--config", path) == 2
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    file.write_text("no_such_key: 1\n", encoding="utf-8")
    assert run("generate", tiny_verifier, *PROMPT, "--config", file) == 1
    assert "LLM: unknown key 'no_such_key'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "equal"),
    [
        (
            ("--speculative-model", "org/d", "--num-speculative-tokens", "5"),
            {"model": "org/d", "num_speculative_tokens": 5},
        ),
        (("--speculative_model", "[ngram]"), {"model": "[ngram]"}),
        (("--num_speculative_tokens", "5", "-sc", '{"method": "mtp"}'), {"method": "mtp", "num_speculative_tokens": 5}),
    ],
)
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_deprecated_options_say_what_to_write(
    command: str, options: tuple[str, ...], equal: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "org/verifier", *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --")
    assert json.loads(error.partition("write --speculative-config '")[2].rpartition("' instead")[0]) == equal


def test_hidden_states_are_extracted_from_the_command_line(
    tiny_verifier: Path, tmp_path: Path, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}
    speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": layers}
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "states")},
    }
    options = ("--speculative_config", json.dumps(speculation), "--kv_transfer_config", json.dumps(transfer))
    assert run("generate", tiny_verifier, *PROMPT, *options) == 0
    files = list((tmp_path / "states").glob("*.safetensors"))
    assert len(files) == 1
    assert f"hidden states are in {files[0]}" in statistics_of(capsys, expected)


def test_what_is_no_json_object_is_a_wrong_command_line(
    tiny_verifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--speculative-config", "--kv-transfer-config", "--additional-config"):
        for text, message in (("{", "is no JSON"), ("[1]", "expected a JSON object")):
            assert run("generate", tiny_verifier, *PROMPT, option, text) == 2
            assert f"{option} is" in (error := capsys.readouterr().err)
            assert message in error
    assert run("generate", tiny_verifier, *PROMPT, "--additional-config", '{"draft_window_size": 0}') == 1
    assert "additional_config: draft_window_size=0: expected a whole number of at least 1" in capsys.readouterr().err


def test_short_names_and_negations_reach_the_engine(tiny_speculator: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", tiny_speculator, "-tp", "2") == 1
    assert "tensor_parallel_size=2 cannot be honoured" in capsys.readouterr().err
    assert run("serve", tiny_speculator, "-tp", "1", "--no-enable-chunked-prefill", "--max_num_seqs", "2") == 1
    assert "enable_chunked_prefill=False cannot be honoured" in capsys.readouterr().err
    assert run("serve", tiny_speculator, "--model", "other") == 2
    assert "the model is this command's argument" in capsys.readouterr().err


def test_prefix_caching_is_asked_for_on_the_command_line_and_in_a_file(
    tiny_verifier: Path, tmp_path: Path, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("enable-prefix-caching: true\n", encoding="utf-8")
    assert run("generate", tiny_verifier, *PROMPT, "--config", file) == 0
    statistics_of(capsys, expected)
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "states")},
    }
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}
    speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": layers}
    options = ("-sc", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer))
    for asked in (("--enable-prefix-caching",), ("--config", file)):
        assert run("serve", tiny_verifier, *options, *asked) == 1
        assert "enable_prefix_caching, method 'extract_hidden_states': hidden states" in capsys.readouterr().err
    taken_back = ("--config", file, "--no-enable-prefix-caching", "--gpu-memory-utilization", "7")
    assert run("serve", tiny_verifier, *options, *taken_back) == 1
    assert "gpu_memory_utilization=7: expected a share" in capsys.readouterr().err
