"""A checkpoint as somebody else has written it: its configuration, and its tensors one by one.

Names, shapes and dtypes are known without reading a number; a tensor is read when it is asked for, so that a draft of
many gigabytes passes through in pieces. Pickled files are read by torch's restricted reader alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speculators.errors import FormatError
from speculators.formats.checkpoint import INDEX, WEIGHTS, read_config, read_header, weight_files

PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_PICKLES = (".bin", ".pt", ".pth")
# What trainers leave beside weights.
TRAINING_STATE = re.compile(r"(training_args|optimizer|scheduler|rng_state|scaler)\w*\.(bin|pt|pth|safetensors)")
# No weights, but what a producer says about them.
_SAYS = ("hf_quant_config.json",)

DTYPE_OF_TORCH = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
TORCH_OF_DTYPE = {name: dtype for dtype, name in DTYPE_OF_TORCH.items()}


@dataclass(frozen=True)
class SourceTensor:
    """One stored tensor: its name in the file, shape, dtype as safetensors calls it, and how to read it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor] = field(repr=False, compare=False)


@dataclass(frozen=True)
class SourceCheckpoint:
    """A directory's configuration and tensors by name.

    `side_files` may hold weights too, or say something about them, and are not among the tensors. `named` is the file
    that the user chose, if any.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]
    side_files: tuple[Path, ...] = ()
    named: str | None = None

    @classmethod
    def open(cls, directory: str | os.PathLike[str], weights: str | None = None) -> SourceCheckpoint:
        """Read configuration and headers of a local directory.

        Of its weights those that an index names are taken, else `model.safetensors`, else `pytorch_model.bin`, else the
        one file there is; `weights` names another file. FormatError where that leaves a choice, or a file is damaged.
        """
        folder = Path(directory)
        config = read_config(folder)
        files = _chosen(folder, weights)
        tensors: dict[str, SourceTensor] = {}
        for file in files:
            for tensor in tensors_of(file):
                if tensor.name in tensors:
                    raise FormatError(f"{folder}: tensor {tensor.name} is in two files; remove the stale one")
                tensors[tensor.name] = tensor
        aside = [file for file in _weight_like(folder) if file not in files]
        aside += [folder / name for name in _SAYS if (folder / name).is_file()]
        return cls(folder, config, tensors, tuple(aside), weights)

    def without_prefixes(self, *prefixes: str) -> SourceCheckpoint:
        """The same with these prefixes taken off names, over and over; FormatError where two names become one."""
        return self.renamed(lambda name: _stripped(name, prefixes))

    def renamed(self, known_as: Callable[[str], str]) -> SourceCheckpoint:
        """The same under the names that `known_as` gives; FormatError where two names become one."""
        named: dict[str, SourceTensor] = {}
        for name, tensor in self.tensors.items():
            short = known_as(name)
            if short in named:
                raise FormatError(
                    f"{self.directory}: tensors {named[short].name} and {tensor.name} are both {short} without the "
                    "prefixes of wrappers; remove the stale one"
                )
            named[short] = tensor
        return replace(self, tensors=named)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None where it is not there."""
        return self.tensors[name].shape if name in self.tensors else None


def _stripped(name: str, prefixes: Iterable[str]) -> str:
    found = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if found is None else _stripped(name.removeprefix(found), prefixes)


def _weight_like(folder: Path) -> list[Path]:
    found = [file for file in folder.iterdir() if file.suffix in (".safetensors", *_PICKLES) and file.is_file()]
    return sorted(found)


def _chosen(folder: Path, weights: str | None) -> list[Path]:
    if weights is not None:
        file = folder / weights
        if not file.is_file():
            there = ", ".join(path.name for path in _weight_like(folder)) or "none"
            raise FormatError(f"{folder} has no file {weights!r}; its weight files are {there}")
        return [file]
    if (folder / INDEX).is_file() or (folder / WEIGHTS).is_file():
        return list(weight_files(folder))
    if (folder / PICKLED_INDEX).is_file():
        return _indexed_pickles(folder)
    if (folder / PICKLED).is_file():
        return [folder / PICKLED]
    found = [file for file in _weight_like(folder) if not TRAINING_STATE.fullmatch(file.name)]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise FormatError(f"{folder}: weight files are {names}; expected {WEIGHTS} or {PICKLED}, or name one file")
    return found


def _indexed_pickles(folder: Path) -> list[Path]:
    try:
        names = json.loads((folder / PICKLED_INDEX).read_text("utf-8"))["weight_map"].values()
        files = sorted({folder / name for name in names})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{folder}: {PICKLED_INDEX} is unreadable ({error}); fetch it again") from error
    for file in files:
        if file.parent != folder or not file.is_file():
            raise FormatError(f"{folder}: {file.name}, named by {PICKLED_INDEX}, is missing; fetch it again")
    return files


def tensors_of(file: Path) -> list[SourceTensor]:
    """What a file of weights says about its tensors; FormatError where it is damaged, or no plain tensors."""
    if file.suffix == ".safetensors":
        headers = read_header(file)
        return [
            SourceTensor(name, header.shape, header.dtype, partial(read_safetensor, file, name))
            for name, header in headers.items()
        ]
    tensors = read_pickle(file)
    return [
        SourceTensor(name, tuple(tensor.shape), _dtype_name(tensor, name, file), partial(_one_of, file, name))
        for name, tensor in tensors.items()
    ]


def read_safetensor(file: Path, name: str) -> Tensor:
    """One tensor of a safetensors file, mapped where that can be; FormatError where the file is damaged."""
    try:
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise FormatError(f"{file}: {name} cannot be read ({error}); fetch the file again") from error
    return tensor


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a file that torch has pickled, by name, mapped where the file allows it.

    A state dict, or one below the key `state_dict` or `model`. FormatError for anything else, code above all.
    """
    loaded = load_pickle(file)
    for key in ("state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in loaded.items()
    ):
        raise FormatError(f"{file}: expected tensors by name, found {type(loaded).__name__}; give the weights' file")
    return dict(loaded)


def load_pickle(file: Path) -> object:
    """What torch's restricted reader makes of a file; FormatError where it holds anything but plain data."""
    try:
        return _unpickled(file)
    except (UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise FormatError(
            f"{file}: cannot be read as plain tensors ({str(error).splitlines()[0]}); whoever made it can save it as "
            "safetensors"
        ) from error


def _unpickled(file: Path) -> object:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        # Files from before torch 1.6 are no archives, which alone can be mapped.
        if "mmap can only be used" not in str(error):
            raise
    return torch.load(file, map_location="cpu", weights_only=True)


# One file at a time: old ones cannot be mapped and are held whole.
@lru_cache(maxsize=1)
def _kept(file: Path, _changed: int) -> dict[str, Tensor]:
    return read_pickle(file)


def _one_of(file: Path, name: str) -> Tensor:
    return _kept(file, file.stat().st_mtime_ns)[name]


def _dtype_name(tensor: Tensor, name: str, file: Path) -> str:
    if tensor.dtype not in DTYPE_OF_TORCH:
        raise FormatError(f"{file}: {name} is {tensor.dtype}; expected one of {', '.join(DTYPE_OF_TORCH.values())}")
    return DTYPE_OF_TORCH[tensor.dtype]
