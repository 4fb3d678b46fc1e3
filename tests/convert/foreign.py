"""A checkpoint as another project writes it, put together by test code from published shapes, never by an exporter."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass
class ForeignCheckpoint:
    """A configuration and tensors in somebody's layout, the options to convert them with, and their container.

    `container` is `safetensors` (one file), `sharded` (two files and an index) or `bin` (torch's pickle).
    """

    layout: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    container: str = "safetensors"

    def write(self, directory: Path) -> Path:
        """Make the directory with everything in it."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config, indent=2), encoding="utf-8")
        if self.container == "bin":
            torch.save(self.tensors, directory / "pytorch_model.bin")
        elif self.container == "sharded":
            _write_shards(directory, self.tensors)
        else:
            save_file(contiguous(self.tensors), directory / "model.safetensors")
        return directory


def _write_shards(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    names = sorted(tensors)
    middle = len(names) // 2
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:middle], names[middle:]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file(contiguous({name: tensors[name] for name in part}), directory / file)
        weight_map |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same, as safetensors stores them."""
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


class Drawn:
    """Random float32 tensors: matrices of spread 1/sqrt(columns), norms around 1, biases around 0."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """[rows, columns]."""
        return torch.randn(rows, columns, generator=self._generator) / columns**0.5

    def norm(self, size: int) -> Tensor:
        """[size] around 1."""
        return 1 + 0.2 * torch.randn(size, generator=self._generator)

    def bias(self, size: int) -> Tensor:
        """[size] around 0."""
        return 0.3 * torch.randn(size, generator=self._generator)

    def ids(self, count: int, vocabulary: int) -> Tensor:
        """`count` distinct token ids below `vocabulary`, ascending, int64."""
        return torch.randperm(vocabulary, generator=self._generator)[:count].sort().values


def prefixed(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The same under names with a prefix."""
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
