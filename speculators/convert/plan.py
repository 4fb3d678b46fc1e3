"""What a conversion is going to write, and where each tensor of the source went: nothing is read before it is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculators.convert.side_files import account_for_files
from speculators.convert.source import TORCH_OF_DTYPE, SourceCheckpoint, SourceTensor
from speculators.errors import FormatError
from speculators.formats.checkpoint import ITEM_SIZE, TensorHeader, account_for
from speculators.formats.config import SpeculatorConfig
from speculators.formats.faults import Fault, error_of, fault

ROTARY = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write: its shape, its dtype as safetensors calls it, and what makes it when its turn comes.

    Where it has `parts`, it is their numbers one after another, and they can be made and written one by one.
    """

    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], Tensor] = field(repr=False, compare=False)
    parts: tuple[PlannedTensor, ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def copy(cls, tensor: SourceTensor) -> PlannedTensor:
        """The tensor as it was stored."""
        return cls(tensor.shape, tensor.dtype, tensor.read)

    @classmethod
    def stacked(cls, shape: tuple[int, ...], parts: Sequence[PlannedTensor]) -> PlannedTensor:
        """The numbers of parts of one dtype one after another, in another shape."""
        return cls(shape, parts[0].dtype, partial(_stacked, parts, shape), tuple(parts))

    def stored_as(self, dtype: str) -> PlannedTensor:
        """The same numbers in another dtype, as safetensors calls it."""
        if dtype == self.dtype:
            return self
        parts = tuple(part.stored_as(dtype) for part in self.parts)
        return replace(self, dtype=dtype, make=partial(_cast, self.make, TORCH_OF_DTYPE[dtype]), parts=parts)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: str) -> PlannedTensor:
        """A tensor of zeros."""
        return cls(shape, dtype, lambda: torch.zeros(shape, dtype=TORCH_OF_DTYPE[dtype]))


@dataclass(frozen=True)
class LayerIdReading:
    """Which of the verifier's layers feed the draft: as the source says it, and as depths (0 = embeddings).

    `source` says where the ids were found, or that they are a default; `shift` is what was added to each.
    """

    read: tuple[int, ...]
    written: tuple[int, ...]
    source: str

    @property
    def shift(self) -> int:
        """What was added to each id that was read."""
        return self.written[0] - self.read[0]


