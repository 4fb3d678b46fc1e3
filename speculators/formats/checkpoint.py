"""Reading and writing a directory of safetensors files so that every tensor, shape and dtype is accounted for.

What the safetensors format promises is checked here before anything relies on it: the header's length against the
file's, one entry per name, byte ranges that follow each other without hole or overlap. Only `load_tensors` and
`save_checkpoint` need torch, and import it when they are called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import isinf, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from speculators.errors import SpeculatorsError
from speculators.formats.config import TensorSpec
from speculators.formats.faults import Fault, error_of, fault
from speculators.formats.files import flush, flush_folder, staging_folder

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
_MAX_JSON_BYTES = 64 << 20
_MAX_JSON_DEPTH = 64

# where multimodal configurations keep that of their language model
LANGUAGE_PARTS = ("text_config", "llm_config", "language_config")

# bytes per element of each dtype name of the format
ITEM_SIZE: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
# which dtypes may store each kind of tensor that a TensorSpec asks for; an I32 is read, and widened, but never written
STORED_AS: dict[str, tuple[str, ...]] = {
    "float": ("BF16", "F16", "F32"), "float32": ("F32",), "int": ("I64", "I32"), "bool": ("BOOL",)
}  # fmt: skip
DTYPE_NAMES: dict[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class TensorHeader(NamedTuple):
    """What a file says about one tensor: dtype name of the format, shape, and the bytes [start, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the parsed `config.json`; FormatError F001 where it is absent, no JSON object, or says a key twice."""
    path = Path(directory) / CONFIG
    if not path.is_file():
        hint = "expected a directory" if not Path(directory).is_dir() else "the directory holds no speculator"
        raise error_of([fault("no-config", f"{CONFIG} is missing; {hint}")], directory)
    try:
        return read_json_object(path)
    except (ValueError, OSError) as error:
        raise error_of([fault("no-config", f"{CONFIG}: {error}")], directory) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a file as one strict JSON object; ValueError says why it is none (OSError where it cannot be read)."""
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ValueError(f"{path.stat().st_size} bytes; expected at most {_MAX_JSON_BYTES}")
    return _json_object(path.read_bytes())


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    if _is_deep(value):
        raise ValueError(f"nested too deeply; expected at most {_MAX_JSON_DEPTH} levels")
    return value


def _is_deep(value: object) -> bool:
    """Whether a parsed document has more levels than code that walks it recursively can follow."""
    level = [value]
    for _ in range(_MAX_JSON_DEPTH):
        inner: list[object] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} appears twice")
        found[key] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str, kind: str = "number") -> float:
    value = float(digits)
    if isinf(value):
        raise ValueError(f"{kind} {digits[:20]}{'...' * (len(digits) > 20)} is larger than any that is computed with")
    return value


def _whole(digits: str) -> int:
    _finite(digits, "integer")
    return int(digits)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a verifier's config that describes its language model, the whole where there is none."""
    nested = (config.get(key) for key in LANGUAGE_PARTS)
    return next((part for part in nested if isinstance(part, Mapping)), config)


def weight_files(directory: str | os.PathLike[str], *, partial: bool = False) -> dict[Path, frozenset[str] | None]:
    """Return the safetensors files of a directory, each with the tensor names that the index gives it (None: no index).

    With `partial`, files that the index names may be absent. FormatError F024 where there are none, F026 where the
    index is unreadable, names a file that is missing or lies elsewhere, or stands beside a single file as well, so that
    it is unclear which of them holds.
    """
    folder = Path(directory)
    single, index = folder / WEIGHTS, folder / INDEX
    if not index.is_file():
        if not single.is_file():
            other = next((file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)), None)
            hint = f"; convert {other} to safetensors" if other else ""
            raise error_of([fault("no-weights", f"neither {WEIGHTS} nor {INDEX} is there{hint}")], directory)
        return {single: None}
    return dict(indexed_files(index, WEIGHTS, partial=partial))


def indexed_files(index: Path, single: str, *, partial: bool = False) -> dict[Path, frozenset[str]]:
    """Return the files that an index names, each with the tensors that it is said to have.

    `single` is the file that the index takes the place of. The rest and errors as of `weight_files`.
    """
    folder = index.parent
    try:
        weight_map = read_json_object(index).get("weight_map")
    except (ValueError, OSError) as error:
        raise error_of([fault("broken-index", f"{index.name}: {error}")], folder) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise error_of([fault("broken-index", f"{index.name} has no weight_map of tensor names to file names")], folder)
    names: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            text = f"{index.name} puts {tensor} into {file!r}; expected a file name in this directory"
            raise error_of([fault("broken-index", text)], folder)
        names.setdefault(file, set()).add(tensor)
    missing = [file for file in sorted(names) if not partial and not (folder / file).is_file()]
    problems = [fault("broken-index", f"{file}, named by {index.name}, is missing; fetch it again") for file in missing]
    if (folder / single).is_file() and single not in names:
        text = f"both {single} and {index.name} are there; remove the one that is stale"
        problems.append(fault("broken-index", text))
    if problems:
        raise error_of(problems, folder)
    return {folder / file: frozenset(tensors) for file, tensors in sorted(names.items())}


