"""Hidden states of many rows on disk: what a draft learns from.

A directory of shards, each a safetensors file with `hidden_states` [tokens, layers, H], `token_ids` int64 [tokens],
`loss_mask` bool [tokens] and `row_offsets` int64 [rows + 1], and a manifest that says which verifier, layers, chat
template and rows they come from. Layers ascend; the last one is the verifier's output before its final norm. A shard is
the unit of resumption: it exists whole, with its checksum in the manifest, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from speculators.errors import StoreError
from speculators.extract.shards import (
    RowLayout,
    Shard,
    TensorFiles,
    is_whole,
    read_lengths,
    remove_partial_files,
    require_room,
    sha256_of,
    write_bytes,
    write_lengths,
    write_tensors,
)
from speculators.models.draft_model import Sample

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEFAULT_SHARD_BYTES = 64 * 2**20


@dataclass(frozen=True)
class StoreIdentity:
    """What a store was made from; two runs may share a store only where all of it is equal.

    `aux_layer_ids` are capture ids, ascending (i = residual stream entering layer i); `num_layers` is the id of the
    last state, which is always stored. `rows_hash` is over the token ids and masks.
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

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise StoreError(f"dtype {self.dtype!r} cannot be stored; expected one of {', '.join(DTYPES)}")
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
        return len(self.layer_ids) * self.hidden_size * DTYPES[self.dtype].itemsize + 8 + 1

    def require_same(self, wanted: dict[str, Any], directory: Path) -> None:
        """Raise StoreError, naming both sides, where a wanted value is another than this one's."""
        for key, value in wanted.items():
            mine = getattr(self, key)
            if value is not None and mine != value and key != "verifier":
                name = f" (made with {self.verifier})" if key == "verifier_fingerprint" else ""
                raise StoreError(
                    f"{directory} was made for {key.replace('_', ' ')} {_shown(mine)}{name}, now {_shown(value)} is "
                    "asked for; give another folder, or make the store again"
                )


@dataclass
class Manifest:
    """The store's `manifest.json`; `shards` maps a shard's index to its size in bytes and checksum."""

    identity: StoreIdentity
    num_rows: int
    num_tokens: int
    shard_tokens: int
    shards: dict[int, tuple[int, str]] = field(default_factory=dict)

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
        names = [item.name for item in fields(StoreIdentity)]
        missing = [key for key in [*names, "num_rows", "num_tokens", "shard_tokens", "shards"] if key not in data]
        if missing or data["prenorm"] is not True:
            what = f"lacks {', '.join(missing)}" if missing else f"says prenorm {data['prenorm']!r}, expected true"
            raise StoreError(f"{path} {what}; make the store again")
        values = {name: data[name] for name in names}
        identity = StoreIdentity(**{**values, "aux_layer_ids": tuple(values["aux_layer_ids"])})
        shards = {int(index): (entry["bytes"], entry["sha256"]) for index, entry in data["shards"].items()}
        return cls(identity, data["num_rows"], data["num_tokens"], data["shard_tokens"], shards)

    def write(self, directory: Path) -> None:
        """Write it atomically."""
        data = {
            "format_version": FORMAT_VERSION,
            **asdict(self.identity),
            "layer_ids": self.identity.layer_ids,
            "num_rows": self.num_rows,
            "num_tokens": self.num_tokens,
            "shard_tokens": self.shard_tokens,
            "shards": {str(i): {"bytes": size, "sha256": sha} for i, (size, sha) in sorted(self.shards.items())},
        }
        write_bytes(directory / MANIFEST, (json.dumps(data, indent=1) + "\n").encode())


