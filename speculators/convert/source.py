"""A checkpoint as somebody else has written it: its configuration, and its tensors one by one.

Names, shapes and dtypes are known without reading a number; a tensor is read when it is asked for, so that a draft of
many gigabytes passes through in pieces. Pickled files are read by torch's restricted reader alone.
"""

from __future__ import annotations

import os
import re
import struct
import warnings
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
from speculators.formats.checkpoint import INDEX, WEIGHTS, indexed_files, read_config, read_header, weight_files
from speculators.formats.faults import error_of, fault

PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_PICKLES = (".bin", ".pt", ".pth")
# What trainers leave beside weights.
TRAINING_STATE = re.compile(r"(training_args|optimizer|scheduler|rng_state|scaler)\w*\.(bin|pt|pth|safetensors)")
# What torch's reader raises over files that are damaged, or made to be; it checks little of what it reads.
_UNREADABLE = (
    UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError,
    AssertionError, ArithmeticError, struct.error,
)  # fmt: skip
# What torch's restricted reader puts before its reason, and lines that are none.
_REFUSAL, _ADVICE = "WeightsUnpickler error:", ("Weights only load failed", "Check the documentation", "(1)")
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
        _require_names(config, "architectures")
        files = _chosen(folder, weights)
        tensors: dict[str, SourceTensor] = {}
        for file, promised in files.items():
            found = {tensor.name: tensor for tensor in tensors_of(file)}
            _require_promised(file, promised, found)
            twice = next((name for name in found if name in tensors), None)
            if twice is not None:
                raise FormatError(f"{folder}: tensor {twice} is in two files; remove the stale one")
            tensors |= found
        if not tensors:
            raise FormatError(f"{folder}: no tensor is in {', '.join(file.name for file in files)}; fetch it again")
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


def _require_names(config: Mapping[str, Any], key: str) -> None:
    said = config.get(key)
    if said is not None and not (isinstance(said, list) and all(isinstance(name, str) for name in said)):
        raise FormatError(f"config.json: {key} is {said!r}; expected a list of names")


def _stripped(name: str, prefixes: Iterable[str]) -> str:
    found = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if found is None else _stripped(name.removeprefix(found), prefixes)


def _weight_like(folder: Path) -> list[Path]:
    found = [file for file in folder.iterdir() if file.suffix in (".safetensors", *_PICKLES) and file.is_file()]
    return sorted(found)


def _chosen(folder: Path, weights: str | None) -> Mapping[Path, frozenset[str] | None]:
    """The files of weights, each with the tensors that an index gives it (None: no index)."""
    if weights is not None:
        file = folder / weights
        if not file.is_file():
            there = ", ".join(path.name for path in _weight_like(folder)) or "none"
            raise FormatError(f"{folder} has no file {weights!r}; its weight files are {there}")
        return {file: None}
    if (folder / INDEX).is_file() or (folder / WEIGHTS).is_file():
        return weight_files(folder)
    if (folder / PICKLED_INDEX).is_file():
        return indexed_files(folder / PICKLED_INDEX, PICKLED)
    if (folder / PICKLED).is_file():
        return {folder / PICKLED: None}
    found = [file for file in _weight_like(folder) if not TRAINING_STATE.fullmatch(file.name)]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise FormatError(f"{folder}: weight files are {names}; expected {WEIGHTS} or {PICKLED}, or name one file")
    return {found[0]: None}


def _require_promised(file: Path, promised: Iterable[str] | None, found: Iterable[str]) -> None:
    absent = sorted(set(promised or ()) - set(found))
    if absent:
        text = f"the index puts {', '.join(absent[:5])} into {file.name}, which has none of the name; fetch both again"
        raise error_of([fault("broken-index", text)], file.parent)


def tensors_of(file: Path) -> list[SourceTensor]:
    """What a file of weights says about its tensors; FormatError where it is damaged, or no plain tensors."""
    found = _tensors_of(file)
    for tensor in found:
        # Names are shown to people; on a terminal others could pass for anything.
        if not tensor.name.isprintable() or not tensor.name.strip():
            raise FormatError(f"{file}: a tensor is called {tensor.name!r}; expected a name that can be printed")
    return found


def _tensors_of(file: Path) -> list[SourceTensor]:
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
    except _UNREADABLE as error:
        raise FormatError(
            f"{file}: cannot be read as plain tensors ({_why(error)}); whoever made it can save it as safetensors"
        ) from error


def _why(error: Exception) -> str:
    """What is wrong, of a text in which torch also tells how to run the code that is in a file."""
    lines = [line.rpartition(_REFUSAL)[2].strip() for line in str(error).splitlines()]
    told = next((line for line in lines if line and not line.startswith(_ADVICE)), type(error).__name__)
    return told.partition(". ")[0].removesuffix(".")


def _unpickled(file: Path) -> object:
    with warnings.catch_warnings():
        # What the restricted reader makes of another protocol is complete, or an error.
        warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
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
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_neg() or tensor.is_conj():
        kind = f"{tensor.layout}, on {tensor.device}".removeprefix("torch.")
        raise FormatError(f"{file}: {name} is no plain tensor ({kind}); whoever made it can save it as safetensors")
    if tensor.dtype not in DTYPE_OF_TORCH:
        raise FormatError(f"{file}: {name} is {tensor.dtype}; expected one of {', '.join(DTYPE_OF_TORCH.values())}")
    return DTYPE_OF_TORCH[tensor.dtype]
