"""Reading rows: each shape, three file kinds, and an error with file and line for everything else."""

import gzip
import json
import lzma
from pathlib import Path

import pytest

from speculators.errors import DataError
from speculators.extract.conversations import Conversation, TokenRow, read_conversations, read_rows

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_each_shape_is_read(tmp_path: Path) -> None:
    tool_call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    path = write(
        tmp_path / "rows.jsonl",
        {"turns": ["one", "two"], "system": "be brief"},
        {"prompt": "one", "id": 7},
        {"messages": [USER, ANSWER], "finish_reasons": ["length"]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        {"input_ids": [3, 4, 5], "loss_mask": [0, 1, True]},
        {"messages": [USER, tool_call, {"role": "tool", "content": "42"}], "tools": [{"name": "f"}]},
        {"prompt": "ignored", "messages": [USER]},
    )
    turns, prompt, messages, sharegpt, tokens, tools, both = read_rows(path)
    assert isinstance(turns, Conversation)
    assert turns.row_id == "rows-000001"
    assert turns.user_turns == ["one", "two"]
    assert turns.system_messages == [{"role": "system", "content": "be brief"}]
    assert prompt.row_id == "7"
    assert prompt.messages == [{"role": "user", "content": "one"}]
    assert messages.messages == sharegpt.messages == [USER, ANSWER]
    assert messages.cut_answers == {1}
    assert sharegpt.cut_answers == frozenset()
    assert isinstance(tokens, TokenRow)
    assert (tokens.input_ids, tokens.loss_mask) == ([3, 4, 5], [False, True, True])
    assert tools.messages[1] == {**tool_call, "content": ""}
    assert tools.tools == [{"name": "f"}]
    assert both.messages == [USER]


def test_pairs_of_prompt_and_answer_are_two_turns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl",
        {"prompt": "hi", "response": "ho", "system": "be brief"},
        {"prompt": "hi", "completion": "ho"},
        {"instruction": "Greet", "input": "Ada", "output": "Hi, Ada"},
        {"instruction": "Greet", "input": "", "output": "Hi"},
        {"question": "1+1?", "answer": "2"},
        {"prompt": "hi", "response": "ho", "reasoning_content": "They greet."},
    )
    spoken = [[(message["role"], message["content"]) for message in row.messages] for row in read_conversations(path)]
    pair = [("user", "hi"), ("assistant", "ho")]
    assert spoken == [
        [("system", "be brief"), *pair],
        pair,
        [("user", "Greet\n\nAda"), ("assistant", "Hi, Ada")],
        [("user", "Greet"), ("assistant", "Hi")],
        [("user", "1+1?"), ("assistant", "2")],
        pair,
    ]
    assert [*read_conversations(path)][-1].messages[1]["reasoning_content"] == "They greet."


def test_sharegpt_calls_and_results_are_messages(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "2+3?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 3}}'},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": "Five."},
    ]
    tools = [{"name": "add"}]
    rows = [{"conversations": turns, "tools": json.dumps(tools), "system": "be brief"}]
    [row] = read_conversations(write(tmp_path / "rows.jsonl", *rows))
    assert row.tools == tools
    assert [message["role"] for message in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    assert row.messages[2] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert row.answers == [2, 4]


@pytest.mark.parametrize(("name", "opener"), [("a.jsonl", open), ("a.jsonl.gz", gzip.open), ("a.jsonl.xz", lzma.open)])
def test_compressed_files_are_read_like_plain_ones(tmp_path: Path, name: str, opener) -> None:
    path = tmp_path / name
    with opener(path, "wb") as stream:
        stream.write('{"prompt": "größe"}\r\n{"prompt": "b\u2028c"}'.encode())
    rows = list(read_conversations([path]))
    assert [row.user_turns for row in rows] == [["größe"], ["b\u2028c"]]
    assert [row.row_id for row in rows] == ["a-000001", "a-000002"]


def test_limit_counts_over_all_files(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"prompt": "1"}, {"prompt": "2"})
    b = write(tmp_path / "b.jsonl", {"prompt": "3"}, {"prompt": "4"})
    assert [row.user_turns for row in read_conversations([a, b], limit=3)] == [["1"], ["2"], ["3"]]


