"""What a hidden-states store says about itself: what it was made from, and which shards are finished."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout

from speculators.errors import StoreError
from speculators.extract.quantised import QUANTISED, bytes_per_state
from speculators.extract.shards import write_bytes

MANIFEST = "manifest.json"
FORMAT_VERSION = 3
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Called so in the file; the rest carries the attribute's name.
_FINGERPRINT = "fingerprint"
_MANIFEST_SECONDS = 120.0


@dataclass(frozen=True)
class StoreIdentity:
    """What a store was made from; two runs may share a store only where all of it is equal.

    `aux_layer_ids` are capture ids, ascending (i = residual stream entering layer i); `num_layers` is the id of the
    last state, which is always stored, as `dtype`. The others are too, unless `aux_dtype` quantises them. `rows_hash`
    is over the token ids and masks.
    """

    verifier: str
    verifier_fingerprint: str
    aux_layer_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    dtype: str
    template_hash: str
    rows_hash: str
    prenorm: bool = True
    aux_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise StoreError(f"dtype {self.dtype!r} cannot be stored; expected one of {', '.join(DTYPES)}")
        if self.aux_dtype is not None and self.aux_dtype not in QUANTISED:
            raise StoreError(
                f"aux dtype {self.aux_dtype!r}: expected one of {', '.join(QUANTISED)}, or none, for {self.dtype}"
            )
        ids = self.aux_layer_ids
        if list(ids) != sorted(set(ids)) or (ids and not 0 <= ids[0] <= ids[-1] <= self.num_layers):
            raise StoreError(f"aux layer ids {list(ids)}: expected ascending, distinct ids within 0..{self.num_layers}")

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """All stored layers, ascending."""
        return tuple(sorted({*self.aux_layer_ids, self.num_layers}))

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk per token: states, id and mask."""
        full = self.hidden_size * DTYPES[self.dtype].itemsize
        aux = full if self.aux_dtype is None else bytes_per_state(self.hidden_size)
        return (len(self.layer_ids) - 1) * aux + full + 8 + 1

    def require_same(self, wanted: dict[str, Any], directory: Path) -> None:
        """Raise StoreError, naming both sides, where a wanted value is another than this one's."""
        for key, value in wanted.items():
            mine = getattr(self, key)
            if mine != value and key != "verifier":
                name = f" (made with {self.verifier})" if key == "verifier_fingerprint" else ""
                raise StoreError(
                    f"{directory} was made for {key.replace('_', ' ')} {_shown(mine)}{name}, now {_shown(value)} is "
                    "asked for; give another folder, or make the store again"
                )


class FinishedShard(NamedTuple):
    """A shard in the manifest: its file, size and checksum, and how many rows and tokens it has."""

    file: str
    num_bytes: int
    sha256: str
    rows: int
    tokens: int


@dataclass
class Manifest:
    """The store's `manifest.json`; `shards` maps a shard's number to what is known of it.

    `skipped_rows` are numbers of rows that no states could be had for: they are in their shards, but never read.
    """

    identity: StoreIdentity
    num_rows: int
    num_tokens: int
    shard_tokens: int
    shards: dict[int, FinishedShard] = field(default_factory=dict)
    skipped_rows: list[int] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every row is in a finished shard."""
        return sum(shard.rows for shard in self.shards.values()) == self.num_rows

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read a directory's manifest; StoreError where it is missing, damaged or of another format."""
        path = directory / MANIFEST
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise StoreError(f"{directory} is no hidden-states store: {MANIFEST} cannot be read ({error})") from error
        except ValueError as error:
            raise StoreError(f"{path} is damaged: {error}; make the store again") from error
        version = data.get("format_version") if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            raise StoreError(f"{path} has format_version {version!r}, expected {FORMAT_VERSION}; make the store again")
        names = {item.name: _key(item.name) for item in fields(StoreIdentity)}
        own = ["num_rows", "num_tokens", "shard_tokens", "skipped_rows", "shards"]
        missing = [key for key in [*names.values(), *own] if key not in data]
        if missing or data["prenorm"] is not True:
            what = f"lacks {', '.join(missing)}" if missing else f"says prenorm {data['prenorm']!r}, expected true"
            raise StoreError(f"{path} {what}; make the store again")
        values = {name: data[key] for name, key in names.items()}
        identity = StoreIdentity(**{**values, "aux_layer_ids": tuple(values["aux_layer_ids"])})
        try:
            finished = [
                FinishedShard(one["file"], one["bytes"], one["sha256"], one["rows"], one["tokens"])
                for one in data["shards"]
            ]
            shards = {shard_number(one.file): one for one in finished}
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{path} is damaged: a shard's entry is wrong ({error!r}); make the store again"
            ) from error
        counts = (data["num_rows"], data["num_tokens"], data["shard_tokens"])
        return cls(identity, *counts, shards, list(data["skipped_rows"]))

    def write(self, directory: Path) -> None:
        """Write it atomically."""
        shards = [one for _, one in sorted(self.shards.items())]
        data = {
            "format_version": FORMAT_VERSION,
            **{_key(name): value for name, value in asdict(self.identity).items()},
            "layer_ids": self.identity.layer_ids,
            "num_rows": self.num_rows,
            "num_tokens": self.num_tokens,
            "shard_tokens": self.shard_tokens,
            "skipped_rows": sorted(self.skipped_rows),
            "shards": [
                {"file": one.file, "bytes": one.num_bytes, "sha256": one.sha256, "rows": one.rows, "tokens": one.tokens}
                for one in shards
            ],
        }
        write_bytes(directory / MANIFEST, (json.dumps(data, indent=1) + "\n").encode())


@contextmanager
def manifest_lock(directory: Path) -> Iterator[None]:
    """Keep other processes from the manifest for a moment; StoreError where they do not let go of it."""
    lock = FileLock(directory / ".manifest.lock")
    try:
        lock.acquire(timeout=_MANIFEST_SECONDS)
    except Timeout as error:
        raise StoreError(f"another process holds {lock.lock_file} for {_MANIFEST_SECONDS:.0f} s; end it") from error
    try:
        yield
    finally:
        lock.release()


def shard_name(index: int) -> str:
    """File name of a shard."""
    return f"shard-{index:05d}.safetensors"


def shard_number(file: str) -> int:
    """Number of the shard with this file name; ValueError where it is no such name."""
    number = int(file.removeprefix("shard-").removesuffix(".safetensors"))
    if shard_name(number) != file:
        raise ValueError(f"{file!r} is no shard's name")
    return number


def _key(name: str) -> str:
    return _FINGERPRINT if name == "verifier_fingerprint" else name


def _shown(value: object) -> str:
    text = str(list(value) if isinstance(value, tuple) else value)
    return f"{text[:12]}..." if len(text) == 64 else text