class HiddenStatesStore:
    """A finished store: `store[i]` is a `Sample` read through memory mapping, `lengths` are known without reading."""

    def __init__(self, directory: Path, manifest: Manifest, layout: RowLayout) -> None:
        self.directory = directory
        self.identity = manifest.identity
        self._layout = layout
        self._files = TensorFiles(directory)

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        verifier_fingerprint: str | None = None,
        aux_layer_ids: Sequence[int] | None = None,
        template_hash: str | None = None,
        verify: bool = False,
    ) -> HiddenStatesStore:
        """Open a store for reading; what is given must be what it was made for.

        `verify` compares every shard's checksum. StoreError where something differs (naming both sides), where
        extraction was not finished, or where a shard is missing or damaged.
        """
        directory = Path(directory)
        manifest = Manifest.read(directory)
        wanted = {
            "verifier_fingerprint": verifier_fingerprint,
            "aux_layer_ids": None if aux_layer_ids is None else tuple(aux_layer_ids),
            "template_hash": template_hash,
        }
        manifest.identity.require_same(wanted, directory)
        layout = _layout(directory, manifest)
        missing = [shard for shard in layout.shards if shard.number not in manifest.shards]
        if missing:
            rows = manifest.num_rows - sum(shard.last - shard.first for shard in missing)
            raise StoreError(
                f"{directory} is unfinished: {rows} of {manifest.num_rows} rows; run the extraction again to go on"
            )
        for index, (size, sha256) in manifest.shards.items():
            path = directory / shard_name(index)
            if not is_whole(path, size) or (verify and sha256_of(path) != sha256):
                raise StoreError(f"{path} is missing or damaged; run the extraction again, which replaces it")
        return cls(directory, manifest, layout)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row."""
        return self._layout.lengths

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self._layout.num_tokens

    def __len__(self) -> int:
        return len(self._layout.lengths)

    def __getitem__(self, row: int) -> Sample:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a store of {len(self)}")
        shard, start, end = self._layout.locate(row % len(self))
        name = shard_name(shard.number)
        states_TLH = self._files.slice(name, "hidden_states", start, end)
        return Sample(
            input_ids=self._files.slice(name, "token_ids", start, end),
            loss_mask=self._files.slice(name, "loss_mask", start, end),
            aux_hidden_states=states_TLH[:, : len(self.identity.aux_layer_ids)],
            last_hidden_states=states_TLH[:, -1],
        )


class StoreWriter:
    """Fills a store shard by shard; a context manager that keeps other writers out.

    Opening a folder with a store of equal identity goes on with it: shards that are not whole are written again.
    """

    def __init__(
        self,
        directory: str | Path,
        identity: StoreIdentity,
        lengths: Sequence[int],
        *,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        self.directory = Path(directory)
        self.identity = identity
        self._lengths = list(lengths)
        self._shard_tokens = max(1, shard_bytes // identity.bytes_per_token)
        self._lock = FileLock(self.directory / ".lock")

    def __enter__(self) -> Self:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise StoreError(f"{self.directory} is being written by another process; wait for it to end") from error
        except (OSError, NotImplementedError) as error:
            raise StoreError(f"{self.directory} cannot be written to: {error}") from error
        with ExitStack() as release_unless_begun:
            release_unless_begun.callback(self._lock.release)
            self._begin()
            release_unless_begun.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _begin(self) -> None:
        remove_partial_files(self.directory)
        if (self.directory / MANIFEST).exists():
            self._manifest = Manifest.read(self.directory)
            self._manifest.identity.require_same(asdict(self.identity), self.directory)
            self._layout = _layout(self.directory, self._manifest)
            for index, (size, _) in list(self._manifest.shards.items()):
                if not is_whole(self.directory / shard_name(index), size):
                    del self._manifest.shards[index]
        else:
            self._layout = RowLayout.plan(self._lengths, self._shard_tokens)
            self._manifest = Manifest(
                self.identity, len(self._lengths), self._layout.num_tokens, self._shard_tokens, {}
            )
        tokens = sum(shard.num_tokens for shard in self.missing)
        require_room(self.directory, tokens * self.identity.bytes_per_token, "the hidden-states store")
        if not (self.directory / MANIFEST).exists():
            write_lengths(self.directory, self._lengths)
            self._manifest.write(self.directory)

    @property
    def missing(self) -> list[Shard]:
        """Shards still to be written."""
        return [shard for shard in self._layout.shards if shard.number not in self._manifest.shards]

    @property
    def num_rows_done(self) -> int:
        """Rows in finished shards."""
        return len(self._layout.lengths) - sum(shard.last - shard.first for shard in self.missing)

    def write(
        self, shard: Shard, input_ids: Sequence[Tensor], loss_masks: Sequence[Tensor], states: Sequence[Tensor]
    ) -> None:
        """Write a shard's rows, in order: ids [T], masks [T] and states [T, layers, H], the last layer included.

        Raises StoreError for shapes that do not fit the layout and for a full disk; then nothing of the shard remains.
        """
        layers, width = len(self.identity.layer_ids), self.identity.hidden_size
        lengths = list(self._layout.lengths[shard.first : shard.last])
        got = [tuple(rows.shape) for rows in states]
        if got != [(length, layers, width) for length in lengths] or [len(ids) for ids in input_ids] != lengths:
            raise StoreError(
                f"shard {shard.number}: got states {got}, expected [T, {layers}, {width}] with T of {lengths}"
            )
        written = write_tensors(
            self.directory / shard_name(shard.number),
            {
                "hidden_states": torch.cat([rows.to(DTYPES[self.identity.dtype]) for rows in states]),
                "token_ids": torch.cat(list(input_ids)).long(),
                "loss_mask": torch.cat(list(loss_masks)).bool(),
                "row_offsets": self._layout.offsets(shard),
            },
        )
        self._manifest.shards[shard.number] = (written.num_bytes, written.sha256)
        self._manifest.write(self.directory)


def shard_name(index: int) -> str:
    """File name of a shard."""
    return f"shard-{index:05d}.safetensors"


def _layout(directory: Path, manifest: Manifest) -> RowLayout:
    layout = RowLayout.plan(read_lengths(directory), manifest.shard_tokens)
    if len(layout.lengths) != manifest.num_rows or layout.num_tokens != manifest.num_tokens:
        raise StoreError(
            f"{directory}: the manifest tells of {manifest.num_rows} rows with {manifest.num_tokens} tokens, the row "
            f"lengths of {len(layout.lengths)} with {layout.num_tokens}; make the store again"
        )
    return layout


def _shown(value: object) -> str:
    text = str(list(value) if isinstance(value, tuple) else value)
    return f"{text[:12]}..." if len(text) == 64 else text
