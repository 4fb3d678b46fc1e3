"""A planned checkpoint on disk, tensor by tensor: the whole of it appears in one rename, or nothing does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch

from speculators.convert.plan import CheckpointPlan, PlannedTensor
from speculators.convert.source import DTYPE_OF_TORCH
from speculators.errors import FormatError, SpeculatorsError
from speculators.formats.checkpoint import CONFIG, ITEM_SIZE, WEIGHTS
from speculators.formats.files import flush, flush_folder, staging_folder, write_text

# The header's length is padded to it, so that tensors are aligned.
_ALIGNMENT = 8


def require_new(target: Path) -> None:
    """Raise FormatError where something of the name is there already, which is never written over."""
    if os.path.lexists(target):
        raise FormatError(f"{target} is there already; give a new directory")


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into, which takes its name at the end; on an error it is removed.

    FormatError where `target` is there already, SpeculatorsError where the disk refuses.
    """
    require_new(target)
    try:
        with staging_folder(target) as staging:
            yield staging
            flush_folder(staging)
            staging.rename(target)
            flush_folder(target.parent)
    except OSError as error:
        text = f"{target}: the checkpoint could not be written: {error}; free space or choose another place"
        raise SpeculatorsError(text) from error


def write_plan(plan: CheckpointPlan, folder: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Write a plan's files into an empty folder; `progress` is told the bytes of each tensor as it is written."""
    shards: dict[str, dict[str, PlannedTensor]] = {}
    for name, tensor in plan.tensors.items():
        shards.setdefault(plan.shards.get(name, WEIGHTS), {})[name] = tensor
    for shard, tensors in shards.items():
        write_tensors(folder / shard, tensors, progress)
    for file in plan.copies:
        shutil.copyfile(file, folder / file.name)
    for file in plan.links:
        _link_or_copy(file, folder / file.name)
    taken = {file.name for file in (*plan.copies, *plan.links)}
    for name, content in {CONFIG: plan.config, **plan.files}.items():
        if name not in taken:
            write_text(folder / name, _json(content))


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"


def write_tensors(
    file: Path, tensors: Mapping[str, PlannedTensor], progress: Callable[[int], None] = lambda _: None
) -> None:
    """Write a safetensors file while holding one tensor at a time; FormatError where one is not what was planned.

    Tensors are aligned by writing the widest dtypes first, as the format's own writer does.
    """
    order = sorted(tensors, key=lambda name: (-ITEM_SIZE[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in order:
        tensor = tensors[name]
        size = prod(tensor.shape) * ITEM_SIZE[tensor.dtype]
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for part in tensors[name].parts or (tensors[name],):
                progress(stream.write(_bytes_of(name, part)))
    flush(file)


def _bytes_of(name: str, planned: PlannedTensor) -> memoryview:
    made = planned.make()
    got = DTYPE_OF_TORCH.get(made.dtype), tuple(made.shape)
    if got != (planned.dtype, planned.shape):
        raise FormatError(f"{name} came out as {got[0]} {list(got[1])}; planned was {planned.dtype} {planned.shape}")
    return made.contiguous().flatten().view(torch.uint8).numpy().data
