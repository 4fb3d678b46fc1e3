"""Hidden states of many rows on disk: what a draft learns from.

A directory of shards, each a safetensors file with `hidden_states` [tokens, layers, H], `token_ids` int64 [tokens],
`loss_mask` bool [tokens] and `row_offsets` int64 [rows + 1], and a manifest that says which verifier, layers, chat
template and rows they come from. Layers ascend; the last one is the verifier's output before its final norm. Where the
others are quantised, `hidden_states` has the last alone, `aux_hidden_states` and `aux_scales` the rest (`quantise`). A
shard is the unit of resumption, and of sharing the work: it exists whole, with its checksum in the manifest, or not at
all.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from speculators.errors import StoreError
from speculators.extract.manifest import (
    DTYPES,
    MANIFEST,
    FinishedShard,
    Manifest,
    StoreIdentity,
    manifest_lock,
    shard_name,
)
from speculators.extract.quantised import dequantise, quantise
from speculators.extract.shards import (
    RowLayout,
    Shard,
    TensorFiles,
    is_whole,
    read_lengths,
    remove_partial_files,
    require_room,
    sha256_of,
    write_lengths,
    write_tensors,
)
from speculators.models.draft_model import Sample

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "DTYPES",
    "MANIFEST",
    "HiddenStatesStore",
    "Manifest",
    "StoreEstimate",
    "StoreIdentity",
    "StoreWriter",
    "WorkShare",
    "damaged_shards",
    "read_layout",
    "shard_name",
]

DEFAULT_SHARD_BYTES = 256 * 2**20
_AUX, _SCALES = "aux_hidden_states", "aux_scales"


@dataclass(frozen=True)
class StoreEstimate:
    """What a store will take, told before it is made: bytes, of which `num_bytes_missing` are still to be written."""

    num_rows: int
    num_tokens: int
    bytes_per_token: int
    num_bytes_missing: int
    num_bytes_free: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole store."""
        return self.num_tokens * self.bytes_per_token

    def __str__(self) -> str:
        gib = 2**30
        return (
            f"{self.num_rows} rows, {self.num_tokens} tokens of {self.bytes_per_token} bytes: "
            f"{self.num_bytes / gib:.2f} GiB, {self.num_bytes_missing / gib:.2f} GiB to write, "
            f"{self.num_bytes_free / gib:.2f} GiB free"
        )