def read_headers(directory: str | os.PathLike[str]) -> dict[str, TensorHeader]:
    """Return what the safetensors files of a directory say about their tensors; FormatError F024, F025 or F026."""
    return _headers_of(directory, weight_files(directory))


def read_present_headers(directory: str | os.PathLike[str]) -> tuple[dict[str, TensorHeader], dict[str, Path]]:
    """Return `read_headers` of the files that are there, and by tensor name the files that only the index knows.

    For readers of a few tensors of a large model.
    """
    files = weight_files(directory, partial=True)
    present = {file: named for file, named in files.items() if file.is_file()}
    absent = {name: file for file, named in files.items() if file not in present for name in named or ()}
    return _headers_of(directory, present), absent


def _headers_of(
    directory: str | os.PathLike[str], files: Mapping[Path, frozenset[str] | None]
) -> dict[str, TensorHeader]:
    found: dict[str, TensorHeader] = {}
    for file, named in files.items():
        headers = read_header(file)
        if named is not None and named != headers.keys():
            differing = ", ".join(sorted(named ^ headers.keys())[:5])
            text = f"{INDEX} and {file.name} disagree about the tensors {differing}; fetch both again"
            raise error_of([fault("broken-index", text)], directory)
        found |= headers
    return found


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Return the tensors of one safetensors file by name; FormatError F025 says what is wrong with a damaged one."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"truncated: {size} bytes, but its header ends at {8 + length}; copy or save it again")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes; expected at most {MAX_HEADER_BYTES}")
            entries = _json_object(stream.read(length))
        notes = entries.pop("__metadata__", {})
        if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
            raise ValueError("__metadata__: expected an object of strings")
        headers = {name: _tensor_header(name, entry, file, 8 + length) for name, entry in entries.items()}
        _check_layout(headers, 8 + length, size)
    except (ValueError, OSError) as error:
        raise error_of([fault("broken-weights", f"{file.name}: {error}")], file.parent) from None
    return headers


def _tensor_header(name: str, entry: object, file: Path, data_start: int) -> TensorHeader:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r}: expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise ValueError(f"tensor {name!r}: unknown dtype {dtype!r}")
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r}: shape and data_offsets must be lists of whole numbers")
    got, wanted = offsets[1] - offsets[0], prod(shape) * ITEM_SIZE[dtype]
    if got != wanted:
        raise ValueError(f"tensor {name!r}: {got} bytes for shape {shape} of {dtype}; expected {wanted}")
    return TensorHeader(dtype, tuple(shape), file, data_start + offsets[0], data_start + offsets[1])


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _check_layout(headers: Mapping[str, TensorHeader], data_start: int, size: int) -> None:
    position = data_start
    for name, header in sorted(headers.items(), key=lambda item: (item[1].start, item[1].end)):
        if header.start != position:
            kind = "overlaps the tensor before it" if header.start < position else "leaves a hole before it"
            raise ValueError(f"tensor {name!r} {kind}")
        position = header.end
    if size < position:
        raise ValueError(f"truncated: {size} bytes; expected {position} after its header; copy or save it again")
    if size > position:
        raise ValueError(f"{size - position} bytes too many after the last tensor")


def account_for(headers: Mapping[str, TensorHeader], expected: Mapping[str, TensorSpec]) -> Iterator[Fault]:
    """Yield a fault for every tensor that is missing, unknown, or of another shape or dtype than expected."""
    for name, spec in expected.items():
        if name not in headers:
            if spec.required:
                yield missing_tensor(name, spec)
            continue
        header, allowed = headers[name], STORED_AS[spec.kind]
        if header.shape != spec.shape:
            wide = name == "fc.weight" and header.shape[:1] == spec.shape[:1]
            hint = "; its width is the number of layer ids times the verifier's hidden size" if wide else ""
            text = f"{name} has shape {list(header.shape)}; expected {list(spec.shape)}{hint}"
            yield fault("fc-width" if wide else "tensor-shape", text)
        if header.dtype not in allowed:
            yield fault("tensor-dtype", f"{name} is stored as {header.dtype}; expected {' or '.join(allowed)}")
        elif spec.kind == "int" and header.dtype != allowed[0]:
            text = f"{name} is stored as {header.dtype}, which readers have to widen; write {allowed[0]}"
            yield fault("integer-width", text)
    for name in sorted(headers.keys() - expected.keys()):
        if name == "d2t":
            yield fault("d2t-at-full-vocabulary", "d2t is there although the draft vocabulary is whole; remove it")
        else:
            yield fault("unknown-tensor", f"{name} belongs to no part of the draft; engines refuse it; remove it")


