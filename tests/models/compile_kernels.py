"""Compile every kernel for GPUs that need not be there: `python -m tests.models.compile_kernels`.

Run it without TRITON_INTERPRET. Prints a line a kernel and target: its name, the target, and what Triton made of it.
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from speculators.models.kernels import row_losses

# Target, dtype of the products, and whether what is optional is there.
CASES = (
    (GPUTarget("cuda", 90, 32), "*bf16", True),
    (GPUTarget("cuda", 90, 32), "*bf16", False),
    (GPUTarget("cuda", 80, 32), "*fp32", True),
)
INDICES = ("labels", "rows", "best", "verifier_best")
INTEGERS = ("stride", "size", "verifier_stride")
NUMBERS = ("scale", "softcap", "verifier_scale", "verifier_softcap")
VALUES = ("largest", "totals", "losses", "variations", "cross_entropies", "verifier_largest", "verifier_totals")
PRODUCTS = ("products", "verifier")
TYPES = {
    **dict.fromkeys(INDICES, "*i64"),
    **dict.fromkeys(INTEGERS, "i32"),
    **dict.fromkeys(NUMBERS, "fp32"),
    **dict.fromkeys(VALUES, "*fp32"),
}


def compiled(kernel: Any, products: str, target: GPUTarget, flags: dict[str, bool]) -> list[str]:
    """The forms that Triton went through; the last is the machine's own."""
    constants = {"BLOCK": row_losses.MOST_COLUMNS} | {name: flags[name] for name in flags if name in kernel.arg_names}
    types = TYPES | dict.fromkeys(PRODUCTS, products) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
    options = {"num_warps": row_losses.WARPS, "enable_fp_fusion": True}
    return list(triton.compile(source, target=target, options=options).asm)


def main() -> None:
    for kernel in (row_losses._softmax_kernel, row_losses._label_kernel, row_losses._divergence_kernel):
        for target, products, optional in CASES:
            flags = dict.fromkeys(("CAPPED", "VERIFIER_CAPPED", "GRADIENT"), optional)
            print(kernel.__name__, target.arch, products, compiled(kernel, products, target, flags)[-1])


if __name__ == "__main__":
    main()