@dataclass(frozen=True)
class WorkShare:
    """Which shards one of several processes writes: every `world_size`-th, from `rank` on."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise StoreError(f"rank {self.rank} of {self.world_size} processes: expected 0..{self.world_size - 1}")


class HiddenStatesStore:
    """A finished store: `store[i]` is a `Sample` read through memory mapping, `lengths` are known without reading."""

    def __init__(
        self, directory: Path, manifest: Manifest, layout: RowLayout, aux_layer_ids: Sequence[int] | None = None
    ) -> None:
        self.directory = directory
        self.identity = manifest.identity
        self._layout = layout
        skipped = set(manifest.skipped_rows)
        self._rows = [row for row in range(len(layout.lengths)) if row not in skipped]
        self._lengths = [layout.lengths[row] for row in self._rows]
        stored = manifest.identity.layer_ids
        asked = manifest.identity.aux_layer_ids if aux_layer_ids is None else aux_layer_ids
        places = [stored.index(layer) for layer in asked]
        first = places[0] if places else 0
        neighbours = slice(first, first + len(places))
        # A slice reads through the mapping without a copy.
        self._aux = neighbours if places == list(range(neighbours.start, neighbours.stop)) else places
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

        `aux_layer_ids` may be some of the stored layers: samples then have these. `verify` compares every shard's
        checksum. StoreError where something differs (naming both sides), where extraction was not finished, or where a
        shard is missing or damaged.
        """
        directory = Path(directory)
        manifest = Manifest.read(directory)
        identity = manifest.identity
        wanted = {"verifier_fingerprint": verifier_fingerprint, "template_hash": template_hash}
        identity.require_same({key: value for key, value in wanted.items() if value is not None}, directory)
        if aux_layer_ids is not None and not set(aux_layer_ids) <= set(identity.layer_ids):
            identity.require_same({"aux_layer_ids": tuple(aux_layer_ids)}, directory)
        layout = read_layout(directory, manifest)
        missing = [shard for shard in layout.shards if shard.number not in manifest.shards]
        if missing:
            rows = manifest.num_rows - sum(shard.last - shard.first for shard in missing)
            raise StoreError(
                f"{directory} is unfinished: {rows} of {manifest.num_rows} rows; run the extraction again to go on"
            )
        damaged = damaged_shards(directory, manifest, checksums=verify)
        if damaged:
            others = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
            raise StoreError(f"{damaged[0]} is missing or damaged{others}; run the extraction again, which replaces it")
        return cls(directory, manifest, layout, aux_layer_ids)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row."""
        return self._lengths

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self._lengths)

    @property
    def num_skipped(self) -> int:
        """Rows that no states could be had for; they are not among the samples."""
        return len(self._layout.lengths) - len(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Sample:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a store of {len(self)}")
        shard, start, end = self._layout.locate(self._rows[row])
        name = shard_name(shard.number)
        states_TLH = self._files.slice(name, "hidden_states", start, end)
        if self.identity.aux_dtype is not None:
            numbers, scales = (self._files.slice(name, key, start, end) for key in (_AUX, _SCALES))
            states_TLH = torch.cat([dequantise(numbers, scales, states_TLH.dtype), states_TLH], 1)
        return Sample(
            input_ids=self._files.slice(name, "token_ids", start, end),
            loss_mask=self._files.slice(name, "loss_mask", start, end),
            aux_hidden_states=states_TLH[:, self._aux],
            last_hidden_states=states_TLH[:, -1],
        )


class StoreWriter:
    """Fills a store shard by shard; a context manager that keeps out other writers of the same shards.

    Opening a folder with a store of equal identity goes on with it: shards that are not whole are written again.
    """

    def __init__(
        self,
        directory: str | Path,
        identity: StoreIdentity,
        lengths: Sequence[int],
        *,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        share: WorkShare | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.identity = identity
        self._lengths = list(lengths)
        self._shard_tokens = max(1, shard_bytes // identity.bytes_per_token)
        self._share = share or WorkShare()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                alone = self._share.world_size == 1
                self._hold(stack, ".lock", fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
                if not alone:
                    self._hold(stack, f".lock-{self._share.rank}", fcntl.LOCK_EX)
            except BlockingIOError as error:
                raise StoreError(f"{self.directory} is being written by another process; wait for it to end") from error
            except OSError as error:
                raise StoreError(f"{self.directory} cannot be written to: {error}") from error
            with manifest_lock(self.directory):
                self._begin()
            self._held = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _hold(self, stack: ExitStack, name: str, kind: int) -> None:
        descriptor = os.open(self.directory / name, os.O_RDWR | os.O_CREAT, 0o644)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)

    def _begin(self) -> None:
        exists = (self.directory / MANIFEST).exists()
        if exists:
            self._manifest = Manifest.read(self.directory)
            self._manifest.identity.require_same(asdict(self.identity), self.directory)
            self._layout = read_layout(self.directory, self._manifest)
            for number, shard in list(self._manifest.shards.items()):
                if not is_whole(self.directory / shard.file, shard.num_bytes):
                    del self._manifest.shards[number]
        else:
            self._layout = RowLayout.plan(self._lengths, self._shard_tokens)
            self._manifest = Manifest(self.identity, len(self._lengths), self._layout.num_tokens, self._shard_tokens)
        for mine in self._layout.shards[self._share.rank :: self._share.world_size]:
            remove_partial_files(self.directory, shard_name(mine.number))
        remove_partial_files(self.directory, MANIFEST)
        # What every process together still writes has to fit.
        require_room(self.directory, self.estimate.num_bytes_missing, "the hidden-states store")
        if not exists:
            write_lengths(self.directory, self._lengths)
            self._manifest.write(self.directory)

    @property
    def dtype(self) -> torch.dtype:
        """What states are rounded to."""
        return DTYPES[self.identity.dtype]

    @property
    def estimate(self) -> StoreEstimate:
        """What the store takes, all processes together."""
        tokens = sum(shard.num_tokens for shard in self._unfinished)
        size = self.identity.bytes_per_token
        return StoreEstimate(
            self._manifest.num_rows,
            self._manifest.num_tokens,
            size,
            tokens * size,
            shutil.disk_usage(self.directory).free,
        )

    @property
    def missing(self) -> list[Shard]:
        """Shards still to be written by this process."""
        return [shard for shard in self._unfinished if shard.number % self._share.world_size == self._share.rank]

    @property
    def num_rows(self) -> int:
        """Rows that are this process's to write, written already or not."""
        mine = self._layout.shards[self._share.rank :: self._share.world_size]
        return sum(shard.last - shard.first for shard in mine)

    @property
    def num_rows_done(self) -> int:
        """Rows of this process in finished shards."""
        return self.num_rows - sum(shard.last - shard.first for shard in self.missing)

    @property
    def _unfinished(self) -> list[Shard]:
        return [shard for shard in self._layout.shards if shard.number not in self._manifest.shards]

    def write(
        self,
        shard: Shard,
        input_ids: Sequence[Tensor],
        loss_masks: Sequence[Tensor],
        states: Sequence[Tensor],
        *,
        skipped: Collection[int] = (),
    ) -> None:
        """Write a shard's rows, in order: ids [T], masks [T] and states [T, layers, H], the last layer included.

        `skipped` are places within the shard of rows without states, which are given zeros. Raises StoreError for
        shapes that do not fit the layout and for a full disk; then nothing of the shard remains.
        """
        layers, width = len(self.identity.layer_ids), self.identity.hidden_size
        lengths = list(self._layout.lengths[shard.first : shard.last])
        got = [tuple(rows.shape) for rows in states]
        if got != [(length, layers, width) for length in lengths] or [len(ids) for ids in input_ids] != lengths:
            raise StoreError(
                f"shard {shard.number}: got states {got}, expected [T, {layers}, {width}] with T of {lengths}"
            )
        file = shard_name(shard.number)
        written = write_tensors(
            self.directory / file,
            {
                **_stored_states(torch.cat([rows.to(self.dtype) for rows in states]), self.identity),
                "token_ids": torch.cat(list(input_ids)).long(),
                "loss_mask": torch.cat(list(loss_masks)).bool(),
                "row_offsets": self._layout.offsets(shard),
            },
        )
        finished = FinishedShard(file, written.num_bytes, written.sha256, len(lengths), sum(lengths))
        with manifest_lock(self.directory):
            # Others have written shards of theirs since.
            manifest = Manifest.read(self.directory)
            manifest.shards[shard.number] = finished
            kept = [row for row in manifest.skipped_rows if not shard.first <= row < shard.last]
            manifest.skipped_rows = sorted([*kept, *(shard.first + place for place in skipped)])
            manifest.write(self.directory)
        self._manifest.shards[shard.number] = finished


