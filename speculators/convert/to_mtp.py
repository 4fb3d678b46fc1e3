"""An MTP draft put back into its verifier: a copy of that whole checkpoint whose block is the draft's.

Files that hold nothing of the block are taken over as they are. In the others the block's tensors are the draft's,
under the names that engines read there, and every other tensor keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from speculators.convert.plan import CheckpointPlan, Ledger, PlannedTensor
from speculators.convert.source import SourceCheckpoint, SourceTensor, read_safetensor
from speculators.errors import FormatError
from speculators.formats.checkpoint import DTYPE_NAMES, TensorHeader, read_config, read_headers
from speculators.formats.config import SpeculatorConfig
from speculators.formats.faults import error_of, fault
from speculators.formats.hub import resolve
from speculators.formats.mtp_names import NativeLayout, Origin, find_layout
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.mtp.config import MtpConfig
from speculators.models.mtp.native import to_native

# What a draft may hold of its verifier, by its own names and by those of the verifier's weights.
_SHARED = {"embed_tokens.weight": "embed_tokens", "lm_head.weight": "lm_head"}
# Files that hold weights.
_CONTAINERS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def plan(speculator: SourceCheckpoint, config: SpeculatorConfig, layout: str) -> CheckpointPlan:
    """Account for every tensor of the draft; `config` says where its verifier is.

    FormatError where that has no such block, or one of other shapes or of quantised weights.
    """
    if not isinstance(config, MtpConfig):
        raise FormatError(
            f"verifiers have no {config.speculators_model_type} draft of their own that this one could replace; "
            "expected a draft that was made to be a part of its verifier"
        )
    verifier = resolve(config.verifier.name_or_path)
    headers, ledger = read_headers(verifier), Ledger(speculator)
    block = find_layout(headers, config.transformer_layer_config.num_hidden_layers)
    if block is None:
        raise FormatError(f"{verifier} has no MTP block to replace; expected the verifier that the draft was made for")
    _drop_shared(ledger, verifier)
    for name, tensor in _native(ledger, _origins(ledger, block, headers, verifier)).items():
        ledger.plan(name, _fitted(tensor, name, headers[name], verifier))
    _note_rounding(ledger, headers)
    files = {headers[name].file for name in ledger.planned}
    shards = {name: header.file.name for name, header in headers.items() if header.file in files}
    for name in shards.keys() - ledger.planned.keys():
        ledger.plan(name, _kept(name, headers[name]))
    links = _untouched(ledger, verifier, files, {header.file for header in headers.values()})
    return ledger.finish_foreign(layout, read_config(verifier), shards=shards, links=links)


def _drop_shared(ledger: Ledger, verifier: Path) -> None:
    """Leave out embeddings and head, having seen that they are the verifier's."""
    shared = {name: what for name, what in _SHARED.items() if ledger.has(name)}
    if not shared:
        return
    weights = load_verifier_weights(verifier)
    for name, what in shared.items():
        if not torch.equal(ledger.stored(name).read(), getattr(weights, what)):
            text = f"{name} is another than the {what} of {verifier}, which stays as it is"
            raise error_of([fault("unknown-tensor", text)], ledger.source.directory)
        ledger.drop(name, f"the same as the verifier's {what}, which stays as it is")


def _origins(
    ledger: Ledger, layout: NativeLayout, headers: Mapping[str, TensorHeader], verifier: Path
) -> dict[str, Origin]:
    """What each of the draft's tensors is made of in the verifier."""
    block = {name: header for name, header in headers.items() if name.startswith(layout.prefix)}
    narrow = next((name for name, header in block.items() if header.dtype not in DTYPE_NAMES), None)
    if narrow is not None:
        raise FormatError(
            f"{verifier}: the block's {narrow} is stored as {block[narrow].dtype}, quantised, and the draft's numbers "
            f"are not; give a copy of the verifier in {' or '.join(DTYPE_NAMES.values())}"
        )
    origins = layout.origins(headers)
    if origins.keys() != set(ledger.left):
        others = ", ".join(sorted(origins.keys() ^ set(ledger.left))[:5])
        raise FormatError(f"{verifier} and the draft disagree about {others}; expected the draft's own verifier")
    return origins


def _native(ledger: Ledger, origins: Mapping[str, Origin]) -> dict[str, PlannedTensor]:
    """Every native tensor, made of the draft's when its turn comes."""
    found: dict[str, PlannedTensor] = {}
    for name, origin in origins.items():
        stored = ledger.take(name)
        shapes = _shapes(name, origin, stored)
        for index, (native, shape) in enumerate(zip(origin.names, shapes, strict=True)):
            found[native] = PlannedTensor(shape, stored.dtype, partial(_part, name, origin, stored.read, index))
    return found


def _shapes(name: str, origin: Origin, stored: SourceTensor) -> list[tuple[int, ...]]:
    """Shapes of the native tensors; FormatError where the draft's does not come apart into them."""
    parts = to_native({name: origin}, {name: torch.empty(stored.shape, device="meta")})
    return [tuple(parts[native].shape) for native in origin.names]


def _part(name: str, origin: Origin, read: Callable[[], Tensor], index: int) -> Tensor:
    return to_native({name: origin}, {name: read()})[origin.names[index]]


def _fitted(tensor: PlannedTensor, name: str, header: TensorHeader, verifier: Path) -> PlannedTensor:
    """A native tensor in the dtype that it has in the verifier."""
    if header.shape != tensor.shape:
        text = f"{name} is {list(header.shape)} in {verifier}; the draft has {list(tensor.shape)}"
        raise error_of([fault("tensor-shape", text)], "MTP block")
    return tensor.stored_as(header.dtype)


def _note_rounding(ledger: Ledger, headers: Mapping[str, TensorHeader]) -> None:
    theirs = {headers[name].dtype for name in ledger.planned}
    mine = {tensor.dtype for tensor in ledger.source.tensors.values()} & DTYPE_NAMES.keys()
    if theirs != mine:
        said = [" and ".join(sorted(DTYPE_NAMES[dtype] for dtype in found)) for found in (mine, theirs)]
        ledger.note(f"the draft is stored in {said[0]} and its verifier's block in {said[1]}, which is what is written")


def _untouched(ledger: Ledger, verifier: Path, changed: set[Path], read: set[Path]) -> tuple[Path, ...]:
    """Files that are taken over as they are; weights in other containers, whose block is the old one, are not."""
    others = sorted(path for path in verifier.iterdir() if path.is_file() and path not in changed)
    stale = [path for path in others if path.suffix in _CONTAINERS and path not in read]
    kept = tuple(path for path in others if path not in stale)
    ledger.note(f"written anew: {', '.join(sorted(path.name for path in changed))}; as they were: {len(kept)} files")
    if stale:
        names = ", ".join(path.name for path in stale)
        ledger.note(f"left out, since its block would be the old one: {names}")
    return kept


def _kept(name: str, header: TensorHeader) -> PlannedTensor:
    return PlannedTensor(header.shape, header.dtype, partial(read_safetensor, header.file, name))
