"""Making our tensors of a verifier's native MTP tensors and back, as `formats.mtp_names` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from speculators.formats.faults import error_of, fault
from speculators.formats.mtp_names import Change, Origin, find_layouts
from speculators.formats.verifier_weights import VerifierTensors, VerifierWeights


def read_native(directory: Path, num_hidden_layers: int, weights: VerifierWeights, count: int = 1) -> dict[str, Tensor]:
    """The `count` MTP blocks of a verifier's checkpoint, by our names and as stored; empty where it has none.

    Of the files only the blocks' tensors are read, so that files with nothing of them may be absent. FormatError where
    there are fewer or more blocks, where one is not understood or not whole, or has an embedding or a head that is not
    the verifier's.
    """
    tensors = VerifierTensors(directory)
    found: dict[str, Tensor] = {}
    for layout in find_layouts(tensors.names, num_hidden_layers, count):
        for name, source in layout.repeats(tensors.names).items():
            if not torch.equal(tensors.read(name), getattr(weights, source)):
                text = f"{name} is another than the verifier's {source}, which a draft here shares with it"
                raise error_of([fault("unknown-tensor", text)], directory)
        found |= from_native(layout.origins(tensors.names), tensors.read)
    return found


def from_native(origins: Mapping[str, Origin], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Our tensors, by our names; `read` gives a native tensor by its name.

    FormatError where native tensors do not fit together. Tensors that are only renamed are not copied.
    """
    return {
        name: _assembled(name, origin.change, [read(part) for part in origin.names]) for name, origin in origins.items()
    }


def to_native(origins: Mapping[str, Origin], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Native tensors, by their names, made of ours: the inverse of `from_native`, bit by bit.

    FormatError where ours do not have the shape that `origins` say.
    """
    native: dict[str, Tensor] = {}
    for name, origin in origins.items():
        native |= zip(origin.names, _parts(name, origin, tensors[name]), strict=True)
    return native


def _assembled(name: str, change: Change, parts: list[Tensor]) -> Tensor:
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        found = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise error_of([fault("tensor-shape", f"experts of {name} have shapes {found}; expected one")], "MTP block")
    if change is Change.SWAP_HALVES:
        return _swapped(name, parts[0])
    if change is Change.STACK:
        return torch.stack(parts)
    if change is Change.STACK_PAIRS:
        pairs = torch.stack(parts)
        return pairs.view(len(parts) // 2, 2 * pairs.shape[1], pairs.shape[2])
    return parts[0]


def _parts(name: str, origin: Origin, tensor: Tensor) -> Iterable[Tensor]:
    if origin.change is Change.COPY:
        return (tensor,)
    if origin.change is Change.SWAP_HALVES:
        return (_swapped(name, tensor),)
    experts = len(origin.names) // (2 if origin.change is Change.STACK_PAIRS else 1)
    if tensor.dim() != 3 or len(tensor) != experts or (origin.change is Change.STACK_PAIRS and tensor.shape[1] % 2):
        text = f"{name} has shape {list(tensor.shape)}; expected {experts} experts, gate and up of one height"
        raise error_of([fault("tensor-shape", text)], "MTP block")
    if origin.change is Change.STACK:
        return tensor.unbind()
    return tensor.reshape(2 * experts, tensor.shape[1] // 2, tensor.shape[2]).unbind()


def _swapped(name: str, tensor: Tensor) -> Tensor:
    if tensor.dim() != 2 or tensor.shape[1] % 2:
        text = (
            f"{name} has shape {list(tensor.shape)}; expected a matrix of as many columns for states as for embeddings"
        )
        raise error_of([fault("tensor-shape", text)], "MTP block")
    first, second = tensor.chunk(2, 1)
    return torch.cat((second, first), 1)
