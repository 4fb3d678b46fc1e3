"""Rows of different lengths, several to a safetensors file: which row lies where, and files written whole or not."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from speculators.errors import FormatError, StoreError
from speculators.formats.checkpoint import read_header
from speculators.formats.files import flush, flush_folder

ROW_LENGTHS = "row_lengths.safetensors"
PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Shard(NamedTuple):
    """The `number`-th file: rows `first` to `last` (exclusive), and how many tokens they have together."""

    number: int
    first: int
    last: int
    num_tokens: int


class WrittenFile(NamedTuple):
    """Size in bytes and SHA-256 of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class RowLayout:
    """Consecutive rows fill a shard until the next would pass `shard_tokens`; a longer row has a shard of its own."""

    lengths: Sequence[int]
    shards: Sequence[Shard]
    _starts: Sequence[int]

    @classmethod
    def plan(cls, lengths: Sequence[int], shard_tokens: int) -> RowLayout:
        """Lay out rows of these lengths (tokens)."""
        shards: list[Shard] = []
        first = tokens = 0
        for row, length in enumerate(lengths):
            if row > first and tokens + length > shard_tokens:
                shards.append(Shard(len(shards), first, row, tokens))
                first, tokens = row, 0
            tokens += length
        if lengths:
            shards.append(Shard(len(shards), first, len(lengths), tokens))
        return cls(lengths, shards, [0, *accumulate(lengths)])

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self._starts[-1]

    def locate(self, row: int) -> tuple[Shard, int, int]:
        """Return a row's shard and the tokens [start, end) of that shard which are the row's."""
        shard = self.shards[bisect_right(self.shards, row, key=lambda shard: shard.first) - 1]
        base = self._starts[shard.first]
        return shard, self._starts[row] - base, self._starts[row + 1] - base

    def offsets(self, shard: Shard) -> Tensor:
        """Where the rows of a shard begin within it, and where the last one ends: int64 [rows + 1]."""
        starts = self._starts[shard.first : shard.last + 1]
        return torch.tensor(starts, dtype=torch.int64) - starts[0]


class TensorFiles:
    """Slices of safetensors files; can be pickled and read from threads.

    A file is mapped into memory for one slice at a time, so that a process never holds more than what it asked for: a
    mapping that stays grows, page by page, to the size of the store.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def slice(self, file: str, name: str, start: int, end: int) -> Tensor:
        """Tokens [start, end) of a tensor; StoreError where the file cannot be read."""
        try:
            with safe_open(self._directory / file, framework="pt") as opened:
                found: Tensor = opened.get_slice(name)[start:end].clone()
        except (SafetensorError, OSError, RuntimeError) as error:
            raise StoreError(
                f"{self._directory / file} cannot be read: {error}; run the stage that made it again"
            ) from error
        return found


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Write a safetensors file, making it appear whole or not at all; StoreError when the disk is full."""
    return write_bytes(path, save(dict(tensors)))


def write_bytes(path: Path, data: bytes) -> WrittenFile:
    """Write a file, making it appear whole or not at all; StoreError when the disk is full."""
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        flush(temporary)
        os.replace(temporary, path)
        flush_folder(path.parent)
    except OSError as error:
        if error.errno not in _FULL:
            raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
        raise StoreError(
            f"no room for {path} ({_gib(len(data))} needed, {_gib(shutil.disk_usage(path.parent).free)} free: "
            f"{error.strerror}); what was finished is kept: make room and run the stage again"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return WrittenFile(len(data), hashlib.sha256(data).hexdigest())


def remove_partial_files(directory: Path, name: str) -> None:
    """Remove what a writer of the file `name` that was killed left behind."""
    for file in directory.glob(f".{name}.*{PARTIAL}"):
        file.unlink(missing_ok=True)


def is_whole(path: Path, num_bytes: int) -> bool:
    """Whether a safetensors file exists with this size and a header that fits it."""
    if not path.is_file() or path.stat().st_size != num_bytes:
        return False
    try:
        read_header(path)
    except FormatError:
        return False
    return True


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_lengths(directory: Path, lengths: Iterable[int]) -> None:
    """Write the rows' lengths, int64 [N]."""
    write_tensors(directory / ROW_LENGTHS, {"row_lengths": torch.tensor(list(lengths), dtype=torch.int64)})


def read_lengths(directory: Path) -> list[int]:
    """Read the rows' lengths; StoreError where they cannot be read."""
    try:
        with safe_open(directory / ROW_LENGTHS, framework="pt") as file:
            lengths: list[int] = file.get_tensor("row_lengths").tolist()
    except (SafetensorError, OSError, RuntimeError) as error:
        raise StoreError(f"{directory / ROW_LENGTHS} cannot be read: {error}; make the directory again") from error
    return lengths


def require_room(directory: Path, num_bytes: int, what: str) -> None:
    """Raise StoreError when the disk has less room than needed."""
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise StoreError(
            f"{what} needs {_gib(num_bytes)}, but {directory} has {_gib(free)} free; make room, give another folder, "
            "or take fewer rows"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
