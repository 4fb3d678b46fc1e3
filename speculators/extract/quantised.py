"""States in eight bits: a number and, for each group of channels, what to multiply it by."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

# Neighbouring channels share a scale; a state's few huge channels then cost only their own group its resolution.
GROUP = 64
QUANTISED = {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}
_LARGEST = {"float8_e4m3fn": torch.finfo(torch.float8_e4m3fn).max, "int8": 127.0}


def num_groups(hidden_size: int) -> int:
    """Scales of a state of `hidden_size` channels."""
    return -(-hidden_size // GROUP)


def bytes_per_state(hidden_size: int) -> int:
    """Bytes of one state [H], scales (float32) included."""
    return hidden_size + 4 * num_groups(hidden_size)


def quantise(states_TAH: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """States [T, A, H] as numbers of `dtype` (a key of QUANTISED) [T, A, H] and scales float32 [T, A, groups].

    A scale maps its group's largest magnitude to the largest number that the dtype has; groups of zeros have scale 1.
    int8 is rounded to the nearest, so that no value is off by more than half a scale (`largest / 254`); float8 keeps
    four significant bits, so that none is off by more than a sixteenth of itself or `largest / 448 / 1024`.
    """
    groups = num_groups(states_TAH.shape[-1])
    grouped_TAGC = _grouped(states_TAH.float(), groups)
    largest_TAG = grouped_TAGC.abs().amax(-1)
    scales_TAG = torch.where(largest_TAG > 0, largest_TAG / _LARGEST[dtype], torch.ones_like(largest_TAG))
    # A scale below the smallest normal number would lose the bits that it is there to keep.
    scales_TAG = scales_TAG.clamp(min=torch.finfo(torch.float32).tiny)
    numbers_TAGC = (grouped_TAGC / scales_TAG[..., None]).clamp(-_LARGEST[dtype], _LARGEST[dtype])
    if dtype == "int8":
        numbers_TAGC = numbers_TAGC.round()
    numbers_TAH = numbers_TAGC.flatten(2)[..., : states_TAH.shape[-1]]
    return numbers_TAH.to(QUANTISED[dtype]).contiguous(), scales_TAG.contiguous()


def dequantise(numbers_TAH: Tensor, scales_TAG: Tensor, dtype: torch.dtype) -> Tensor:
    """The states [T, A, H], in `dtype`, that `quantise` made these of."""
    grouped_TAGC = _grouped(numbers_TAH.float(), scales_TAG.shape[-1])
    return (grouped_TAGC * scales_TAG[..., None]).flatten(2)[..., : numbers_TAH.shape[-1]].to(dtype)


def _grouped(values_TAH: Tensor, groups: int) -> Tensor:
    padded: Tensor = pad(values_TAH, (0, groups * GROUP - values_TAH.shape[-1]))
    return padded.view(*padded.shape[:-1], groups, GROUP)
