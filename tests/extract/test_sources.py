"""Where rows come from: each kind of file and folder gives the same rows, shares are exact, long rows are named."""

import gzip
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from speculators.errors import DataError, UsageError
from speculators.extract.conversations import Conversation, ReadOptions, TextRow, read_rows
from speculators.extract.sources import Source

ROWS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"ä{i}"}], "id": f"r{i}"}
    for i in range(5)
]
WANTED = [(f"r{i}", [f"q{i}"]) for i in range(5)]


def lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def found(*sources: str | Path | Source, **options) -> list[tuple[str, list[str]]]:
    rows = list(read_rows(sources, options=ReadOptions(**options)))
    assert all(isinstance(row, Conversation) for row in rows)
    return [(row.row_id, row.user_turns) for row in rows if isinstance(row, Conversation)]


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "wrapped.json").write_text(json.dumps({"data": ROWS}))
    with gzip.open(tmp_path / "a.json.gz", "wt") as stream:
        json.dump(ROWS, stream)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "split"))
    (tmp_path / "lines.json").write_bytes((tmp_path / "a.jsonl").read_bytes())
    names = (
        "a.jsonl",
        "a.json",
        "lines.json",
        "wrapped.json",
        "a.json.gz",
        "a.parquet",
        "saved",
        "split",
        "split/train",
    )
    for name in names:
        assert found(tmp_path / name) == WANTED, name
    (tmp_path / "one.json").write_text(json.dumps(ROWS[3]))
    assert found(tmp_path / "one.json") == WANTED[3:4]


def test_columns_that_another_row_fills_are_left_alone(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    rows = [
        {
            "messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "tool_calls": [call]}],
            "tools": "[]",
            "prompt": None,
        },
        {"messages": [{"role": "user", "content": "3?"}, {"role": "assistant", "content": "no"}], "prompt": "ignored"},
        {"prompt": "4?"},
    ]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    first, second, third = read_rows(tmp_path / "saved")
    assert isinstance(first, Conversation)
    assert first.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
    }
    assert first.tools is None
    assert first.row_id == "saved-000001"
    assert second.messages == [{"role": "user", "content": "3?"}, {"role": "assistant", "content": "no"}]
    assert third.messages == [{"role": "user", "content": "4?"}]


def test_a_folder_is_read_to_its_bottom_and_in_order(tmp_path: Path) -> None:
    lines(tmp_path / "b" / "rows.jsonl", [{"prompt": "2"}])
    lines(tmp_path / "a" / "deep" / "rows.jsonl", [{"prompt": "1"}])
    (tmp_path / "c.json").write_text('[{"prompt": "3"}]')
    # None of these is data.
    lines(tmp_path / ".cache" / "rows.jsonl", [{"prompt": "hidden"}])
    (tmp_path / "c.jsonl.settings.json").write_text("{}")
    lines(tmp_path / "c.errors.jsonl", [{"error": "x"}])
    (tmp_path / "README.md").write_text("words")
    assert found(tmp_path) == [("a/deep/rows-000001", ["1"]), ("b/rows-000001", ["2"]), ("c-000001", ["3"])]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"empty: the folder holds no data; expected files named \.jsonl"):
        found(empty)


def test_several_splits_want_a_name(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(DataError, match=r"several splits are saved here: train, test; name one, like .*two/train"):
        found(tmp_path / "two")
    assert found(tmp_path / "two" / "test") == WANTED


def test_shares_are_exact_and_drawn_with_the_seed(tmp_path: Path) -> None:
    many = [{"prompt": str(i), "id": i} for i in range(2500)]
    a, b = lines(tmp_path / "a.jsonl", many), lines(tmp_path / "b.jsonl", ROWS)
    for weight, count in ((0.3, 750), (0.001, 2), (1.0, 2500), (2.5, 6250)):
        rows = found(Source(str(a), weight))
        assert len(rows) == count
        times = Counter(row_id.split("#")[0] for row_id, _ in rows)
        assert set(times.values()) <= {int(weight), int(weight) + 1}
    one, again, other = (found(f"{a}@0.3", b, seed=seed) for seed in (0, 0, 1))
    assert one == again != other
    assert one[-5:] == WANTED
    order = [int(row_id) for row_id, _ in one[:-5]]
    assert order == sorted(order)
    # Drawn evenly: the first half holds 375 of 750, with a standard deviation of 11.5 over blocks of 1024 rows.
    assert abs(sum(i < 1250 for i in order) - 375) < 4 * 11.5
    assert found(f"{b}@2")[:4] == [("r0", ["q0"]), ("r0#2", ["q0"]), ("r1", ["q1"]), ("r1#2", ["q1"])]
    at = lines(tmp_path / "at@0.5", ROWS).rename(tmp_path / "at@0.5")
    assert Source.parse(at).weight == 1
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="expected a number above 0"):
            Source(str(a), wrong)
    with pytest.raises(DataError, match=r"no row left at weight 0\.01"):
        found(f"{b}@0.01")


