"""Where the time of a step goes, and how much of what the hardware could compute in it was computed."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from speculators.models.family import Count
from speculators.train.metrics import MetricSums

PARTS, MFU = ("data", "compute", "optimizer"), "mfu"
# Words that a device's name has, and its peak in TFLOP/s of dense products in bfloat16 and in float32. More specific
# names stand first. Sources: NVIDIA's data sheets of each (their tensor-core figures with sparsity, halved) and AMD's.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250.0, 75.0),
    ("H200 NVL", 835.0, 60.0),
    ("H200", 989.0, 67.0),
    ("GH200", 989.0, 67.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("L40S", 362.0, 91.6),
    ("L4", 121.0, 30.3),
    ("A10", 125.0, 31.2),
    ("4090", 165.2, 82.6),
    ("3090", 71.0, 35.6),
    ("MI300X", 1307.4, 163.4),
)
_GEMM_SIZE, _GEMM_SECONDS = 768, 0.1
# Parts of a GPU, and those that are clocked lower, have its name too.
_OTHER_PEAK = {"LAPTOP", "MOBILE", "MIG"}


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(gradient: torch.Size, *shapes: Any, **_: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, *shapes[:3]))


# torch has formulas for the attention kernels of GPUs alone.
_FORMULAS: dict[Any, Any] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: shape_wrapper(_attention),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: shape_wrapper(_attention_backward),
}


class _Operations(TorchDispatchMode):
    """Counts operations by torch's formulas.

    torch's own FlopCounterMode decomposes what it has no formula for, and the last bit of a result may change by that.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's modes are untyped
        self.total = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """What is compiled stays so."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(getattr(func, "overloadpacket", func))
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def peak_of(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of dense products in `dtype` of the GPU with that name; None for one that is not known."""
    words = set(re.split(r"[\s_-]+", name.upper()))
    for device, bfloat16, float32 in _PEAKS if not words & _OTHER_PEAK else ():
        if words >= set(device.upper().split()):
            return 1e12 * (bfloat16 if dtype is torch.bfloat16 else float32)
    return None


@cache
def measured_peak(dtype: torch.dtype, threads: int) -> float:
    """FLOP/s of the fastest of several square products on this CPU, with as many threads as torch uses."""
    matrix = torch.ones(_GEMM_SIZE, _GEMM_SIZE, dtype=dtype)
    best, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < _GEMM_SECONDS:
        started = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - started)
    return float(2 * _GEMM_SIZE**3 / best)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that a device can compute products in `dtype` with: measured on a CPU, from a table for a GPU, or None."""
    if device.type == "cpu":
        return measured_peak(dtype, torch.get_num_threads())
    # With TF32 the products of float32 run at another rate.
    if device.type != "cuda" or (dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"):
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype)


class Speed:
    """Seconds and operations of this process's steps since they were last taken.

    A step is waiting for "data", "compute" (forward and backward passes) and "optimizer" (all behind them, waiting for
    other processes included). Model FLOPs utilisation is the operations of the passes over those that the hardware
    could have done in the steps' time at its peak (Chowdhery et al., "PaLM", appendix B). `counts_flops`: operations
    are those of products and attention in this process's first step, by torch's formulas, for each token that counts; a
    kernel without a formula counts as nothing, and a pass that is computed twice as two.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, counts_flops: bool) -> None:
        self._device = device
        self._peak = peak_flops(device, dtype) if counts_flops else None
        self._per_token: float | None = None
        self._counting = False
        self._step: dict[str, float] = {}
        self._sums = MetricSums()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count what happens inside to a part of the step under way."""
        started = time.perf_counter()
        yield
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        self.add(part, time.perf_counter() - started)

    def add(self, part: str, seconds: float) -> None:
        """Count seconds to a part of the step under way."""
        self._step[part] = self._step.get(part, 0.0) + seconds

    @contextmanager
    def computing(self, tokens: int) -> Iterator[None]:
        """Around the passes of a step over so many tokens, those of passes that do not count included."""
        with self.timed("compute"):
            self._counting = self._peak is not None and self._per_token is None
            if not self._counting:
                yield
                return
            with _Operations() as counter:
                yield
            self._per_token = counter.total / tokens

    def end_step(self, tokens: int) -> None:
        """A step is over in which so many tokens of this process counted."""
        counts = {part: Count(seconds, 1.0) for part, seconds in self._step.items()}
        # A step whose operations are counted takes longer for it.
        if self._peak is not None and self._per_token is not None and not self._counting:
            counts[MFU] = Count(self._per_token * tokens, self._peak * sum(self._step.values()))
        self._sums.add(counts)
        self._step = {}

    def take(self) -> MetricSums:
        """The sums since this was last called: seconds and steps of each part; "mfu", operations done and possible."""
        sums, self._sums = self._sums, MetricSums()
        return sums
