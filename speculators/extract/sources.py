"""Where rows come from, and how many of each: files, folders, saved datasets and datasets of the hub.

    rows.jsonl  rows.json  rows.parquet     files; .jsonl and .json may be compressed (.gz, .xz)
    folder/                                 every such file in it and below, sorted by path
    saved/                                  what `datasets` wrote with save_to_disk
    hf:owner/name[:subset[:split]]          a dataset of the hub; the split is train where none is given

With `@weight` behind it, a source gives that share of its rows, drawn with a seed; above 1 it repeats them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import math
import random
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from speculators.errors import DataError, UsageError

HUB_PREFIX = "hf:"
MAX_ROW_BYTES = 4 * 2**20
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".json", ".json.gz", ".json.xz", ".parquet")
# What regeneration puts beside its conversations.
SIDE_FILES = (".settings.json", ".errors.jsonl")
_WEIGHTED = re.compile(r"(?P<name>.+)@(?P<weight>\d+(?:\.\d*)?|\.\d+)")
_DRAW_BLOCK = 1024


class Where(NamedTuple):
    """A line of a data file, or a row of a file that has no lines; 1-based."""

    path: Path
    line: int

    def fault(self, message: str) -> DataError:
        """The error to raise about this line."""
        return DataError(message, path=self.path, line=self.line)


@dataclass(frozen=True)
class Record:
    """A row as it was read: JSON values, or the error that stands in its place."""

    where: Where
    value: dict[str, Any] | DataError
    # Rows without an id are named by it and their number.
    stem: str
    # Which taking of the row this is, where its source repeats rows.
    copy: int = 0


@dataclass(frozen=True)
class Source:
    """A place that rows come from, and how often each row is taken: 0.3 is a share of 30 %, 2 is everything twice.

    `name` is a path, or `hf:owner/name[:subset[:split]]`. UsageError for a weight that is no positive number.
    """

    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise UsageError(f"source {self.name} has weight {self.weight}, expected a number above 0")

    @classmethod
    def parse(cls, given: str | Path | Source) -> Source:
        """Read `name` or `name@weight`; a path that exists as it is written has no weight."""
        if isinstance(given, Source):
            return given
        found = _WEIGHTED.fullmatch(str(given))
        if found is None or Path(given).exists():
            return cls(str(given))
        return cls(found["name"], float(found["weight"]))

    @property
    def path(self) -> Path:
        """The name as a path."""
        return Path(self.name)

    def files(self) -> list[Path]:
        """The files behind the name, in the order in which they are read; none for a dataset of the hub."""
        if self.name.startswith(HUB_PREFIX):
            return []
        if not self.path.is_dir():
            return [self.path]
        if _is_saved(self.path):
            return sorted(path for path in self.path.rglob("*") if path.is_file())
        found = [path for path in self.path.rglob("*") if _is_data(path, self.path)]
        if not found:
            raise DataError(f"the folder holds no data; expected files named {', '.join(SUFFIXES)}", path=self.path)
        return sorted(found)

    def records(self, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Record]:
        """Yield every row once; one that is malformed or longer than `max_row_bytes` as its error."""
        if self.name.startswith(HUB_PREFIX):
            yield from _dataset(_from_hub(self.name), self.path, _hub_stem(self.name), max_row_bytes)
        elif self.path.is_dir() and _is_saved(self.path):
            yield from _dataset(_from_disk(self.path), self.path, self.path.name, max_row_bytes)
        else:
            for path in self.files():
                inside = path.relative_to(self.path) if self.path.is_dir() else Path(path.name)
                yield from _file(path, str(inside.with_name(path.name.split(".")[0])), max_row_bytes)

    def identity(self) -> list[dict[str, Any]]:
        """What tells the source's content apart from another's: names and SHA-256, and of a hub dataset its files."""
        extra: dict[str, Any] = {} if self.weight == 1 else {"weight": self.weight}
        if self.name.startswith(HUB_PREFIX):
            cached = [str(Path(*Path(file["filename"]).parts[-3:])) for file in _from_hub(self.name).cache_files]
            return [{"name": self.name, "files": cached, **extra}]
        return [{"name": path.name, "sha256": _sha256(path), **extra} for path in self.files() if path.is_file()]


def draw(records: Iterable[Record], weight: float, seed: int, name: str) -> Iterator[Record]:
    """Yield `round(weight * n)` of n records in their order: whole multiples of all, and a share drawn with `seed`."""
    whole, share = divmod(weight, 1)
    generator = random.Random(f"{seed}/{name}")
    block: list[Record] = []
    read = taken = 0

    def chosen() -> Iterator[Record]:
        nonlocal taken
        quota = round(share * read) - taken
        taken += quota
        extra = set(generator.sample(range(len(block)), quota))
        for place, record in enumerate(block):
            for copy in range(int(whole) + (place in extra)):
                yield Record(record.where, record.value, record.stem, copy)

    for record in records:
        block.append(record)
        read += 1
        if len(block) == _DRAW_BLOCK:
            yield from chosen()
            block = []
    yield from chosen()


def _is_data(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.is_file() and not hidden and path.name.endswith(SUFFIXES) and not path.name.endswith(SIDE_FILES)


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _file(path: Path, stem: str, max_row_bytes: int) -> Iterator[Record]:
    if path.name.endswith(".parquet"):
        yield from _parquet(path, stem, max_row_bytes)
    elif path.name.endswith((".json", ".json.gz", ".json.xz")):
        yield from _json(path, stem, max_row_bytes)
    else:
        yield from _json_lines(path, stem, max_row_bytes)


def _json_lines(path: Path, stem: str, max_row_bytes: int) -> Iterator[Record]:
    for where, line in _lines(path, max_row_bytes):
        yield Record(where, line if isinstance(line, DataError) else parse_line(line, where), stem)


def parse_line(line: str, where: Where) -> dict[str, Any] | DataError:
    """Read a JSON object from a line; what is wrong with it is returned, not raised."""
    if not line.strip():
        return where.fault("the line is empty; remove it")
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return where.fault(f"not JSON ({error.msg} at column {error.colno}); expected one object a line")
    except RecursionError:
        return where.fault("the JSON is nested too deeply; expected a row of messages or texts")
    return _object(value, where)


def _object(value: object, where: Where) -> dict[str, Any] | DataError:
    if not isinstance(value, dict):
        return where.fault(f"got a JSON {type(value).__name__}, expected an object")
    return value


def _too_long(where: Where, size: str, max_row_bytes: int) -> DataError:
    return where.fault(
        f"the row has {size} bytes, above the limit of {max_row_bytes}; shorten it, raise max_row_bytes, or let bad "
        "rows be skipped"
    )


def _lines(path: Path, max_row_bytes: int) -> Iterator[tuple[Where, str | DataError]]:
    number = 0
    try:
        with _open(path) as stream:
            while raw := stream.readline(max_row_bytes + 2):
                number += 1
                where = Where(path, number)
                text = raw.rstrip(b"\r\n")
                if len(text) > max_row_bytes:
                    while raw and not raw.endswith(b"\n"):
                        raw = stream.readline(max_row_bytes)
                    yield where, _too_long(where, f"more than {max_row_bytes}", max_row_bytes)
                    continue
                try:
                    yield where, text.decode("utf-8")
                except UnicodeDecodeError as error:
                    yield where, where.fault(f"not UTF-8 ({error.reason} at byte {error.start})")
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        after = f" after line {number}" if number else ""
        raise DataError(f"cannot be read{after}: {error}", path=path) from error


def _json(path: Path, stem: str, max_row_bytes: int) -> Iterator[Record]:
    """A list of rows, an object with such a list alone (`{"data": [...]}`), one row, or JSON lines all the same."""
    try:
        with _open(path) as stream:
            content = json.loads(stream.read().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.colno == 1:
            yield from _json_lines(path, stem, max_row_bytes)
            return
        at = f"line {error.lineno} column {error.colno}"
        raise DataError(f"not JSON ({error.msg} at {at})", path=path) from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"cannot be read: {error}", path=path) from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        wrapped = len(content) == 1 and lists and all(isinstance(one, dict) and "role" not in one for one in lists[0])
        content = lists[0] if wrapped and not content.keys() & {"messages", "conversations"} else [content]
    if not isinstance(content, list):
        raise DataError(f"got a JSON {type(content).__name__}, expected a list of rows", path=path)
    for number, value in enumerate(content, start=1):
        where = Where(path, number)
        yield Record(where, _measured(_object(value, where), where, max_row_bytes), stem)


def _parquet(path: Path, stem: str, max_row_bytes: int) -> Iterator[Record]:
    from pyarrow import ArrowException, parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    number += 1
                    where = Where(path, number)
                    yield Record(where, _measured(value, where, max_row_bytes), stem)
    except (ArrowException, OSError) as error:
        raise DataError(f"cannot be read as parquet: {error}", path=path) from error


def _from_disk(folder: Path) -> Any:
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"the saved dataset cannot be read: {error}", path=folder) from error
    if isinstance(found, DatasetDict):
        if len(found) != 1:
            one = folder / next(iter(found), "train")
            raise DataError(f"several splits are saved here: {', '.join(found)}; name one, like {one}", path=folder)
        return next(iter(found.values()))
    return found


def _from_hub(name: str) -> Any:
    from datasets import DatasetDict, load_dataset

    repository, subset, split = _hub_parts(name)
    try:
        found = load_dataset(repository, subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the dataset cannot be loaded ({error}); expected hf:owner/name[:subset[:split]], and a network or a "
            "cached copy",
            path=name,
        ) from error
    assert not isinstance(found, DatasetDict)
    return found


def _hub_parts(name: str) -> tuple[str, str | None, str]:
    parts = name.removeprefix(HUB_PREFIX).split(":")
    if not parts[0] or len(parts) > 3:
        raise UsageError(f"got the source {name!r}, expected hf:owner/name[:subset[:split]]")
    repository, subset, split = (*parts, "", "")[:3]
    return repository, subset or None, split or "train"


def _hub_stem(name: str) -> str:
    return name.removeprefix(HUB_PREFIX).replace(":", "/")


def _dataset(rows: Any, path: Path, stem: str, max_row_bytes: int) -> Iterator[Record]:
    for number, value in enumerate(rows, start=1):
        where = Where(path, number)
        yield Record(where, _measured(dict(value), where, max_row_bytes), stem)


def _measured(value: dict[str, Any] | DataError, where: Where, max_row_bytes: int) -> dict[str, Any] | DataError:
    size = 0 if isinstance(value, DataError) else _size(value)
    return value if size <= max_row_bytes else _too_long(where, str(size), max_row_bytes)


def _size(value: object) -> int:
    """Roughly the bytes of a value as JSON."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass")) + 2
    if isinstance(value, dict):
        return sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(map(_size, value))
    return 4


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")
