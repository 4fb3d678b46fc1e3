"""The file of regenerated conversations: appended row by row, continued by a rerun, and put in order at the end.

Beside `<name>.jsonl` lie `<name>.jsonl.settings.json`, which tells how it was made, and, where rows were left out in
the last run, `<name>.errors.jsonl` with their ids, places and reasons.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from speculators.errors import DataError, UsageError
from speculators.extract.sources import Where
from speculators.formats.files import write_text


class AnswersFile:
    """Rows are appended within a `with` block, flushed one by one, and sorted as `order` when it ends.

    Opening drops a torn last line; `finished` holds the ids that are there. Raises DataError for a file made with other
    settings or with a line that is no row, and UsageError for a name that does not end in .jsonl.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], order: Sequence[str]) -> None:
        self.path = Path(path)
        if self.path.suffix != ".jsonl":
            raise UsageError(f"output {self.path} must end in .jsonl, since rows are appended as they finish")
        self._order = list(order)
        self._faults: list[dict[str, Any]] = []
        self._stream: TextIO | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _check_settings(self.path, settings)
        self.finished = set(_recover(self.path))

    @property
    def errors_path(self) -> Path:
        """Where the rows that were left out are named."""
        return self.path.with_name(f"{self.path.stem}.errors.jsonl")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            os.fsync(self._stream.fileno())
            self._stream.close()
        if self._faults:
            write_text(
                self.errors_path, "".join(json.dumps(fault, ensure_ascii=False) + "\n" for fault in self._faults)
            )
        else:
            self.errors_path.unlink(missing_ok=True)
        _put_in_order(self.path, self._order)

    def append(self, line: str) -> None:
        """Write a finished row."""
        if self._stream is None:
            self._stream = self.path.open("a", encoding="utf-8")
        self._stream.write(line + "\n")
        self._stream.flush()

    def leave_out(self, row_id: str | None, where: Where | None, error: str) -> None:
        """Name a row that is not answered, and why."""
        place = None if where is None else f"{where.path}:{where.line}"
        self._faults.append({"id": row_id, "where": place, "error": error})


def _check_settings(output: Path, settings: Mapping[str, Any]) -> None:
    path = output.with_name(output.name + ".settings.json")
    if output.exists() and path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"not JSON ({error}); remove it and {output} to begin anew", path=path) from error
        for key in [*settings, *(key for key in before if key not in settings)]:
            if before.get(key) != settings.get(key):
                raise DataError(
                    f"the file was made with {key} {before.get(key)!r}, now {settings.get(key)!r} is asked for; go on "
                    "with the former, or give another output",
                    path=output,
                )
        return
    if output.exists() and output.stat().st_size:
        raise DataError(f"the file exists, but {path.name}, which tells how it was made, does not", path=output)
    write_text(path, json.dumps(settings, indent=2) + "\n")


def _recover(output: Path) -> Iterator[str]:
    """Yield the ids of finished rows, after cutting off a last line that was torn."""
    if not output.exists():
        return
    for number, (row_id, start, end) in enumerate(_lines(output), start=1):
        if row_id is not None:
            yield row_id
        elif end == output.stat().st_size:
            os.truncate(output, start)
        else:
            raise DataError("the line is no finished row; remove the line, or the file", path=output, line=number)


def _lines(output: Path) -> Iterator[tuple[str | None, int, int]]:
    """Yield, per line, the row's id (None where it is not whole) and the bytes where it starts and ends."""
    start = 0
    with output.open("rb") as stream:
        for raw in stream:
            row_id: str | None = None
            if raw.endswith(b"\n"):
                try:
                    row_id = str(json.loads(raw)["id"])
                except (ValueError, KeyError, TypeError):
                    row_id = None
            yield row_id, start, start + len(raw)
            start += len(raw)


def _put_in_order(output: Path, order: list[str]) -> None:
    """Sort the rows as the prompts were; rows of other prompts follow."""
    if not output.exists():
        return
    rank = {row_id: i for i, row_id in enumerate(order)}
    spans = [(rank.get(row_id or "", len(order)), start, end) for row_id, start, end in _lines(output)]
    if spans == sorted(spans):
        return
    temporary = output.with_name(output.name + ".tmp")
    with output.open("rb") as source, temporary.open("wb") as target:
        for _, start, end in sorted(spans):
            source.seek(start)
            target.write(source.read(end - start))
        target.flush()
        os.fsync(target.fileno())
    os.replace(temporary, output)
