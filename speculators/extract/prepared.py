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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from speculators.errors import DataError, StoreError, UsageError, VerifierError
from speculators.extract.conversations import Conversation, Row, TextRow, TokenRow
from speculators.extract.progress import RowProgress
from speculators.extract.shards import RowLayout, TensorFiles, read_lengths, write_bytes, write_lengths, write_tensors
from speculators.extract.tokenize import ChatTokenizer, EncodedRow, encode_text
from speculators.formats.vocab import DraftVocab

MANIFEST = "manifest.json"
TOKEN_COUNTS = "token_counts.safetensors"
DRAFT_VOCAB = "draft_vocab.safetensors"
FORMAT_VERSION = 1
FILE_TOKENS = 2**22
BAD_ROW = "bad row"
STATISTICS = (
    "read", "rows", "split", "cut", "skipped", "skipped_why", "faults", "lost_reasoning", "tokens", "supervised_tokens",
)  # fmt: skip
_NAMED_ROWS = 20


class PreparedData:
    """A prepared directory: `data[i]` is `(input_ids [T] int64, loss_mask [T] bool)`.

    `manifest` holds the counts: read (rows of the sources), rows (kept), split (conversations that became several
    rows), cut (kept, but shortened), skipped, skipped_why, lost_reasoning, tokens and supervised_tokens.
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

    @property
    def always_keep(self) -> set[int]:
        """Tokens that belong in a draft vocabulary whatever their count: ends of turns, tool markup, special tokens."""
        return set(self.manifest.get("always_keep", ()))

    def statistics(self) -> dict[str, Any]:
        """Counts of the manifest, the share of tokens that are learnt, and lengths of rows, as JSON values."""
        counts = {name: self.manifest.get(name) for name in STATISTICS}
        share = self.manifest["supervised_tokens"] / max(1, self.manifest["tokens"])
        lengths = sorted(self.lengths)
        marks = {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1]}
        found = {**counts, "supervised_share": round(share, 6), "row_tokens": marks}
        if (self.directory / DRAFT_VOCAB).is_file():
            vocab = read_draft_vocab(self.directory / DRAFT_VOCAB)
            coverage = round(vocab.coverage(self.token_counts), 6)
            found["draft_vocab"] = {"size": vocab.draft_size, "coverage": coverage}
        return found

    def __len__(self) -> int:
        return len(self._layout.lengths)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        shard, start, end = self._layout.locate(row)
        name = file_name(shard.number)
        ids = self._files.slice(name, "input_ids", start, end).long()
        return ids, self._files.slice(name, "loss_mask", start, end)

    def write_draft_vocab(self, draft_size: int) -> Path:
        """Choose the `draft_size` tokens learnt most often and write them as `draft_vocab.safetensors` (d2t, t2d)."""
        return write_draft_vocab(merged_draft_vocab([self], draft_size), self.directory / DRAFT_VOCAB)


def merged_draft_vocab(parts: Sequence[PreparedData], draft_size: int) -> DraftVocab:
    """Choose a draft vocabulary by the counts of one or several prepared directories together.

    Every part's `always_keep` is in it. StoreError where parts come from different tokenizers.
    """
    first = parts[0]
    for part in parts[1:]:
        hashes = [one.manifest["request"]["tokenizer_hash"] for one in (first, part)]
        if hashes[0] != hashes[1] or len(first.token_counts) != len(part.token_counts):
            raise StoreError(
                f"{first.directory} and {part.directory} were prepared with different tokenizers ({hashes[0][:12]}... "
                f"and {hashes[1][:12]}...); counts of the same tokens are expected"
            )
    keep = set().union(*(part.always_keep for part in parts))
    return DraftVocab.from_counts(merged_counts(parts), draft_size, keep)


def merged_counts(parts: Sequence[PreparedData]) -> Tensor:
    """How often each token of the verifier's vocabulary is learnt in all parts together, int64 [V]."""
    return torch.stack([part.token_counts for part in parts]).sum(0)


