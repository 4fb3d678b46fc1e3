"""What the machine's arithmetic is good at."""

import torch
from torch import Tensor
from torch.nn import functional as F


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether `device` has instructions for bfloat16 products; without them such a product is slower than float32's.

    On x86 these are AVX512-BF16 and AMX.
    """
    if device.type == "cpu":
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def rounded_up(size: int, multiple: int) -> int:
    """The least multiple that is no less than `size`."""
    return -(-size // multiple) * multiple


def padded_rows(rows: int, dtype: torch.dtype, device: torch.device, multiple: int = 64) -> int:
    """How many rows a matrix product of `rows` should have where their number changes from call to call.

    On a CPU, oneDNN compiles a kernel for every new shape of a half-precision product and keeps it for good: about a
    millisecond and a mebibyte each. There, rows are rounded up to a multiple; elsewhere they stay.
    """
    if device.type != "cpu" or dtype.itemsize != 2:
        return rows
    return rounded_up(rows, multiple)


def padded_training_rows(rows: int, dtype: torch.dtype, device: torch.device, multiple: int = 64) -> int:
    """`padded_rows` for products of ever new numbers of rows: at most four shapes from one power of two to the next."""
    return padded_rows(rows, dtype, device, max(multiple, 1 << max((rows - 1).bit_length() - 3, 0)))


def with_padded_rows(matrix: Tensor, multiple: int = 64) -> Tensor:
    """The matrix with rows of zeros below it, as many rows in all as `padded_training_rows` says."""
    rows = padded_training_rows(len(matrix), matrix.dtype, matrix.device, multiple)
    return matrix if len(matrix) == rows else F.pad(matrix, (0, 0, 0, rows - len(matrix)))
