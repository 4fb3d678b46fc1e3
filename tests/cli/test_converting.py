"""convert and export: what they write and say, and what they refuse with which exit code."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators.cli.converting import convert
from speculators.convert.options import ConvertOptions
from speculators.convert.sources import SOURCES
from speculators.convert.targets import TARGETS
from tests.cli.test_directories import run
from tests.convert import layouts_eagle
from tests.tiny_models import make_verifier


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return layouts_eagle.specforge().write(tmp_path / "foreign")


def test_a_draft_is_converted_and_every_tensor_reported(
    source: Path, tiny_verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "ours", tmp_path / "report.json"
    assert run("convert", source, "--verifier", tiny_verifier, "--out", out, "--json", report) == 0
    said = json.loads(report.read_text(encoding="utf-8"))
    assert said["family"] == "eagle3"
    assert sorted(said["used"]) == sorted(layouts_eagle.specforge().tensors)
    assert said["dropped"] == []
    assert said["check"] is None
    assert said["ids"] == {
        "read": [0, 3, 5],
        "written": [1, 4, 6],
        "source": "eagle_config.eagle_aux_hidden_state_layer_ids",
    }
    assert said["vocabulary"]["coverage"] == 96 / 384
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tiny_verifier)
    shown = " ".join(capsys.readouterr().out.split())
    assert "0, 3, 5 -> depths 1, 4, 6" in shown
    assert "96 of 384 tokens (25.0%)" in shown
    assert "warning: norm_before_residual is not written; taken as false" in shown
    assert run("validate", out) == 0


def test_a_draft_vocabulary_without_the_end_of_an_answer_is_said(
    source: Path, tiny_verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = layouts_eagle.specforge().tensors["t2d"]
    end = json.loads((tiny_verifier / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    assert not kept[end]
    assert run("convert", source, "--verifier", tiny_verifier, "--out", tmp_path / "ours", "--json", "-") == 0
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert said["vocabulary"]["missing_ends"] == [end]
    assert "<|im_end|>" in said["vocabulary"]["missing_special"]
    assert "WARNING F058 end-not-drafted" in captured.err


def test_every_option_of_a_conversion_is_one_of_the_command() -> None:
    assert set(ConvertOptions.model_fields) <= inspect.signature(convert).parameters.keys()


def test_options_reach_the_result(source: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours"
    given = ("--aux-layer-ids", "2,4,7", "--norm-before-residual", "--speculative-tokens", "5", "--dtype", "bfloat16")
    assert run("convert", source, "--verifier", tiny_verifier, "--out", out, *given) == 0
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 7]
    assert config["norm_before_residual"] is True
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert load_file(out / "model.safetensors")["fc.weight"].dtype is torch.bfloat16


def test_a_check_names_the_best_reading(source: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text('{"prompt": "Name three cities."}\n{"prompt": "What is the sum?"}\n', encoding="utf-8")
    asked = ("--check", "--prompts", prompts, "--json", report)
    assert run("convert", source, "--verifier", tiny_verifier, "--out", tmp_path / "ours", *asked) == 0
    rows = json.loads(report.read_text(encoding="utf-8"))["check"]
    assert [row["reading"] for row in rows[:3]] == ["as written", "layer ids + 1", "layer ids - 1"]
    assert all(row["acceptance_length"] >= 1 and row["num_drafts"] > 0 for row in rows)


def test_a_check_that_fails_leaves_the_draft_and_its_report(
    source: Path, tiny_verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare, out, report = tmp_path / "bare", tmp_path / "ours", tmp_path / "report.json"
    bare.mkdir()
    (bare / "config.json").write_bytes((tiny_verifier / "config.json").read_bytes())
    assert run("convert", source, "--verifier", bare, "--out", out, "--check", "--json", report) == 1
    assert "bare" in capsys.readouterr().err
    said = json.loads(report.read_text(encoding="utf-8"))
    assert (said["family"], said["check"]) == ("eagle3", None)
    assert run("validate", out) == 0


def test_a_model_that_is_no_speculator_is_not_checked(
    tiny_verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_verifier(tmp_path / "pard")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"spd_type": "pard", "pard_token": 383}), encoding="utf-8")
    given = ("--verifier", tiny_verifier, "--out", tmp_path / "ours")
    assert run("convert", model, *given, "--check") == 2
    assert "a pard model is read in one; leave it out" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "ours").exists()
    assert run("convert", model, *given) == 0


def test_what_is_asked_wrongly_is_2_and_what_cannot_be_converted_is_1(
    source: Path, tiny_verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ours"
    for given, code, message in (
        (("--family", "eagle9"), 2, f"expected auto or one of {', '.join(SOURCES)}"),
        (("--aux-layer-ids", "2;4"), 2, "expected whole numbers such as 2,14,27"),
        (("--layer-ids-mean", "height"), 2, "--layer-ids-mean is 'height'; expected 'depth' or 'output'"),
        (("--block-size", "4"), 2, "block_size cannot be given for an EAGLE-3 draft"),
        (("--prompts", source / "config.json"), 2, "give both or neither"),
        (("--push", "owner/name"), 2, "give --verifier as a hub id"),
        (("--weights", "other.safetensors"), 1, "has no file 'other.safetensors'"),
        (("--family", "medusa"), 1, ""),
    ):
        assert run("convert", source, "--verifier", tiny_verifier, "--out", out, *given) == code
        assert message in " ".join(capsys.readouterr().err.split())
        assert not out.exists()
    out.symlink_to(tmp_path / "nowhere")
    # Said before anything is read or fetched.
    for command in (
        ("convert", "owner/draft", "--verifier", "owner/verifier"),
        ("export", "owner/ours", "--to", "sglang"),
        ("stitch-mtp", "owner/ours", "owner/verifier"),
    ):
        assert run(*command, "--out", out) == 1
        assert "ours is there already; give a new directory" in " ".join(capsys.readouterr().err.split())


def test_files_beside_the_weights_are_accounted_for(
    source: Path, tiny_verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"lora.weight": torch.ones(2)}, source / "adapter_model.safetensors")
    torch.save({"step": torch.ones(1)}, source / "optimizer.pt")
    torch.save(dict(layouts_eagle.specforge().tensors), source / "pytorch_model.bin")
    (source / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null}}', encoding="utf-8")
    assert run("convert", source, "--verifier", tiny_verifier, "--out", tmp_path / "ours", "--json", "-") == 0
    dropped = {row["tensor"]: row["reason"] for row in json.loads(capsys.readouterr().out)["dropped"]}
    assert dropped == {
        "adapter_model.safetensors": "an adapter of the verifier; the draft was trained beside it, and accepts less "
        "without it",
        "hf_quant_config.json": "says that nothing is quantised",
        "optimizer.pt": "the state of a training run, no weights of the draft",
        "pytorch_model.bin": "the same tensors once more, in another container",
    }
    torch.save({"fc.weight": torch.ones(2)}, source / "other.bin")
    assert run("convert", source, "--verifier", tiny_verifier, "--out", tmp_path / "again") == 1
    assert "F027 stray-weights: other.bin would be left out unread" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_a_speculator_is_exported_and_back_is_the_same(
    source: Path, tiny_verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs, again = (tmp_path / name for name in ("ours", "theirs", "again"))
    assert run("convert", source, "--verifier", tiny_verifier, "--out", ours) == 0
    capsys.readouterr()
    assert run("export", ours, "--to", "sglang", "--out", theirs, "--json", "-") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["layout"] == "sglang"
    assert sorted(said["used"]) == sorted(load_file(ours / "model.safetensors"))
    assert run("convert", theirs, "--verifier", tiny_verifier, "--out", again) == 0
    assert (again / "config.json").read_bytes() == (ours / "config.json").read_bytes()
    mine, back = load_file(ours / "model.safetensors"), load_file(again / "model.safetensors")
    assert mine.keys() == back.keys()
    assert all(torch.equal(mine[name], back[name]) for name in mine)
    assert run("export", ours, "--to", "nowhere", "--out", tmp_path / "no") == 2
    assert f"expected one of {', '.join(TARGETS)}" in " ".join(capsys.readouterr().err.split())