def write_draft_vocab(vocab: DraftVocab, path: Path) -> Path:
    """Write a map as `d2t` and `t2d`; the folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, {"d2t": vocab.d2t, "t2d": vocab.t2d})
    return path


def read_draft_vocab(path: str | Path) -> DraftVocab:
    """Read the map that `write_draft_vocab` wrote; FormatError where it is no such map."""
    return DraftVocab(_read(Path(path), "d2t"), _read(Path(path), "t2d"))


@dataclass
class RowEncoder:
    """Rows to ids and masks, counted: `max_length` tokens at most, ids within `vocab_size`.

    Rows with fewer than `minimum_valid_tokens` learnt tokens are skipped. `chat` may be the reason why the verifier's
    tokenizer cannot render conversations, which a row of tokens needs not; plain text needs `tokenizer` alone. Where
    `skip_bad` is set, a bad row is counted, not raised.
    """

    chat: ChatTokenizer | VerifierError
    vocab_size: int
    max_length: int
    tokenizer: PreTrainedTokenizerBase | None = None
    minimum_valid_tokens: int = 1
    skip_bad: bool = False
    read: int = 0
    split: int = 0
    cut: int = 0
    lost_reasoning: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    skipped_rows: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UsageError(f"max_length is {self.max_length}, expected 2 or more")
        if self.minimum_valid_tokens < 1:
            raise UsageError(f"minimum_valid_tokens is {self.minimum_valid_tokens}, expected 1 or more")

    def encode(self, row: Row) -> list[tuple[list[int], list[bool]]]:
        """Ids and masks of a row, shortened to `max_length`; none where nothing in it can be learnt.

        A token is learnt from the one before it, so a mask that is true at the first position alone teaches nothing.
        """
        self.read += 1
        try:
            encoded = self._encoded(row)
        except DataError as fault:
            self.fault(fault, row.row_id)
            return []
        kept = []
        for ids, mask, lost in encoded:
            learnt = sum(mask[1 : self.max_length])
            if learnt < self.minimum_valid_tokens:
                self._skip(row.row_id, self._why(row, mask, learnt))
                continue
            self.lost_reasoning += lost
            self.cut += len(ids) > self.max_length
            kept.append((ids[: self.max_length], mask[: self.max_length]))
        self.split += len(kept) > 1
        return kept

    def fault(self, fault: DataError, row_id: str | None = None) -> None:
        """Count a bad row, or raise it."""
        if not self.skip_bad:
            raise fault
        if row_id is None:
            self.read += 1
        if len(self.faults) < _NAMED_ROWS:
            self.faults.append(str(fault))
        self._skip(row_id, BAD_ROW)

    def _encoded(self, row: Row) -> list[EncodedRow]:
        if isinstance(row, TokenRow):
            if max(row.input_ids) >= self.vocab_size:
                raise row.where.fault(
                    f"token id {max(row.input_ids)} is outside the verifier's vocabulary of {self.vocab_size}; was the "
                    "row made with another tokenizer?"
                )
            return [EncodedRow(row.input_ids, row.loss_mask)]
        if isinstance(row, TextRow) and self.tokenizer is not None:
            return [encode_text(self.tokenizer, row)]
        if isinstance(self.chat, VerifierError):
            raise self.chat
        return [encode_text(self.chat.tokenizer, row)] if isinstance(row, TextRow) else self.chat.encode_rows(row)

    def _why(self, row: Row, mask: list[bool], learnt: int) -> str:
        if isinstance(row, Conversation) and not row.answers:
            return "no assistant message"
        if learnt:
            return f"fewer than {self.minimum_valid_tokens} tokens to learn"
        return f"nothing to learn within {self.max_length} tokens" if any(mask[1:]) else "nothing to learn"

    def _skip(self, row_id: str | None, why: str) -> None:
        self.skipped[why] += 1
        if row_id is not None and len(self.skipped_rows) < _NAMED_ROWS:
            self.skipped_rows.append(row_id)


def prepare_rows(
    rows: Iterable[Row],
    encoder: RowEncoder,
    directory: str | Path,
    request: dict[str, Any],
    *,
    always_keep: Iterable[int] = (),
    progress: bool = True,
) -> PreparedData:
    """Encode rows and write a prepared directory; `request` and the tokens to `always_keep` go into its manifest.

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
                for ids, mask in encoded:
                    files.add(ids, mask)
                bar.advance(1, sum(len(ids) for ids, _ in encoded))
        files.flush()
        if not files.lengths:
            raise DataError(
                f"none of the {encoder.read} rows has anything to learn within {encoder.max_length} tokens "
                f"({_listed(encoder.skipped)}); expected assistant messages, or true values in loss_mask (prompts "
                f"alone want regenerating first){''.join(f'; {fault}' for fault in encoder.faults[:1])}"
            )
        files.finish(encoder, request, always_keep)
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

    def finish(self, encoder: RowEncoder, request: dict[str, Any], always_keep: Iterable[int]) -> None:
        write_lengths(self.directory, self.lengths)
        write_tensors(self.directory / TOKEN_COUNTS, {"token_counts": self.counts_V})
        manifest = {
            "format_version": FORMAT_VERSION,
            "request": request,
            "read": encoder.read,
            "rows": len(self.lengths),
            "split": encoder.split,
            "cut": encoder.cut,
            "skipped": encoder.skipped.total(),
            "skipped_why": dict(encoder.skipped),
            "skipped_rows": encoder.skipped_rows,
            "faults": encoder.faults,
            "lost_reasoning": encoder.lost_reasoning,
            "tokens": sum(self.lengths),
            "supervised_tokens": int(self.counts_V.sum()),
            "vocab_size": encoder.vocab_size,
            "always_keep": sorted(always_keep),
            "rows_hash": self._digest.hexdigest(),
        }
        write_bytes(self.directory / MANIFEST, (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode())


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {why}" for why, number in counts.most_common()) or "no rows"


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
    except (SafetensorError, OSError, RuntimeError) as error:
        raise StoreError(f"{path} cannot be read: {error}; prepare the data again") from error
    return found
