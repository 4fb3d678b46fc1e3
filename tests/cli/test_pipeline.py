"""The commands one after another, from prompts to a measured speculator, on a tiny verifier."""

import json
from pathlib import Path

import pytest

from speculators.cli import main

PROMPTS = ["Name three cities near a river.", "What is the sum of twelve and thirty?", "Write a short letter."]


def run(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 0


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS), encoding="utf-8")
    return path


def test_from_prompts_to_hidden_states(
    tiny_verifier: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conversations, prepared, states = tmp_path / "c.jsonl", tmp_path / "prepared", tmp_path / "states"
    model = ("--model", tiny_verifier)
    shares = '{"0": 1, "0.9": 1}'
    answer = ("regenerate-responses", *model, "--data", prompts, "--output", conversations)
    run(*answer, "--max-tokens", "12", "--temperature", shares, "--dtype", "float32")
    rows = [json.loads(line) for line in conversations.read_text(encoding="utf-8").splitlines()]
    assert [row["messages"][0]["content"] for row in rows] == PROMPTS
    assert "3 conversations (0 were there before)" in capsys.readouterr().out
    run(*answer, "--max-tokens", "12", "--temperature", shares, "--dtype", "float32")
    assert "(3 were there before)" in capsys.readouterr().out

    prepare = ("prepare-data", *model, "--data", conversations, "--output", prepared, "--seq-length", "64")
    statistics = tmp_path / "statistics.json"
    run(*prepare, "--max-samples", "2", "--draft-vocab-size", "100", "--stats-json", statistics, "--show", "1")
    printed = capsys.readouterr().out
    for line in ("rows kept", "share learnt", "draft vocabulary", "coverage of what is learnt", "row 0: "):
        assert line in printed
    assert PROMPTS[0] in printed
    assert json.loads(statistics.read_text(encoding="utf-8"))["draft_vocab"]["size"] == 100
    report = tmp_path / "map.json"
    run("vocab-map", "--data", prepared, "--draft-vocab-size", "40", "--output", tmp_path / "map", "--json", report)
    found = json.loads(report.read_text(encoding="utf-8"))
    assert (tmp_path / "map" / "draft_vocab.safetensors").is_file()
    assert (found["draft_vocab_size"], found["verifier_vocab_size"]) == (40, 384)
    assert 0.5 < found["coverage"] <= 1
    manifest = json.loads((prepared / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["rows"] == 2
    assert (prepared / "draft_vocab.safetensors").is_file()

    capsys.readouterr()
    run("extract", *model, "--data", prepared, "--output", states, "--dtype", "float32")
    # Layers 2, L // 2 and L - 3 of eight, and the last.
    assert "2 rows, layers 2, 4, 5, 8" in capsys.readouterr().out
    run("extract", *model, "--data", prepared, "--output", tmp_path / "other", "--target-layer-ids", "1,6")
    assert "layers 1, 6, 8" in capsys.readouterr().out


def test_quickstart_ends_with_a_table_and_the_next_commands(
    tiny_verifier: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    settings = [
        f"verifier={tiny_verifier}",
        f"regenerate.prompts={json.dumps([str(prompts)])}",
        "regenerate.max_new_tokens=12",
        "draft.draft_vocab_size=128",
        "data.match=null",
        "evaluate.match=null",
        "data.validation_rows=1",
        "train.epochs=1",
        "train.measure_tokens=4",
        f"evaluate.data={json.dumps({'heldout': str(prompts)})}",
        "evaluate.max_new_tokens=8",
        "evaluate.dtype=float32",
    ]
    run("quickstart", "--out", out, *settings)
    report = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    assert report["identity"]["identical"] is True
    assert report["num_prompts"] == 3
    stages = {"regenerate", "prepare-data", "extract", "train", "evaluate", "card"}
    assert stages <= json.loads((out / "timings.json").read_text(encoding="utf-8")).keys()
    printed = capsys.readouterr().out
    assert f"{report['acceptance_length']:.2f}" in printed
    assert f"speculators generate {out / 'speculator'}" in printed
    assert f"speculators serve {out / 'speculator'}" in printed
    assert (out / "speculator" / "README.md").is_file()

    run("quickstart", "--out", out, *settings)
    assert f"{report['acceptance_length']:.2f}" in capsys.readouterr().out
    run("validate", out / "speculator")


RECIPE = """
from speculators import Recipe, run
from speculators.train.recipe import DataConfig
RECIPE = Recipe(name="tiny", verifier={verifier!r}, family="eagle3", draft={{}}, objective={{}},
                data=DataConfig(train=("rows.jsonl",)), out={out!r})
"""


def test_train_forwards_to_the_recipe(tiny_verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(verifier=str(tiny_verifier), out=str(tmp_path / "out")), encoding="utf-8")
    run("train", recipe, "extract", "train.learning_rate=0.5", "--plan")
    plan = json.loads(capsys.readouterr().out)
    assert plan["stages"] == ["extract"]
    assert plan["recipe"]["train"]["learning_rate"] == 0.5
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as ended:
        main(["train", str(recipe), "train.learning_rat=0.5"])
    assert ended.value.code == 2
    assert "did you mean train.learning_rate?" in capsys.readouterr().err