def _stored_states(states_TLH: Tensor, identity: StoreIdentity) -> dict[str, Tensor]:
    if identity.aux_dtype is None:
        return {"hidden_states": states_TLH}
    numbers, scales = quantise(states_TLH[:, :-1], identity.aux_dtype)
    return {"hidden_states": states_TLH[:, -1:].contiguous(), _AUX: numbers, _SCALES: scales}


def damaged_shards(directory: Path, manifest: Manifest, *, checksums: bool) -> list[Path]:
    """Finished shards that are not there, not whole or, with `checksums`, not what was written."""
    found = []
    for shard in manifest.shards.values():
        path = directory / shard.file
        if not is_whole(path, shard.num_bytes) or (checksums and sha256_of(path) != shard.sha256):
            found.append(path)
    return found


def read_layout(directory: Path, manifest: Manifest) -> RowLayout:
    """Which row lies in which shard; StoreError where the manifest and the rows' lengths disagree."""
    layout = RowLayout.plan(read_lengths(directory), manifest.shard_tokens)
    if len(layout.lengths) != manifest.num_rows or layout.num_tokens != manifest.num_tokens:
        raise StoreError(
            f"{directory}: the manifest tells of {manifest.num_rows} rows with {manifest.num_tokens} tokens, the row "
            f"lengths of {len(layout.lengths)} with {layout.num_tokens}; make the store again"
        )
    return layout
