"""Drafts that were stored in eight bits and a scale: the numbers that they mean, made when they are asked for.

A scale is multiplied in whatever its name says (`weight_scale_inv` is the inverse of what its writer divided by). It
holds for a whole tensor, for a row, or for a block of rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from speculators.convert.plan import Ledger
from speculators.convert.source import TORCH_OF_DTYPE, SourceTensor
from speculators.errors import FormatError
from speculators.formats.checkpoint import DTYPE_NAMES

_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8")
_SCALES = (".weight_scale_inv", ".weight_scale")
# Scales of activations and caches, which say how an engine rounds and nothing about the weights.
_OF_ACTIVATIONS = (".input_scale", ".k_scale", ".v_scale", ".output_scale", ".activation_scale")
# How the names of other ways of storing weights end, and what these are called.
_UNREAD = {
    ".weight_scale_2": "NVFP4, 4 bits",
    ".weight_packed": "compressed-tensors, packed whole numbers",
    ".weight_zero_point": "compressed-tensors with zero points",
    ".qweight": "GPTQ or AWQ, packed whole numbers",
    ".qzeros": "GPTQ or AWQ, packed whole numbers",
    ".SCB": "LLM.int8",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    "_proj_blocks": "MXFP4, 4 bits",
}
_BLOCK = (128, 128)


def dequantise(ledger: Ledger, config: Mapping[str, Any]) -> None:
    """Let weights of eight bits that are left in the ledger stand for what they mean, with their scales accounted for.

    They get the configuration's dtype, bfloat16 where it has none. `quantization_config.weight_block_size` says how
    large blocks are, 128 x 128 where it says nothing. FormatError names every other kind of quantised weight.
    """
    _refuse_others(ledger)
    for name in [name for name in ledger.left if name.endswith(_SCALES)]:
        weight = name[: name.rindex(".weight") + len(".weight")]
        if not ledger.has(weight):
            raise FormatError(f"{ledger.source.directory}: {name} scales {weight}, which is missing")
        _exchange(ledger, weight, name, config)
    for name in [name for name in ledger.left if name.endswith(_OF_ACTIVATIONS)]:
        ledger.drop(name, "a scale of activations, which the weights do not depend on")
    narrow = next((name for name in ledger.left if ledger.stored(name).dtype in _EIGHT_BITS[:2]), None)
    if narrow is not None:
        raise FormatError(
            f"{ledger.source.directory}: {narrow} is stored in 8 bits without a scale; give the draft it was made from"
        )


def _refuse_others(ledger: Ledger) -> None:
    for name in ledger.left:
        kind = next((kind for ending, kind in _UNREAD.items() if name.endswith(ending)), None)
        if kind is not None:
            raise FormatError(
                f"{ledger.source.directory}: {name} belongs to quantised weights that are not read ({kind}); give the "
                "checkpoint that they were made from"
            )


def _computed_in(config: Mapping[str, Any]) -> str:
    """The dtype that the configuration says weights are computed in, as safetensors calls it."""
    said = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    found = next((stored for stored, name in DTYPE_NAMES.items() if name == said), None)
    if found is None:
        raise FormatError(f"config.json: dtype is {said!r}; expected {', '.join(DTYPE_NAMES.values())}")
    return found


def _exchange(ledger: Ledger, weight: str, scale: str, config: Mapping[str, Any]) -> None:
    stored, by, target = ledger.stored(weight), ledger.stored(scale), _computed_in(config)
    if stored.dtype not in _EIGHT_BITS or len(stored.shape) != 2:
        raise FormatError(
            f"{ledger.source.directory}: {weight} is {stored.dtype} {list(stored.shape)} and has a scale, {scale}; "
            f"expected a matrix of {', '.join(_EIGHT_BITS)}"
        )
    block = _block(stored.shape, by.shape, _block_size(config))
    if block is None:
        raise FormatError(
            f"{ledger.source.directory}: {weight} is {list(stored.shape)} and {scale} {list(by.shape)}; expected one "
            f"scale, one a row, or one for each block of {list(_block_size(config))}"
        )
    meaning = SourceTensor(stored.name, stored.shape, target, partial(_scaled, stored, by, block, target))
    ledger.drop(scale, f"multiplied into {stored.name}")
    ledger.exchange(weight, meaning, f"its {stored.dtype} numbers times {by.name}, in {DTYPE_NAMES[target]}")


def _block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    settings = config.get("quantization_config")
    size = settings.get("weight_block_size") if isinstance(settings, Mapping) else None
    if size is None:
        return _BLOCK
    if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
        raise FormatError(f"config.json: weight_block_size is {size!r}; expected two whole numbers above 0")
    return size[0], size[1]


def _block(shape: tuple[int, ...], scales: tuple[int, ...], size: tuple[int, int]) -> tuple[int, int] | None:
    """Rows and columns of [O, I] that share a scale; None where the scales fit none of the three ways."""
    rows, columns = shape
    if scales in ((), (1,)):
        return rows, columns
    if scales in ((rows,), (rows, 1)):
        return 1, columns
    return size if scales == (-(-rows // size[0]), -(-columns // size[1])) else None


def _scaled(stored: SourceTensor, by: SourceTensor, block: tuple[int, int], target: str) -> Tensor:
    """The product, made of one row of blocks at a time so that nothing but the result is held."""
    numbers, height, width = stored.read(), max(block[0], 1), block[1]
    scales = by.read().float().reshape(-(-stored.shape[0] // height), -1)
    made = torch.empty(stored.shape, dtype=TORCH_OF_DTYPE[target])
    for index, row in enumerate(scales):
        rows = slice(index * height, (index + 1) * height)
        made[rows] = (numbers[rows].float() * row.repeat_interleave(width)[: stored.shape[1]]).to(made.dtype)
    return made
