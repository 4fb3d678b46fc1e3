"""The file of one request's hidden states: what it holds, written whole or not at all.

Only functions that handle tensors import torch.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators.errors import StoreError
from speculators.formats.checkpoint import DTYPE_NAMES, read_header
from speculators.formats.files import flush_folder
from speculators.formats.hidden_states_lock import PARTIAL, Flock, lock_partial

if TYPE_CHECKING:
    from torch import Tensor

FORMAT, VERSION = "speculators.hidden_states", "1"
_STORED = {name: key for key, name in DTYPE_NAMES.items()}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Content:
    """What a file will hold; `ready` returns when the tensors may be read, for copies under way from a device."""

    states_TAH: Tensor
    token_ids_T: Tensor
    layer_ids: tuple[int, ...]
    ready: Callable[[], None] | None = None


def check_content(path: Path, content: Content) -> None:
    import torch

    states, ids, layers = content.states_TAH, content.token_ids_T, content.layer_ids
    dtype = str(states.dtype).removeprefix("torch.")
    if states.dim() != 3 or dtype not in _STORED or states.device.type != "cpu":
        raise StoreError(
            f"{path}: hidden_states are {dtype} {list(states.shape)} on {states.device}; expected "
            f"{', '.join(_STORED)} [tokens, layers, hidden size] on the CPU"
        )
    if ids.dtype != torch.int64 or ids.shape != states.shape[:1] or ids.device.type != "cpu":
        raise StoreError(f"{path}: token_ids are {ids.dtype} {list(ids.shape)}; expected int64 [{states.shape[0]}]")
    if len(layers) != states.shape[1] or list(layers) != sorted(set(layers)) or (layers and layers[0] < 0):
        raise StoreError(f"{path}: layers {list(layers)} for {states.shape[1]} states a token; expected ascending ids")


def write_file(path: Path, content: Content, flock: Flock) -> None:
    """Write a whole file under another name and rename it; StoreError where that fails, and then nothing stays."""
    import torch

    # The ids come first: eight-byte numbers must lie at multiples of eight.
    tensors = {"token_ids": content.token_ids_T.contiguous(), "hidden_states": content.states_TAH.contiguous()}
    dtype = str(content.states_TAH.dtype).removeprefix("torch.")
    notes = {
        "format": FORMAT,
        "version": VERSION,
        "layer_ids": json.dumps(content.layer_ids),
        "dtype": dtype,
        "prenorm": "true",
    }
    header: dict[str, Any] = {"__metadata__": notes}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        stored = "I64" if name == "token_ids" else _STORED[dtype]
        header[name] = {"dtype": stored, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts = [memoryview(struct.pack("<Q", len(text)) + text)]
    parts += [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in tensors.values()]
    try:
        _write_parts(path, parts, flock)
    except OSError as error:
        hint = "; make room and ask again" if error.errno in _FULL else ""
        raise StoreError(f"{path} cannot be written: {error.strerror or error}{hint}") from error


def _write_parts(path: Path, parts: Sequence[memoryview], flock: Flock) -> None:
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}{PARTIAL}")
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o644)
        if lock_partial(descriptor, partial, flock):
            break
        os.close(descriptor)
    try:
        for part in parts:
            written = 0
            while written < len(part):
                written += os.write(descriptor, part[written:])
        os.fsync(descriptor)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    flush_folder(path.parent)


def require_tensors(file: Path) -> None:
    headers = read_header(file)
    if headers.keys() != {"hidden_states", "token_ids"}:
        raise StoreError(f"{file} holds {', '.join(sorted(headers)) or 'nothing'}; expected hidden_states, token_ids")
    states, ids = headers["hidden_states"], headers["token_ids"]
    if len(states.shape) != 3 or states.dtype not in DTYPE_NAMES or ids.dtype != "I64" or len(ids.shape) != 1:
        raise StoreError(
            f"{file}: hidden_states {states.dtype} {list(states.shape)}, token_ids {ids.dtype} {list(ids.shape)}; "
            "expected floats [tokens, layers, hidden size] and I64 [tokens]"
        )
    if states.shape[0] != ids.shape[0]:
        raise StoreError(f"{file}: states of {states.shape[0]} tokens, ids of {ids.shape[0]}; ask for it again")


def read_layer_ids(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """The layers that a file says it holds, ascending; None for a file of vLLM's own connector, which does not say.

    Raises StoreError where the file cannot be read, or says something else than this format's version 1.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stream:
            notes = stream.metadata() or {}
        if notes.get("format") != FORMAT:
            return None
        if notes.get("version") != VERSION or notes.get("prenorm") != "true":
            raise ValueError(
                f"version {notes.get('version')}, prenorm {notes.get('prenorm')}; expected {VERSION}, true"
            )
        return tuple(int(number) for number in json.loads(notes["layer_ids"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} does not say which layers it holds: {error}") from error
