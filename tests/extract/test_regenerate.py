"""Answers written by the verifier: the right ones, each once, whatever interrupts the run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from speculators.errors import DataError, UsageError
from speculators.extract.conversations import read_conversations
from speculators.extract.regenerate import RegenerateOptions, regenerate_rows
from speculators.extract.run import prepare, regenerate
from speculators.extract.tokenize import ChatTokenizer
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.tiny_models import SENTENCES

LIMITS = EngineLimits(max_num_seqs=3, max_model_len=256)
MIXED = RegenerateOptions(max_new_tokens=9, temperatures=((0.0, 1.0), (1.0, 1.0)), seed=3, store_token_ids=True)


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> Verifier:
    return Verifier.from_pretrained(tiny_verifier, dtype="float32")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows: list[dict[str, object]] = [{"prompt": SENTENCES[i % 6][: 9 + 3 * i], "id": f"p{i}"} for i in range(7)]
    rows[2] = {"turns": ["Name three cities.", "Which is the oldest?"], "system": "Be brief.", "id": "p2"}
    rows[4] = {
        "messages": [
            {"role": "user", "content": "What is the sum?"},
            {"role": "assistant", "content": "not the verifier's words"},
            {"role": "user", "content": "Explain."},
        ],
        "id": "p4",
    }
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer_alone(verifier: Verifier, messages: list[dict], params: SamplingParams) -> RequestOutput:
    engine = Engine(verifier, limits=EngineLimits(max_num_seqs=1, max_model_len=256))
    chat = ChatTokenizer(verifier.tokenizer)
    ids = chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    engine.add_request("alone", ids, params)
    while True:
        for output in engine.step():
            if output.finished:
                return output


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_turn_is_answered_as_the_verifier_would_alone(tmp_path: Path, verifier: Verifier, prompts: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = regenerate_rows(Engine(verifier, limits=LIMITS), prompts, out, MIXED, progress=False)
    rows = read(out)
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(7)]
    assert {row["temperature"] for row in rows} == {0.0, 1.0}
    assert (result.rows, result.resumed, result.skipped) == (7, 0, [])
    assert result.answer_tokens == sum(len(ids) for row in rows for ids in row["token_ids"])
    for row, asked in zip(rows, read_conversations(prompts), strict=True):
        assert [m["content"] for m in row["messages"] if m["role"] == "user"] == asked.user_turns
        assert row["messages"][: len(asked.system_messages)] == asked.system_messages
        answers = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
        assert len(answers) == len(asked.user_turns) == len(row["finish_reasons"])
        for turn, place in enumerate(answers):
            params = SamplingParams(temperature=row["temperature"], max_tokens=9, seed=row["seed"] + turn)
            alone = answer_alone(verifier, row["messages"][:place], params).outputs[0]
            assert row["token_ids"][turn] == alone.token_ids
            assert row["finish_reasons"][turn] == alone.finish_reason
            assert row["messages"][place]["content"] == alone.text.rstrip("\ufffd")
    assert "not the verifier's words" not in out.read_text()


def test_its_output_is_training_data(tmp_path: Path, tiny_verifier: Path, verifier: Verifier, prompts: Path) -> None:
    out = tmp_path / "out.jsonl"
    regenerate_rows(Engine(verifier, limits=LIMITS), prompts, out, MIXED, progress=False)
    prepared = prepare(tiny_verifier, out, tmp_path / "prepared", progress=False)
    learnt = []
    for row in read(out):
        ends = [reason == "stop" for reason in row["finish_reasons"]]
        answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        learnt.append("".join(text + "<|im_end|>" * end for text, end in zip(answers, ends, strict=True)))
    assert len(prepared) > 3
    tokenizer = ChatTokenizer(verifier.tokenizer).tokenizer
    # Random weights may write special tokens alone, which are no text.
    assert [tokenizer.decode(ids[mask]) for ids, mask in prepared] == [text for text in learnt if text]


class InterruptedEngine(Engine):
    """The engine with a user who presses Ctrl-C after some steps."""

    steps_left = 14

    def step(self) -> list[RequestOutput]:
        if self.steps_left == 0:
            raise KeyboardInterrupt
        self.steps_left -= 1
        return super().step()


def test_an_interrupted_run_goes_on(tmp_path: Path, verifier: Verifier, prompts: Path) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    regenerate_rows(Engine(verifier, limits=LIMITS), prompts, whole, MIXED, progress=False)
    engine = InterruptedEngine(verifier, limits=LIMITS)
    with pytest.raises(KeyboardInterrupt):
        regenerate_rows(engine, prompts, out, MIXED, progress=False)
    assert not engine.has_unfinished
    finished = len(read(out))
    assert 0 < finished < 7
    torn = whole.read_bytes().splitlines(keepends=True)[-1][:40]
    with out.open("ab") as stream:
        stream.write(torn)
    result = regenerate_rows(Engine(verifier, limits=LIMITS), prompts, out, MIXED, progress=False)
    assert (result.resumed, result.rows) == (finished, 7 - finished)
    assert out.read_bytes() == whole.read_bytes()
    again = regenerate_rows(Engine(verifier, limits=LIMITS), prompts, out, MIXED, progress=False)
    assert (again.resumed, again.rows) == (7, 0)
    assert out.read_bytes() == whole.read_bytes()


def test_a_limit_can_be_raised_later(tmp_path: Path, verifier: Verifier, prompts: Path) -> None:
    out = tmp_path / "out.jsonl"
    few = RegenerateOptions(max_new_tokens=4, limit=2)
    assert regenerate_rows(Engine(verifier, limits=LIMITS), prompts, out, few, progress=False).rows == 2
    more = RegenerateOptions(max_new_tokens=4, limit=4)
    result = regenerate_rows(Engine(verifier, limits=LIMITS), prompts, out, more, progress=False)
    assert (result.rows, result.resumed) == (2, 2)


def test_other_settings_do_not_mix(tmp_path: Path, verifier: Verifier, prompts: Path) -> None:
    out = tmp_path / "out.jsonl"
    engine = Engine(verifier, limits=LIMITS)
    regenerate_rows(engine, prompts, out, RegenerateOptions(max_new_tokens=3, limit=1), progress=False)
    with pytest.raises(DataError, match=r"out\.jsonl: the file was made with max_new_tokens 3, now 4 is asked for"):
        regenerate_rows(engine, prompts, out, RegenerateOptions(max_new_tokens=4, limit=1), progress=False)
    (tmp_path / "out.jsonl.settings.json").unlink()
    with pytest.raises(DataError, match="tells how it was made"):
        regenerate_rows(engine, prompts, out, RegenerateOptions(max_new_tokens=3, limit=1), progress=False)


def test_a_line_torn_in_the_middle_is_not_dropped(tmp_path: Path, verifier: Verifier, prompts: Path) -> None:
    out = tmp_path / "out.jsonl"
    engine, options = Engine(verifier, limits=LIMITS), RegenerateOptions(max_new_tokens=3, limit=2)
    regenerate_rows(engine, prompts, out, options, progress=False)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text(lines[0][:30] + "\n" + lines[1])
    with pytest.raises(DataError, match=r"out\.jsonl:1: the line is no finished row"):
        regenerate_rows(engine, prompts, out, options, progress=False)
    assert lines[1] in out.read_text()


def test_prompts_without_room_for_an_answer_are_skipped_and_named(
    tmp_path: Path, verifier: Verifier, prompts: Path
) -> None:
    with prompts.open("a") as stream:
        stream.write(json.dumps({"prompt": "long " * 300, "id": "long"}) + "\n")
    out = tmp_path / "out.jsonl"
    result = regenerate_rows(
        Engine(verifier, limits=LIMITS), prompts, out, RegenerateOptions(max_new_tokens=3), progress=False
    )
    assert result.skipped == ["long"]
    assert len(read(out)) == 7
    [fault] = read(tmp_path / "out.errors.jsonl")
    why = "no room for an answer within 256 tokens"
    assert fault == {"id": "long", "where": f"{prompts}:8", "error": why}


def test_sampling_parameters_reach_the_engine(tmp_path: Path, verifier: Verifier, prompts: Path) -> None:
    engine = Engine(verifier, limits=LIMITS)
    greedy = RegenerateOptions(max_new_tokens=9, store_token_ids=True)
    warm = RegenerateOptions(max_new_tokens=9, store_token_ids=True, temperatures=((1.5, 1.0),))
    # Of the likeliest token alone, any temperature draws that one.
    only = replace(warm, sampling={"top_k": 1})
    for name, options in (("greedy", greedy), ("warm", warm), ("only", only)):
        regenerate_rows(engine, prompts, tmp_path / f"{name}.jsonl", options, progress=False)
    ids = {name: [row["token_ids"] for row in read(tmp_path / f"{name}.jsonl")] for name in ("greedy", "warm", "only")}
    assert ids["only"] == ids["greedy"] != ids["warm"]
    with pytest.raises(DataError, match=r"made with sampling {'top_k': 1}, now None is asked for"):
        regenerate_rows(engine, prompts, tmp_path / "only.jsonl", warm, progress=False)
    with pytest.raises(UsageError, match=r"sampling holds \['topk'\], which the engine does not know"):
        regenerate_rows(engine, prompts, tmp_path / "a.jsonl", replace(warm, sampling={"topk": 1}), progress=False)
    with pytest.raises(UsageError, match="sampling holds seed, temperature"):
        RegenerateOptions(sampling={"temperature": 1, "seed": 3})


def test_options_of_the_template_reach_the_prompt(tmp_path: Path, tiny_verifier: Path, prompts: Path) -> None:
    loud = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    loud.tokenizer.chat_template = "{% if shout %}LOUD {% endif %}" + loud.tokenizer.chat_template
    answers = []
    for number, options in enumerate(({}, {"shout": True})):
        out = tmp_path / f"{number}.jsonl"
        how = RegenerateOptions(max_new_tokens=9, store_token_ids=True, limit=2, template_options=options)
        regenerate_rows(Engine(loud, limits=LIMITS), prompts, out, how, progress=False)
        answers.append([row["token_ids"] for row in read(out)])
    assert answers[0] != answers[1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}]}, "the row uses tools"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
            "a system message between turns",
        ),
        ({"input_ids": [1], "loss_mask": [1]}, "the row holds input_ids"),
    ],
)
def test_rows_that_cannot_be_answered_are_named(tmp_path: Path, verifier: Verifier, row: dict, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"p\.jsonl:2: .*{message}"):
        regenerate_rows(Engine(verifier, limits=LIMITS), path, tmp_path / "out.jsonl", progress=False)
    assert not (tmp_path / "out.jsonl").exists()


def test_temperatures_are_drawn_with_their_shares() -> None:
    options = RegenerateOptions(temperatures=((0.0, 3.0), (0.7, 1.0)))
    drawn = [options.temperature_of(f"row-{i}") for i in range(4000)]
    # A share of 3/4 over 4000 draws has a standard deviation of 0.0068.
    assert abs(drawn.count(0.0) / 4000 - 0.75) < 4 * 0.0068
    assert set(drawn) == {0.0, 0.7}
    assert drawn == [options.temperature_of(f"row-{i}") for i in range(4000)]
    assert len({options.seed_of(f"row-{i}") for i in range(4000)}) > 3990


def test_options_that_make_no_sense_are_refused(tmp_path: Path, verifier: Verifier, prompts: Path) -> None:
    with pytest.raises(UsageError, match="max_new_tokens is 0"):
        RegenerateOptions(max_new_tokens=0)
    with pytest.raises(UsageError, match="temperatures are"):
        RegenerateOptions(temperatures=((0.5, 0.0),))
    with pytest.raises(UsageError, match=r"must end in \.jsonl"):
        regenerate_rows(Engine(verifier, limits=LIMITS), prompts, tmp_path / "out.json.xz", progress=False)


def test_the_stage_loads_the_verifier_itself(tmp_path: Path, tiny_verifier: Path, prompts: Path) -> None:
    out = tmp_path / "new" / "out.jsonl"
    options = RegenerateOptions(max_new_tokens=2, limit=3)
    result = regenerate(tiny_verifier, [prompts], out, options, progress=False, dtype="float32", max_model_len=128)
    assert (result.output, result.rows, len(read(out))) == (out, 3, 3)
