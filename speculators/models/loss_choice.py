"""What makes the losses of a run, torch's operations or Triton's kernels: as it was asked for, or what is faster."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from speculators.errors import UsageError
from speculators.models.execution import LossKernel, launches_triton

logger = logging.getLogger(__name__)

# The first run compiles, and the second still finds cold caches.
WARM_UPS = 2
REPEATS = 5
# Kernels compute in float32.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class LossKind:
    """A loss by name over a vocabulary of so many tokens, of products in `dtype` on `device`."""

    loss: str
    device: torch.device
    dtype: torch.dtype
    vocabulary: int


@dataclass(frozen=True)
class Measurement:
    """Milliseconds that the first chunk of a loss took, with its products and its gradient."""

    loss: str
    vocabulary: int
    dtype: str
    torch_ms: float
    triton_ms: float

    @property
    def faster(self) -> str:
        """Which of the two is taken."""
        return "triton" if self.triton_ms < self.torch_ms else "torch"


def gpu_milliseconds(run: Callable[[], object]) -> float:
    """What `run` takes on the current GPU: the median of some runs after others that do not count."""
    for _ in range(WARM_UPS):
        run()
    times: list[float] = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


class LossChoice:
    """The setting `asked`, and what was measured where it is "auto".

    "auto" measures each kind of loss once, on a GPU where Triton runs, and keeps the faster; elsewhere it is torch.
    `stopwatch` gives the milliseconds of a run.
    """

    def __init__(
        self, asked: LossKernel = "auto", stopwatch: Callable[[Callable[[], object]], float] = gpu_milliseconds
    ) -> None:
        self.asked = asked
        self.measured: dict[LossKind, Measurement] = {}
        self._stopwatch = stopwatch
        self._untold: list[Measurement] = []

    def is_fused(self, kind: LossKind, run: Callable[[bool], object]) -> bool:
        """Whether Triton makes a loss that it has kernels for; `run` makes a part of it, by Triton where told true.

        UsageError where Triton is asked for and does not compute in that dtype.
        """
        if self.asked != "auto":
            if self.asked == "triton" and kind.dtype not in _DTYPES:
                raise UsageError(f"losses 'triton' of {kind.dtype}; its kernels compute in float32: choose 'torch'")
            return self.asked == "triton"
        if kind not in self.measured:
            if kind.dtype not in _DTYPES or not launches_triton(kind.device):
                return False
            self.measured[kind] = self._measure(kind, run)
        return self.measured[kind].faster == "triton"

    def news(self) -> list[Measurement]:
        """What was measured since this was last asked for."""
        untold, self._untold = self._untold, []
        return untold

    def require_unfused(self, loss: str) -> None:
        """Raise UsageError where Triton is asked for, since `loss` has no kernel there."""
        if self.asked == "triton":
            raise UsageError(
                f"the loss {loss} has no Triton kernel; those with one are 1.0 kl_div, 1.0 ce without total variation, "
                "and the data's cross entropy: set train.losses to 'auto' or 'torch', or choose such a loss"
            )

    def _measure(self, kind: LossKind, run: Callable[[bool], object]) -> Measurement:
        torch_ms, triton_ms = self._stopwatch(lambda: run(False)), self._stopwatch(lambda: run(True))
        dtype = str(kind.dtype).removeprefix("torch.")
        found = Measurement(kind.loss, kind.vocabulary, dtype, torch_ms, triton_ms)
        logger.info(
            "a chunk of the loss %s over %d tokens in %s takes %.3f ms by torch and %.3f ms by Triton; taken: %s",
            *(found.loss, found.vocabulary, found.dtype, found.torch_ms, found.triton_ms, found.faster),
        )
        self._untold.append(found)
        return found
