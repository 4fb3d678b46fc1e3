"""Compile the verification kernels for GPUs that need not be there: `python -m tests.runtime.compile_kernels`.

Run it without TRITON_INTERPRET. Prints a line a kernel, target and kind of drafts: the kernel's name, the target, the
drafts, and what Triton made of it.
"""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from speculators.runtime.kernels import verification

# Targets, with the dtype of the draft's probabilities.
CASES = ((GPUTarget("cuda", 90, 32), "*bf16"), (GPUTarget("cuda", 80, 32), "*fp32"))
INDICES = ("targets", "ids", "lengths", "drafted_rows", "kept", "output", "winners")
DOUBLES = ("coins", "rates", "masses", "shares", "best")
TYPES = {
    **dict.fromkeys(INDICES, "*i64"),
    **dict.fromkeys(DOUBLES, "*fp64"),
    **dict.fromkeys(("target", "noise"), "*fp32"),
}
KERNELS = (
    verification._greedy_kernel,
    verification._tosses_kernel,
    verification._standard_kernel,
    verification._masses_kernel,
    verification._block_kernel,
    verification._race_kernel,
)


def compiled(kernel: Any, draft: str, target: GPUTarget, one_hot: bool) -> list[str]:
    """The forms that Triton went through; the last is the machine's own."""
    possible = {"BLOCK": verification.COLUMNS, "ONE_HOT": one_hot}
    constants = {name: value for name, value in possible.items() if name in kernel.arg_names}
    types = TYPES | {"draft": draft} | dict.fromkeys(constants, "constexpr")
    # Whatever else a kernel takes is a size or a stride.
    source = ASTSource(kernel, {name: types.get(name, "i32") for name in kernel.arg_names}, constants)
    warps = verification.WARPS if "BLOCK" in constants else 1
    return list(triton.compile(source, target=target, options=verification.OPTIONS | {"num_warps": warps}).asm)


def main() -> None:
    for kernel in KERNELS:
        kinds = (True, False) if "ONE_HOT" in kernel.arg_names else (False,)
        for target, draft in CASES:
            for one_hot in kinds:
                drafts = "one-hot" if one_hot else draft
                print(kernel.__name__, target.arch, drafts, compiled(kernel, draft, target, one_hot)[-1])


if __name__ == "__main__":
    main()