def missing_tensor(name: str, spec: TensorSpec) -> Fault:
    """Return the fault of a tensor that is not there; the two that engines do not notice have codes of their own."""
    shape = f"expected shape {list(spec.shape)}"
    if name == "lm_head.weight":
        return fault("no-lm-head", f"{name} is missing ({shape}): the verifier's is not the draft's and is misread")
    if name == "d2t":
        return fault(
            "no-d2t", f"d2t is missing at a reduced vocabulary ({shape}); draft ids are read as the verifier's"
        )
    return fault("missing-tensor", f"{name} is missing ({shape}); engines would use uninitialised memory")


def load_tensors(directory: str | os.PathLike[str], expected: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Return every tensor of a directory, as stored (integers as int64), on the CPU.

    FormatError lists all that is missing, unknown or misshapen: nothing is returned unless everything is accounted for.
    Tensors that `expected` calls optional may be absent.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    headers = read_headers(directory)
    faults = [item for item in account_for(headers, expected) if item.level == "ERROR"]
    if faults:
        raise error_of(faults, directory)
    tensors: dict[str, Tensor] = {}
    for file in sorted({header.file for header in headers.values()}):
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise error_of([fault("broken-weights", f"{file.name}: {error}")], directory) from error
    return {name: tensor.long() if expected[name].kind == "int" else tensor for name, tensor in tensors.items()}


def stored_dtype(tensors: Mapping[str, Tensor]) -> str:
    """Return the one dtype of all float tensors, like "bfloat16"; FormatError F021 where they differ or none is."""
    floats = {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
    names = {name: str(dtype).removeprefix("torch.") for name, dtype in floats.items()}
    kinds = sorted(set(names.values()))
    if len(kinds) != 1 or kinds[0] not in DTYPE_NAMES.values():
        example = {kind: name for name, kind in names.items()}
        got = ", ".join(f"{kind} ({example[kind]})" for kind in kinds) or "absent"
        text = f"the float tensors are {got}; expected all of them to be one of {', '.join(DTYPE_NAMES.values())}"
        raise error_of([fault("tensor-dtype", text)], "checkpoint")
    return kinds[0]


def save_checkpoint(
    directory: str | os.PathLike[str],
    config_json: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, TensorSpec] | None = None,
) -> None:
    """Write `config.json` and `model.safetensors` so that no crash leaves a mixture of an old and a new checkpoint.

    Both are written and flushed beside `directory` first. A new directory then appears in one rename. In an existing
    one the weights are replaced, then the configuration; where the two configurations differ, the old one is removed
    before, so that a crash in between leaves a directory that every reader refuses. Files of other names stay. `dtype`
    is written as the tensors have it. Where `expected` is given, FormatError names what does not fit it. Raises
    SpeculatorsError where the disk refuses.
    """
    from safetensors import SafetensorError

    target = Path(directory)
    exact = {name for name, spec in (expected or {}).items() if spec.kind == "float32"}
    rounded = {name: tensor for name, tensor in tensors.items() if name not in exact}
    config = dict(config_json) | {"dtype": stored_dtype(rounded)}
    if config.get("model_type") is not None:
        raise error_of([fault("model-type", "a top-level model_type is never written; remove it")], directory)
    text = json.dumps(config, indent=2, sort_keys=True, allow_nan=False) + "\n"
    try:
        with staging_folder(target) as staging:
            _write_files(staging, text, tensors)
            if expected is not None:
                faults = list(account_for(read_headers(staging), expected))
                if faults:
                    raise error_of(faults, directory)
            _move_into_place(staging, target, text)
    except (OSError, SafetensorError) as error:
        text = f"{directory}: the checkpoint could not be written: {error}; free space or choose another place"
        raise SpeculatorsError(text) from error


def _write_files(staging: Path, config_text: str, tensors: Mapping[str, Tensor]) -> None:
    """Write both files of a checkpoint into an empty folder and flush them."""
    from safetensors.torch import save_file

    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        stored = tensor.detach().cpu().contiguous()
        storage = stored.untyped_storage().data_ptr()
        plain[name] = stored.clone() if storage in storages else stored
        storages.add(storage)
    save_file(plain, staging / WEIGHTS, metadata={"format": "pt"})
    (staging / CONFIG).write_text(config_text, encoding="utf-8")
    for file in (staging / WEIGHTS, staging / CONFIG):
        flush(file)
    flush_folder(staging)


def _move_into_place(staging: Path, target: Path, config_text: str) -> None:
    if not target.exists():
        staging.rename(target)
        flush_folder(target.parent)
        return
    stale = _stale_weights(target)
    config = target / CONFIG
    if config.is_file() and (stale or config.read_bytes() != config_text.encode()):
        config.unlink()
        flush_folder(target)
    for file in stale:
        file.unlink(missing_ok=True)
    os.replace(staging / WEIGHTS, target / WEIGHTS)
    flush_folder(target)
    os.replace(staging / CONFIG, config)
    flush_folder(target)


def _stale_weights(target: Path) -> list[Path]:
    """Return an older sharded checkpoint's index and shards, which a single file beside them would contradict."""
    index = target / INDEX
    if not index.is_file():
        return []
    return [index, *(file for file in target.glob("model-*-of-*.safetensors") if file.is_file())]
