"""What the machine's arithmetic is good at."""

import torch


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether `device` has instructions for bfloat16 products; without them such a product is slower than float32's.

    On x86 these are AVX512-BF16 and AMX.
    """
    if device.type == "cpu":
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
