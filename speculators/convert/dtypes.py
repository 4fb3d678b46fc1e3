"""Which dtype a converted checkpoint is stored in, and drafts that were stored in fewer bits than they compute in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from speculators.convert.plan import Ledger, PlannedTensor
from speculators.convert.source import DTYPE_OF_TORCH, TORCH_OF_DTYPE, SourceTensor
from speculators.errors import FormatError
from speculators.formats.checkpoint import DTYPE_NAMES
from speculators.formats.config import Dtype

_STORED: dict[Dtype, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_WIDE = ("F64", *DTYPE_NAMES)
# Scales of activations and caches, which say how an engine rounds and nothing about the weights.
_OF_ACTIVATIONS = (".input_scale", ".k_scale", ".v_scale", ".output_scale")
_SCALE, _SECOND_SCALE = "_scale", "_scale_2"


def settle_dtype(ledger: Ledger, asked: Dtype | None = None) -> Dtype:
    """Give all planned float tensors one dtype and return it: `asked`, else the narrowest that holds them all.

    A note says what is brought to another dtype. FormatError where a float is stored in some other way than as float32,
    bfloat16 or float16, or none is.
    """
    floats = {name: tensor for name, tensor in ledger.planned.items() if tensor.dtype in _WIDE}
    found = {tensor.dtype for tensor in floats.values()}
    if not found:
        raise FormatError(f"{ledger.source.directory} has no float tensor; expected {', '.join(_STORED)}")
    if "F64" in found and asked is None:
        raise FormatError(f"{ledger.source.directory} has float64 tensors, which no draft is stored in; give a dtype")
    # Neither half-precision format holds the numbers of the other.
    common = next(iter(found)) if len(found) == 1 else "F32"
    target = common if asked is None else _STORED[asked]
    for name, tensor in floats.items():
        if tensor.dtype != target:
            ledger.planned[name] = PlannedTensor(tensor.shape, target, partial(_cast, tensor, target))
    changed = sorted(DTYPE_NAMES.get(dtype, "float64") for dtype in found - {target})
    settled = next(dtype for dtype, stored in _STORED.items() if stored == target)
    if changed:
        how = "without loss" if asked is None else "as asked for"
        ledger.note(f"tensors stored in {' and '.join(changed)} are written in {settled}, {how}")
    return settled


def _cast(tensor: PlannedTensor, target: str) -> Tensor:
    return tensor.make().to(TORCH_OF_DTYPE[target])


def dequantise(ledger: Ledger, config: Mapping[str, Any]) -> None:
    """Let float8 weights with a scale a tensor or a row, as ModelOpt exports them, stand for what they mean.

    They get the configuration's dtype, bfloat16 where it has none. FormatError for any other kind of quantised weight.
    """
    second = next((name for name in ledger.left if name.endswith(_SECOND_SCALE)), None)
    if second is not None:
        raise FormatError(
            f"{ledger.source.directory} is quantised to 4 bits (NVFP4: {second}), which is not read; give the draft "
            "that it was made from"
        )
    target = DTYPE_OF_TORCH[_computed_in(config)]
    for name in [name for name in ledger.left if name.endswith(f".weight{_SCALE}")]:
        weight = name.removesuffix(_SCALE)
        if not ledger.has(weight):
            raise FormatError(f"{ledger.source.directory}: {name} scales {weight}, which is missing")
        _exchange(ledger, weight, name, target)
    for name in [name for name in ledger.left if name.endswith(_OF_ACTIVATIONS)]:
        ledger.drop(name, "a scale of activations, which the weights do not depend on")
    narrow = next((name for name in ledger.left if ledger.stored(name).dtype.startswith("F8")), None)
    if narrow is not None:
        raise FormatError(
            f"{ledger.source.directory}: {narrow} is stored in 8 bits without a scale; give the draft it was made from"
        )


def _computed_in(config: Mapping[str, Any]) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    stored = next((stored for dtype, stored in _STORED.items() if dtype == name), None)
    if stored is None:
        raise FormatError(f"config.json: dtype is {name!r}; expected {', '.join(_STORED)}")
    return TORCH_OF_DTYPE[stored]


def _exchange(ledger: Ledger, weight: str, scale: str, target: str) -> None:
    stored, by = ledger.stored(weight), ledger.stored(scale)
    if stored.dtype != "F8_E4M3" or by.shape not in ((), (1,), stored.shape[:1], (*stored.shape[:1], 1)):
        raise FormatError(
            f"{ledger.source.directory}: {weight} is {stored.dtype} {list(stored.shape)} with a scale of shape "
            f"{list(by.shape)}; expected float8 (E4M3) with a scale for all or one a row"
        )
    meaning = SourceTensor(stored.name, stored.shape, target, partial(_scaled, stored, by, target))
    ledger.drop(scale, f"multiplied into {weight}")
    ledger.exchange(weight, meaning, f"its float8 numbers times {scale}, in {DTYPE_NAMES[target]}")


def _scaled(stored: SourceTensor, by: SourceTensor, target: str) -> Tensor:
    scale = by.read().float()
    if scale.numel() > 1:
        scale = scale.reshape(-1, 1)
    return (stored.read().float() * scale).to(TORCH_OF_DTYPE[target])
