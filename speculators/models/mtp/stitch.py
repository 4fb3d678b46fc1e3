"""A trained MTP block back in its verifier's checkpoint, under the names that engines read there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from speculators.errors import FormatError
from speculators.formats.checkpoint import DTYPE_NAMES, TensorHeader, read_headers
from speculators.formats.files import flush, flush_folder
from speculators.formats.mtp_names import find_layout
from speculators.models.mtp.config import MtpConfig
from speculators.models.mtp.native import to_native


def stitch(config: MtpConfig, tensors: Mapping[str, Tensor], verifier: Path, directory: Path) -> None:
    """Write a copy of a verifier's local checkpoint whose MTP block is that of a draft's `tensors`, by our names.

    Files that hold nothing of the block are hard links where that can be, else copies; in the others the block's
    values are replaced, in the dtype that they had. FormatError where `directory` exists, where the verifier has no
    such block, or one of other shapes or of quantised weights.
    """
    if directory.exists():
        raise FormatError(f"{directory} is there already; give a new folder")
    headers = read_headers(verifier)
    layout = find_layout(headers, config.transformer_layer_config.num_hidden_layers)
    if layout is None:
        raise FormatError(f"{verifier} has no MTP block to replace; expected the verifier that the draft was made for")
    required = {name for name, spec in config.expected_tensors().items() if spec.required}
    own = {name: tensor.detach().cpu() for name, tensor in tensors.items() if name in required}
    origins = layout.origins(headers)
    if origins.keys() != own.keys():
        others = ", ".join(sorted(origins.keys() ^ own.keys())[:5])
        raise FormatError(f"{verifier} and the draft disagree about {others}; expected the draft's own verifier")
    native = to_native(origins, own)
    _require_alike(native, headers, verifier)
    staging = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        _write_copy(native, headers, verifier, staging)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    flush_folder(directory.parent)


def _write_copy(native: dict[str, Tensor], headers: dict[str, TensorHeader], verifier: Path, staging: Path) -> None:
    changed = {headers[name].file.name for name in native}
    for file in sorted(path for path in verifier.iterdir() if path.is_file()):
        _link_or_copy(file, staging / file.name, link=file.name not in changed)
    for name, tensor in native.items():
        _overwrite(staging / headers[name].file.name, headers[name], tensor)
    for file_name in sorted(changed):
        flush(staging / file_name)
    flush_folder(staging)


def _require_alike(native: dict[str, Tensor], headers: dict[str, TensorHeader], verifier: Path) -> None:
    for name, tensor in native.items():
        header = headers[name]
        if header.shape != tuple(tensor.shape) or header.dtype not in DTYPE_NAMES:
            raise FormatError(
                f"{verifier}: {name} is {header.dtype} {list(header.shape)}; expected {' or '.join(DTYPE_NAMES)} "
                f"{list(tensor.shape)}"
            )


def _link_or_copy(source: Path, target: Path, *, link: bool) -> None:
    if link:
        try:
            os.link(source.resolve(), target)
            return
        except OSError:  # another file system, or one without hard links
            pass
    shutil.copyfile(source, target)


def _overwrite(file: Path, header: TensorHeader, tensor: Tensor) -> None:
    """Put a tensor's values over those that a file has at a header's bytes."""
    stored = tensor.to(getattr(torch, DTYPE_NAMES[header.dtype])).contiguous()
    with file.open("r+b") as stream:
        stream.seek(header.start)
        stream.write(stored.flatten().view(torch.uint8).numpy().tobytes())
