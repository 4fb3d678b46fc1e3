"""The model card: measured numbers appear as they are, absent ones not at all."""

import json
from pathlib import Path
from typing import Any

import pytest

from speculators.errors import DataError
from speculators.formats.card import model_card, write_card
from speculators.models import family_config
from speculators.models.eagle3.config import Eagle3Config
from tests.formats.eagle3_directory import make_config

CONFIG = Eagle3Config.from_json(make_config())
EVALUATION: dict[str, Any] = {
    "verifier": "somebody/verifier",
    "speculator": "out/speculator",
    "method": "eagle3",
    "num_speculative_tokens": 3,
    "num_prompts": 40,
    "max_new_tokens": 96,
    "temperature": 0.0,
    "acceptance_length": 2.4567,
    "num_drafts": 1234,
    "num_draft_tokens": 3702,
    "num_accepted_tokens": 1797,
    "accepted_per_position": [900, 600, 297],
    "acceptance_rate_per_position": [0.7293, 0.4862, 0.2407],
    "conditional_acceptance_per_position": [0.7293, 0.6667, 0.495],
    "speed": {"dtype": "bfloat16", "plain": 20.44, "speculative": 31.02, "speedup": 1.5176},
    "identity": {"dtype": "float32", "identical": True, "first_difference": [None] * 40},
}


def front_matter(text: str) -> str:
    assert text.startswith("---\n")
    return text[4:].partition("\n---\n")[0]


def table_rows(text: str) -> dict[str, list[str]]:
    cells = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in cells}


def test_the_measured_numbers_are_there() -> None:
    rows = table_rows(model_card(CONFIG, {"held-out prompts": EVALUATION}))
    assert rows["acceptance length"] == ["2.457"]
    assert rows["verifications with drafts"] == ["1,234"]
    assert rows["temperature"] == ["0"]
    assert rows["tokens per second without speculation"] == ["20.44"]
    assert rows["speed-up"] == ["1.518"]
    assert rows["greedy output identical"] == ["yes"]
    assert rows["position"] == ["accepted", "acceptance", "acceptance given all before"]
    assert rows["2"] == ["600", "0.4862", "0.6667"]


@pytest.mark.parametrize("key", sorted(EVALUATION))
def test_an_absent_number_is_left_out(key: str) -> None:
    """No row says more than the measurement: dropping a key, or making it null, removes its row and adds nothing."""
    everything = set(model_card(CONFIG, {"x": EVALUATION}).splitlines())
    dropped = {name: value for name, value in EVALUATION.items() if name != key}
    text = model_card(CONFIG, {"x": dropped})
    assert text == model_card(CONFIG, {"x": EVALUATION | {key: None}})
    assert "None" not in text
    assert "null" not in text
    if not key.endswith("per_position"):
        assert set(text.splitlines()) <= everything


def test_without_measurements_there_are_no_tables() -> None:
    text = model_card(CONFIG)
    assert "|" not in text
    assert "Measured" not in text
    assert "Training" not in text


def test_a_check_without_a_verdict_says_nothing() -> None:
    sampled = EVALUATION | {"identity": {"dtype": "float32", "identical": None, "first_difference": None}}
    assert "identi" not in model_card(CONFIG, {"sampled": sampled})


def test_positions_of_different_length_stay_apart() -> None:
    numbers = {"accepted_per_position": [5, 2], "acceptance_rate_per_position": [0.5]}
    assert table_rows(model_card(CONFIG, {"x": numbers}))["2"] == ["2", ""]


def test_training_numbers_are_listed_in_order() -> None:
    text = model_card(CONFIG, training={"rows": 3000, "optimizer": "adamw", "learning_rate": 1e-4, "seconds": None})
    assert text.endswith(
        "## Training\n\n|  |  |\n| --- | ---: |\n| rows | 3,000 |\n| optimizer | adamw |\n| learning rate | 0.0001 |\n"
    )


@pytest.mark.parametrize(
    "numbers",
    [
        {"acceptance_length": float("nan")},
        {"acceptance_length": [2.5]},
        {"accepted_per_position": 3},
        {"accepted_per_position": [float("inf")]},
        {"speed": 20.0},
    ],
)
def test_what_is_no_measurement_is_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        model_card(CONFIG, {"x": numbers})


def test_front_matter_names_the_verifier_only_where_others_can_find_it() -> None:
    lines = front_matter(model_card(CONFIG)).splitlines()
    assert "library_name: speculators" in lines
    assert 'base_model: "somebody/verifier"' in lines
    assert '- "eagle3"' in lines
    local = make_config(block={"verifier": {"name_or_path": "/models/verifier", "architectures": []}})
    text = model_card(Eagle3Config.from_json(local))
    assert "base_model" not in text
    assert "engines need it there" in text


def test_front_matter_survives_awkward_names() -> None:
    awkward = make_config(block={"verifier": {"name_or_path": 'a: "b" #c', "architectures": []}})
    line = front_matter(model_card(Eagle3Config.from_json(awkward))).splitlines()[2]
    assert json.loads(line.removeprefix("base_model: ")) == 'a: "b" #c'


def test_usage_names_the_repository() -> None:
    text = model_card(CONFIG, repo="me/draft")
    assert "# draft\n" in text
    for command in (
        "speculators generate me/draft --chat",
        "speculators serve me/draft",
        "vllm serve me/draft",
        'LLM("me/draft")',
    ):
        assert command in text
    assert "path/to/this/directory" in model_card(CONFIG)


def test_words_cannot_break_a_table() -> None:
    text = model_card(CONFIG, {"a | b\nc": {"method": "x | y\nz"}})
    assert "## Measured: a \\| b c\n" in text
    assert "| method | x \\| y z |" in text


def test_the_card_is_written_beside_the_weights(tmp_path: Path) -> None:
    path = write_card(tmp_path, CONFIG, {"held-out": EVALUATION}, {"rows": 3}, "me/draft")
    assert path == tmp_path / "README.md"
    assert path.read_text(encoding="utf-8") == model_card(CONFIG, {"held-out": EVALUATION}, {"rows": 3}, "me/draft")


@pytest.mark.parametrize(
    ("family", "command"),
    [
        ("eagle3", "vllm serve org/draft"),
        ("dflash2", "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve org/draft"),
        ("mtp", None),
    ],
)
def test_how_to_serve_is_what_engines_can_do(family: str, command: str | None) -> None:
    """vLLM runs some classes in its newer runner alone, and reads no MTP directory at all."""
    folder = Path(__file__).parent.parent / "golden" / family
    kind = family_config(family)
    assert kind is not None
    text = model_card(kind.from_json(json.loads((folder / "config.json").read_text())), repo="org/draft")
    lines = text.splitlines()
    assert [line for line in lines if "vllm serve" in line] == ([] if command is None else [command])
    assert ('- "vllm"' in front_matter(text).splitlines()) is (command is not None)
    assert ("vLLM does not read this directory" in text) is (command is None)
    assert "speculators serve org/draft --port 8000" in lines