@dataclass
class CheckpointPlan:
    """A checkpoint to be written, and the account of the one that it is made from.

    `config` is what `config.json` holds; `files` are further JSON files by name, `copies` files that are taken as they
    are, `links` such as need not be copied where a hard link can be. `shards` names the file of each tensor where there
    is more than one. `used` are names in the source, `dropped` those that are left out with the reason, `derived` says
    of tensors that the source did not have what they were made of.
    """

    family: str
    config: Mapping[str, Any]
    tensors: dict[str, PlannedTensor]
    used: tuple[str, ...]
    dropped: Mapping[str, str]
    derived: Mapping[str, str]
    ids: LayerIdReading | None = None
    notes: tuple[str, ...] = ()
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    copies: tuple[Path, ...] = ()
    links: tuple[Path, ...] = ()
    shards: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_speculator(self) -> bool:
        """Whether it is a speculator, and not another checkpoint that is kept as its author wrote it."""
        return "speculators_model_type" in self.config

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that will be written."""
        return sum(prod(tensor.shape) * ITEM_SIZE[tensor.dtype] for tensor in self.tensors.values())

    def account(self) -> dict[str, Any]:
        """Where everything went, as JSON: `used, dropped, derived, ids, notes`."""
        ids = self.ids
        return {
            "used": list(self.used),
            "dropped": [{"tensor": name, "reason": reason} for name, reason in self.dropped.items()],
            "derived": [{"tensor": name, "from": origin} for name, origin in self.derived.items()],
            "ids": None if ids is None else {"read": ids.read, "written": ids.written, "source": ids.source},
            "notes": list(self.notes),
        }


class Ledger:
    """The source's tensors while a plan is made: each is taken or dropped once, and what is left is an error."""

    def __init__(self, source: SourceCheckpoint) -> None:
        self.source = source
        self.planned: dict[str, PlannedTensor] = {}
        self.dropped: dict[str, str] = {}
        self.derived: dict[str, str] = {}
        self.notes: list[str] = []
        self._used: list[str] = []
        self._left = dict(source.tensors)
        self._files = {file.name: file for file in source.side_files}
        for name in [name for name in self._left if name.endswith(ROTARY)]:
            self.drop(name, "a rotary buffer, which follows from the configuration")

    @property
    def left(self) -> tuple[str, ...]:
        """Names that are neither taken nor dropped yet."""
        return tuple(self._left)

    def has(self, name: str) -> bool:
        """Whether a tensor is there and neither taken nor dropped."""
        return name in self._left

    def stored(self, name: str) -> SourceTensor:
        """A tensor that is left, to look at; FormatError where it is missing."""
        if name not in self._left:
            raise error_of([fault("missing-tensor", f"{name} is missing")], self.source.directory)
        return self._left[name]

    def exchange(self, name: str, meaning: SourceTensor, made_of: str) -> None:
        """Let a tensor that is left stand for what it means; `made_of` says in words how that is made."""
        self._left[name] = meaning
        self.derived[name] = made_of

    def take(self, name: str) -> SourceTensor:
        """Use a tensor; FormatError where it is missing."""
        self._used.append(self.stored(name).name)
        return self._left.pop(name)

    def copy(self, name: str, target: str | None = None) -> None:
        """Write a tensor as it is, under `target` where that is another name."""
        self.plan(target or name, PlannedTensor.copy(self.take(name)))

    def copy_all(self, names: Iterable[str], target: Callable[[str], str] = str) -> None:
        """Write those of `names` that are there as they are, under the names that `target` gives them."""
        for name in [name for name in names if name in self._left]:
            self.copy(name, target(name))

    def plan(self, target: str, tensor: PlannedTensor, derived_from: str | None = None) -> None:
        """Write a tensor; `derived_from` says in words what of, where the source does not have it."""
        if target in self.planned:
            raise FormatError(f"{self.source.directory}: two tensors are {target} in the result; remove the stale one")
        self.planned[target] = tensor
        if derived_from is not None:
            self.derived[target] = derived_from

    def drop(self, name: str, reason: str) -> None:
        """Leave a tensor out, and say why."""
        tensor = self._left.pop(name)
        self.dropped[tensor.name] = reason

    def take_file(self, name: str) -> Path | None:
        """Use a file beside the weights; None where it is not there. What is not used is accounted for at the end."""
        file = self._files.pop(name, None)
        if file is not None:
            self._used.append(name)
        return file

    def withdraw(self, name: str, reason: str) -> None:
        """Leave out a tensor that was planned under its own name, if it was, and say why."""
        if self.planned.pop(name, None) is not None and name in self._used:
            self._used.remove(name)
            self.dropped[name] = reason

    def note(self, text: str) -> None:
        """Say something that the user should know, such as a default that was taken."""
        self.notes.append(text)

    def finish(
        self, family: str, config: SpeculatorConfig, ids: LayerIdReading | None = None, **more: Any
    ) -> CheckpointPlan:
        """The plan of a speculator; FormatError lists what is left over, missing, or of another shape or dtype."""
        faults = [
            fault("unknown-tensor", f"{tensor.name} {list(tensor.shape)} has no place in a {family} speculator")
            for tensor in self._left.values()
        ]
        faults += _unfit(self.planned, config)
        if faults:
            raise error_of(faults, self.source.directory)
        return self.finish_foreign(family, config.to_json(), ids, **more)

    def finish_foreign(
        self, family: str, config: Mapping[str, Any], ids: LayerIdReading | None = None, **more: Any
    ) -> CheckpointPlan:
        """The plan of a checkpoint in somebody else's layout; FormatError lists what is left over."""
        if self._left:
            names = ", ".join(sorted(self._left)[:5])
            text = f"{len(self._left)} tensors have no place in the result: {names}"
            raise error_of([fault("unknown-tensor", text)], self.source.directory)
        source = self.source
        self.dropped |= account_for_files(source.directory, self._files.values(), source.tensors, source.named)
        return CheckpointPlan(
            family=family,
            config=config,
            tensors=self.planned,
            used=tuple(self._used),
            dropped=self.dropped,
            derived=self.derived,
            ids=ids,
            notes=tuple(self.notes),
            **more,
        )


def _cast(make: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    return make().to(dtype)


def _stacked(parts: Sequence[PlannedTensor], shape: tuple[int, ...]) -> Tensor:
    return torch.cat([part.make().flatten() for part in parts]).view(shape)


def _unfit(planned: Mapping[str, PlannedTensor], config: SpeculatorConfig) -> list[Fault]:
    """What a config's expected tensors say against those that are planned."""
    headers = {name: TensorHeader(tensor.dtype, tensor.shape, Path(), 0, 0) for name, tensor in planned.items()}
    return [item for item in account_for(headers, config.expected_tensors()) if item.level == "ERROR"]
