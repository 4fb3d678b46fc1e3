"""What the machine's arithmetic is good at."""

import torch


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether `device` has instructions for bfloat16 products; without them such a product is slower than float32's.

    On x86 these are AVX512-BF16 and AMX.
    """
    if device.type == "cpu":
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def padded_rows(rows: int, dtype: torch.dtype, device: torch.device, multiple: int = 64) -> int:
    """How many rows a matrix product of `rows` should have where their number changes from call to call.

    On a CPU, oneDNN compiles a kernel for every new shape of a half-precision product and keeps it for good: about a
    millisecond and a mebibyte each. There, rows are rounded up to a multiple; elsewhere they stay.
    """
    if device.type != "cpu" or dtype.itemsize != 2:
        return rows
    return -(-rows // multiple) * multiple
