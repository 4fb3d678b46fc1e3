"""Prepared data: rows of token ids and loss masks, ready for extraction.

A directory with `rows-*.safetensors` (`input_ids` int32 and `loss_mask` bool over all tokens of several rows),
`row_lengths.safetensors`, `token_counts.safetensors` (`token_counts` int64 [V]: how often each token is learnt) and a
manifest. It appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speculators.errors import DataError, StoreError, UsageError, VerifierError
from speculators.extract.conversations import Row, TokenRow
from speculators.extract.progress import RowProgress
from speculators.extract.shards import RowLayout, TensorFiles, read_lengths, write_bytes, write_lengths, write_tensors
from speculators.extract.tokenize import ChatTokenizer
from speculators.formats.vocab import DraftVocab

MANIFEST = "manifest.json"
TOKEN_COUNTS = "token_counts.safetensors"
DRAFT_VOCAB = "draft_vocab.safetensors"
FORMAT_VERSION = 1
FILE_TOKENS = 2**22
_NAMED_ROWS = 20


class PreparedData:
    """A prepared directory: `data[i]` is `(input_ids [T] int64, loss_mask [T] bool)`.

    `manifest` holds the counts: rows (kept), cut (kept, but shortened), skipped (nothing to learn), tokens and
    supervised_tokens.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        path = self.directory / MANIFEST
        try:
            self.manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.directory} holds no prepared data: {MANIFEST} cannot be read ({error})") from error
        if self.manifest.get("format_version") != FORMAT_VERSION:
            got = self.manifest.get("format_version")
            raise StoreError(f"{path} has format_version {got!r}, expected {FORMAT_VERSION}; prepare the data again")
        self._layout = RowLayout.plan(read_lengths(self.directory), FILE_TOKENS)
        self._files = TensorFiles(self.directory)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row."""
        return self._layout.lengths

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self._layout.num_tokens

    @property
    def rows_hash(self) -> str:
        """SHA-256 over all ids and masks."""
        return str(self.manifest["rows_hash"])

    @property
    def template_hash(self) -> str:
        """Hash of tokenizer, chat template and its options."""
        return str(self.manifest["request"]["template_hash"])

    @property
    def token_counts(self) -> Tensor:
        """How often each token of the verifier's vocabulary is learnt, int64 [V]."""
        return _read(self.directory / TOKEN_COUNTS, "token_counts")

    def __len__(self) -> int:
        return len(self._layout.lengths)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        shard, start, end = self._layout.locate(row)
        name = file_name(shard.number)
        ids = self._files.slice(name, "input_ids", start, end).long()
        return ids, self._files.slice(name, "loss_mask", start, end)

    def write_draft_vocab(self, draft_size: int, always_keep: Iterable[int] = ()) -> Path:
        """Choose the `draft_size` tokens learnt most often and write them as `draft_vocab.safetensors` (d2t, t2d)."""
        vocab = DraftVocab.from_counts(self.token_counts, draft_size, always_keep)
        path = self.directory / DRAFT_VOCAB
        write_tensors(path, {"d2t": vocab.d2t, "t2d": vocab.t2d})
        return path


def read_draft_vocab(path: str | Path) -> DraftVocab:
    """Read the map that `write_draft_vocab` wrote; FormatError where it is no such map."""
    return DraftVocab(_read(Path(path), "d2t"), _read(Path(path), "t2d"))


@dataclass
class RowEncoder:
    """Rows to ids and masks, counted: `max_length` tokens at most, ids within `vocab_size`.

    `chat` may be the reason why the verifier's tokenizer cannot render conversations, which a row of tokens needs not.
    """

    chat: ChatTokenizer | VerifierError
    vocab_size: int
    max_length: int
    cut: int = 0
    skipped: int = 0
    skipped_rows: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UsageError(f"max_length is {self.max_length}, expected 2 or more")

    def encode(self, row: Row) -> tuple[list[int], list[bool]] | None:
        """Ids and mask of a row, shortened to `max_length`; None where nothing in it can be learnt.

        A token is learnt from the one before it, so a mask that is true at the first position alone teaches nothing.
        """
        if isinstance(row, TokenRow):
            ids, mask = row.input_ids, row.loss_mask
            if max(ids) >= self.vocab_size:
                raise row.where.fault(
                    f"token id {max(ids)} is outside the verifier's vocabulary of {self.vocab_size}; was the row made "
                    "with another tokenizer?"
                )
        elif isinstance(self.chat, VerifierError):
            raise self.chat
        else:
            ids, mask = self.chat.encode(row)
        if not any(mask[1 : self.max_length]):
            self.skipped += 1
            if len(self.skipped_rows) < _NAMED_ROWS:
                self.skipped_rows.append(row.row_id)
            return None
        self.cut += len(ids) > self.max_length
        return ids[: self.max_length], mask[: self.max_length]


