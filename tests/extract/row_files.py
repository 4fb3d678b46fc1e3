"""Files of rows to prepare: a few of each kind, some with nothing to learn."""

import json
from pathlib import Path


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def talk(*texts: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def five_rows(folder: Path) -> Path:
    """Two conversations, one without an answer, and two rows of ids, one of them with nothing to learn."""
    return write(
        folder / "data.jsonl",
        talk("What is the sum?", "Forty two."),
        talk("Name three cities."),
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 0, 0]},
        talk("And then?", "Rain fell all night.", "Why?", "Nobody knows."),
    )