def test_match_is_found_in_ids_and_comes_before_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"id": f"{kind}-{n}", "prompt": "x"} for n in range(3) for kind in "ab"))
    assert [row.row_id for row in read_rows(path, limit=2, match="^b")] == ["b-0", "b-1"]
    assert [row.row_id for row in read_rows(path, match="[12]$")] == ["a-1", "b-1", "a-2", "b-2"]
    with pytest.raises(DataError, match=r"a\.jsonl: the file has no row whose id has a match of 'c'"):
        list(read_rows(path, match="c"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the line is empty"),
        ("   ", "the line is empty"),
        ('{"prompt": "a"', "not JSON"),
        ('["a"]', "got a JSON list"),
        ('{"words": "a"}', "expected one of messages"),
        ('{"text": " "}', "text is ' '"),
        ('{"text": 3}', "text is 3"),
        ('{"prompt": "a", "response": 3}', "message 1 has content 3"),
        ('{"instruction": "", "output": "b"}', "instruction is ''"),
        ('{"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}', "the assistant alone calls tools"),
        ('{"messages": [{"role": "assistant", "tool_calls": "f"}]}', "message 0 has tool_calls 'f'"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}', "expected a function with a name"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}',
            "message 0 calls f with arguments that are no JSON",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]}',
            "message 0 calls f with [1], expected an object",
        ),
        ('{"messages": [{"role": "assistant", "content": "a", "thinking": 3}]}', "message 0 has thinking 3"),
        ('{"conversations": [{"from": "function_call", "value": "f"}]}', "turn 0 calls 'f'"),
        ('{"prompt": ""}', "user turn 0 is ''"),
        ('{"prompt": ["a"]}', "user turn 0 is"),
        ('{"turns": []}', "turns is []"),
        ('{"turns": "a"}', "turns is 'a'"),
        ('{"turns": ["a", 3]}', "user turn 1 is 3"),
        ('{"turns": ["a"], "system": 3}', "system is a int"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "role 'bot'"),
        ('{"messages": ["a"]}', "message 0 is a str"),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}', "content in parts"),
        ('{"messages": [{"role": "user"}]}', "message 0 has content None"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "expected the user to begin"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "no user turn"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": "f"}', "tools is a str"),
        ('{"messages": [{"role": "user", "content": "a"}], "finish_reasons": ["stop"]}', "finish_reasons"),
        ('{"conversations": [{"from": ["x"], "value": "a"}]}', "is from ['x']"),
        ('{"conversations": [{"from": "human"}]}', "message 0 has content None"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "2 input_ids but 1"),
        ('{"input_ids": [1, -2], "loss_mask": [1, 1]}', "input_ids[1] is -2"),
        ('{"input_ids": [1, 2.0], "loss_mask": [1, 1]}', "input_ids[1] is 2.0"),
        ('{"input_ids": [1, 2], "loss_mask": [1, 2]}', "loss_mask[1] is 2"),
        ('{"input_ids": [1, 2]}', "loss_mask is None"),
        ('{"input_ids": [1, 2], "loss_mask": null}', "loss_mask is None"),
        ('{"prompt": "a", "id": 1.5}', "id is 1.5"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + '\n{"prompt": "fine too"}\n', encoding="utf-8")
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)
    assert (caught.value.path, caught.value.line) == (path, 2)


def test_ids_are_unique(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "id": "x"}, {"prompt": "2"}, {"prompt": "3", "id": "x"})
    with pytest.raises(DataError, match=r"a\.jsonl:3: id 'x' was used at .*a\.jsonl:1"):
        list(read_rows(path))


def test_files_that_hold_nothing_or_cannot_be_read_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(DataError, match=r"empty\.jsonl: the file has no rows"):
        list(read_rows(empty))
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot be read"):
        list(read_rows(tmp_path / "absent.jsonl"))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: not UTF-8"):
        list(read_rows(latin))


@pytest.mark.parametrize(("suffix", "module"), [("gz", gzip), ("xz", lzma)])
def test_a_truncated_archive_is_named(tmp_path: Path, suffix: str, module) -> None:
    path = tmp_path / f"a.jsonl.{suffix}"
    whole = module.compress("".join(f'{{"prompt": "{n} {n * n}"}}\n' for n in range(1000)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read"):
        list(read_rows(path))


def test_rows_of_tokens_are_no_conversations(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"input_ids": [1], "loss_mask": [1]})
    with pytest.raises(DataError, match=r"a\.jsonl:1: the row holds input_ids"):
        list(read_conversations(path))
    with pytest.raises(DataError, match=r"b\.jsonl:1: the row holds plain text"):
        list(read_conversations(write(tmp_path / "b.jsonl", {"text": "Once."})))
