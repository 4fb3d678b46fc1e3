"""The shipped conversations: their size, and that the verifier itself wrote them."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from speculators.runtime.engine import EngineLimits
from speculators.runtime.fetch import fetch_verifier
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier

DATA = Path(__file__).resolve().parents[2] / "recipes" / "data"
ROWS = 20


def conversations(split: str) -> list[dict[str, Any]]:
    with lzma.open(DATA / f"conversations-{split}.jsonl.xz", "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def prompts(split: str) -> dict[str, dict[str, Any]]:
    rows = (json.loads(line) for line in (DATA / f"prompts-{split}.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["id"]: row for row in rows}


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_conversation_answers_a_prompt_of_its_split(split: str) -> None:
    asked = prompts(split)
    rows = conversations(split)
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        turns = [message["content"] for message in row["messages"] if message["role"] == "user"]
        assert turns == asked[row["id"]]["turns"]
        assert [m["role"] for m in row["messages"] if m["role"] != "system"] == ["user", "assistant"] * len(turns)
    assert {row["temperature"] for row in rows} == {0.0, 0.8}


def test_there_are_thousands_of_them_and_every_held_out_prompt_has_one() -> None:
    assert len(conversations("train")) >= 3000
    assert [row["id"] for row in conversations("heldout")] == list(prompts("heldout"))


def test_the_files_are_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in DATA.glob("*.jsonl*")) < 5_000_000


@pytest.mark.full
def test_the_answers_have_600_000_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(fetch_verifier("smollm2"))
    rows = conversations("train") + conversations("heldout")
    answers = [m["content"] for row in rows for m in row["messages"] if m["role"] == "assistant"]
    assert sum(len(ids) for ids in tokenizer(answers)["input_ids"]) >= 600_000


@pytest.mark.full
def test_greedy_rows_are_the_verifiers_own_answers() -> None:
    """Rows chosen by a stride over the whole set are answered again in float32, and come out the same."""
    greedy = [row for row in conversations("train") if row["temperature"] == 0.0 and len(row["finish_reasons"]) == 1]
    chosen = greedy[:: len(greedy) // ROWS][:ROWS]
    assert len(chosen) == ROWS
    verifier = Verifier.from_pretrained(fetch_verifier("smollm2"), dtype="float32")
    llm = LLM.from_parts(verifier, limits=EngineLimits(max_num_seqs=ROWS, max_model_len=2048))
    outputs = llm.chat(
        [row["messages"][:-1] for row in chosen], SamplingParams(temperature=0, max_tokens=256), use_tqdm=False
    )
    for row, output in zip(chosen, outputs, strict=True):
        answer = output.outputs[0]
        text = answer.text.rstrip("\ufffd") if answer.finish_reason == "length" else answer.text
        assert text == row["messages"][-1]["content"]
        assert answer.finish_reason == row["finish_reasons"][0]