def test_a_row_of_ten_megabytes_is_named_or_left_out_at_once(tmp_path: Path) -> None:
    long = {"prompt": "x" * 10_000_000, "id": "long"}
    path = lines(tmp_path / "a.jsonl", [ROWS[0], long, ROWS[1]])
    (tmp_path / "a.json").write_text(json.dumps([ROWS[0], long, ROWS[1]]))
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a"}, long]), tmp_path / "a.parquet")
    for name, kept in (("a.jsonl", 2), ("a.json", 2), ("a.parquet", 1)):
        with pytest.raises(DataError, match=rf"{name}:2: the row has .*bytes, above the limit of 4194304"):
            found(tmp_path / name)
        faults: list[DataError] = []
        started = time.monotonic()
        assert len(found(tmp_path / name, on_fault=faults.append)) == kept
        assert time.monotonic() - started < 5
        assert [fault.line for fault in faults] == [2]
    assert len(found(path, max_row_bytes=11_000_000)) == 3


def test_bad_rows_can_be_counted_instead(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    deep = "[" * 100_000
    texts = ['{"prompt": "1"}', "", "{", deep, '{"prompt": "\\ud800"}', '{"a": 1}', '{"id": 1, "prompt": "2"}']
    path.write_bytes("\n".join(texts).encode() + b'\n{"prompt": "\xe9"}\n{"id": 1, "prompt": "3"}\n')
    faults: list[DataError] = []
    assert [turns for _, turns in found(path, on_fault=faults.append)] == [["1"], ["2"]]
    reasons = ["is empty", "not JSON", "nested too deeply", "half a surrogate", "make no row", "not UTF-8", "was used"]
    assert [fault.line for fault in faults] == [2, 3, 4, 5, 6, 8, 9]
    for fault, reason in zip(faults, reasons, strict=True):
        assert reason in str(fault)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{", r"not JSON \(.*line 1"),
        ("a.json", b'[{"prompt": "a"}] [{"prompt": "b"}]', "Extra data at line 1 column 19"),
        ("a.json", b'"text"', "got a JSON str, expected a list of rows"),
        ("a.json", b"\xff\xfe", "cannot be read"),
        ("a.parquet", b"PAR1 but not really", "cannot be read as parquet"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: .*{message}"):
        found(tmp_path / name)


def test_a_broken_saved_dataset_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    for file in (tmp_path / "saved").glob("*.arrow"):
        file.unlink()
    with pytest.raises(DataError, match="saved: the saved dataset cannot be read"):
        found(tmp_path / "saved")


def test_a_dataset_of_the_hub_is_loaded_by_its_name(tmp_path: Path) -> None:
    """In a process of its own, whose caches lie here; a folder stands for the repository, since nothing is online."""
    lines(tmp_path / "repository" / "train.jsonl", ROWS)
    lines(tmp_path / "repository" / "test.jsonl", ROWS[:2])
    code = (
        "import sys\n"
        "from speculators.errors import DataError\n"
        "from speculators.extract.conversations import read_rows\n"
        "from speculators.extract.sources import Source\n"
        "name = sys.argv[1]\n"
        "for source in (name, name + ':default:test', name + '@0.4'):\n"
        "    print([row.row_id for row in read_rows(source)])\n"
        "print(Source.parse(name).identity() == Source.parse(name).identity())\n"
        "for source in (name + ':default:nowhere', 'hf:nobody/nothing'):\n"
        "    try:\n"
        "        list(read_rows(source))\n"
        "    except DataError as error:\n"
        "        print(error)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_DATASETS_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", code, f"hf:{tmp_path}/repository"],
        env=environment, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    all_rows, test, share, same, no_split, nobody = ended.stdout.splitlines()
    assert all_rows == str([f"r{i}" for i in range(5)])
    assert test == str(["r0", "r1"])
    assert len(json.loads(share.replace("'", '"'))) == 2
    assert same == "True"
    assert ":default:nowhere: the dataset cannot be loaded" in no_split
    assert nobody.startswith("hf:nobody/nothing: the dataset cannot be loaded")


def test_hub_names_have_three_parts_at_most() -> None:
    for name in ("hf:", "hf:a/b:c:d:e"):
        with pytest.raises(UsageError, match=r"expected hf:owner/name\[:subset\[:split\]\]"):
            found(name)


def test_plain_text_is_a_row_of_its_own(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "Once."}, {"text": "ignored", "prompt": "asked"}])
    text, prompt = read_rows(path)
    assert isinstance(text, TextRow)
    assert text.text == "Once."
    assert isinstance(prompt, Conversation)


def test_files_that_count_alike_are_told_apart(tmp_path: Path) -> None:
    a, b = (lines(tmp_path / f"{name}.jsonl", [{"prompt": name, "id": i} for i in range(2)]) for name in "ab")
    assert [row_id for row_id, _ in found(a, b)] == ["0", "1", "b/0", "b/1"]
    with pytest.raises(DataError, match="id 'b/0' was used"):
        found(a, b, b)