def prepare_rows(
    rows: Iterable[Row], encoder: RowEncoder, directory: str | Path, request: dict[str, Any], *, progress: bool = True
) -> PreparedData:
    """Encode rows and write a prepared directory; `request` is kept in its manifest.

    An existing prepared directory is replaced once the new one is complete. DataError for a bad row and where no row
    has anything to learn.
    """
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as staging:
        target = Path(staging) / "prepared"
        target.mkdir()
        files = _RowFiles(target, encoder.vocab_size)
        with RowProgress("prepare", None, enabled=progress) as bar:
            for row in rows:
                encoded = encoder.encode(row)
                if encoded is not None:
                    files.add(*encoded)
                bar.advance(1, len(encoded[0]) if encoded else 0)
        files.flush()
        if not files.lengths:
            raise DataError(
                f"none of the {encoder.skipped} rows has anything to learn within {encoder.max_length} tokens; "
                "expected assistant messages, or true values in loss_mask (prompts alone want regenerating first)"
            )
        files.finish(encoder, request)
        _replace_directory(target, directory)
    return PreparedData(directory)


class _RowFiles:
    def __init__(self, directory: Path, vocab_size: int) -> None:
        self.directory = directory
        self.lengths: list[int] = []
        self.counts_V = torch.zeros(vocab_size, dtype=torch.int64)
        self._ids: list[int] = []
        self._mask: list[bool] = []
        self._digest = hashlib.sha256()
        self._num_files = 0

    def add(self, ids: list[int], mask: list[bool]) -> None:
        if self._ids and len(self._ids) + len(ids) > FILE_TOKENS:
            self.flush()
        self._ids += ids
        self._mask += mask
        self.lengths.append(len(ids))
        self._digest.update(f"{len(ids)} ".encode())

    def flush(self) -> None:
        if not self._ids:
            return
        ids, mask = torch.tensor(self._ids, dtype=torch.int32), torch.tensor(self._mask)
        self.counts_V += ids[mask].bincount(minlength=len(self.counts_V))
        written = write_tensors(self.directory / file_name(self._num_files), {"input_ids": ids, "loss_mask": mask})
        self._digest.update(written.sha256.encode())
        self._num_files += 1
        self._ids, self._mask = [], []

    def finish(self, encoder: RowEncoder, request: dict[str, Any]) -> None:
        write_lengths(self.directory, self.lengths)
        write_tensors(self.directory / TOKEN_COUNTS, {"token_counts": self.counts_V})
        manifest = {
            "format_version": FORMAT_VERSION,
            "request": request,
            "rows": len(self.lengths),
            "cut": encoder.cut,
            "skipped": encoder.skipped,
            "skipped_rows": encoder.skipped_rows,
            "tokens": sum(self.lengths),
            "supervised_tokens": int(self.counts_V.sum()),
            "vocab_size": encoder.vocab_size,
            "rows_hash": self._digest.hexdigest(),
        }
        write_bytes(self.directory / MANIFEST, (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode())


def file_name(index: int) -> str:
    """Name of the index-th file of rows."""
    return f"rows-{index:05d}.safetensors"


def _replace_directory(new: Path, directory: Path) -> None:
    if directory.exists():
        if not (directory / TOKEN_COUNTS).is_file() and any(directory.iterdir()):
            raise StoreError(f"{directory} holds other files than prepared data; give an empty or new folder")
        old = new.with_name("old")
        directory.rename(old)
        new.rename(directory)
        shutil.rmtree(old)
    else:
        new.rename(directory)


def _read(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            found: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} cannot be read: {error}; prepare the data again") from error
    return found
