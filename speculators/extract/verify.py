"""Whether a store holds what was written to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from speculators.errors import StoreError
from speculators.extract.manifest import Manifest, manifest_lock
from speculators.extract.store import damaged_shards, read_layout


@dataclass(frozen=True)
class VerifiedStore:
    """What a store whose checksums are right holds."""

    shards: int
    rows: int
    tokens: int
    skipped: int

    def __str__(self) -> str:
        return f"{self.shards} shards, {self.rows} rows, {self.tokens} tokens, {self.skipped} skipped; checksums right"


def verify_store(directory: str | Path) -> VerifiedStore:
    """Compare the checksums of all shards.

    StoreError names what is damaged or missing; it is taken out of the manifest, so that the extraction, run again,
    writes it anew.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    layout = read_layout(directory, manifest)
    damaged = damaged_shards(directory, manifest, checksums=True)
    if damaged:
        with manifest_lock(directory):
            latest = Manifest.read(directory)
            for number, shard in list(latest.shards.items()):
                if directory / shard.file in damaged and shard == manifest.shards.get(number):
                    del latest.shards[number]
            latest.write(directory)
    missing = len(layout.shards) - len(manifest.shards)
    if damaged or missing:
        names = ", ".join(path.name for path in damaged) or "none"
        raise StoreError(
            f"{directory}: damaged: {names}; not written yet: {missing} of {len(layout.shards)} shards; run the "
            "extraction again, which writes them"
        )
    skipped = len(manifest.skipped_rows)
    return VerifiedStore(len(layout.shards), manifest.num_rows, manifest.num_tokens, skipped)
