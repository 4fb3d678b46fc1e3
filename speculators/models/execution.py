"""How a training forward is carried out: what is kept for the backward, what is compiled, which kernel attends.

None of it changes what is computed, but for rounding. Free of torch.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from speculators.errors import TrainingError

if TYPE_CHECKING:
    import torch

AttentionKernel = Literal["auto", "blocks", "flex"]
LossKernel = Literal["auto", "torch", "triton"]


@dataclass(frozen=True)
class Execution:
    """The choices of a run.

    With `gradient_checkpointing` a layer keeps its inputs alone and is run again in the backward. With `compile` the
    methods marked by `compiling.compilable` are compiled. `attention` is "blocks" (scores block by block, anywhere),
    "flex" (one fused kernel, on a GPU), or "auto": flex on a GPU, else blocks. `losses` is "torch" (its operations,
    anywhere), "triton" (fused kernels, on a GPU), or "auto": what is measured to be faster on a GPU, else torch.
    """

    gradient_checkpointing: bool = False
    compile: bool = False
    attention: AttentionKernel = "auto"
    losses: LossKernel = "auto"

    def require_possible(self, device: torch.device) -> None:
        """Raise TrainingError where `device` lacks what the choices need."""
        if self.attention == "flex" and device.type != "cuda":
            raise TrainingError(
                f"attention 'flex' has no backward on {device.type!r}; train on a GPU, or set train.attention to 'auto'"
            )
        if self.losses == "triton":
            require_triton(device)
        if self.compile:
            require_compiler(device)

    def uses_flex(self, device: torch.device) -> bool:
        """Whether attention on `device` is the fused kernel."""
        return self.attention == "flex" or (self.attention == "auto" and device.type == "cuda")


def require_compiler(device: torch.device, environment: Mapping[str, str] = os.environ) -> None:
    """Raise TrainingError where torch.compile finds no compiler for `device`: by itself it says so at the first step.

    A C++ compiler ($CXX, else g++, or clang++ on macOS) for a CPU; Triton for a GPU, and a C compiler for what launches
    its kernels ($CC, else gcc or clang).
    """
    what, instead = f"train.compile on {device.type!r}", "train.compile to false"
    if device.type == "cpu":
        wanted = [environment.get("CXX", "clang++" if platform.system() == "Darwin" else "g++")]
        _require_program(wanted, "C++", "CXX", environment, what, instead)
    else:
        _require_package(what, instead)
        _require_program(_c_compilers(environment), "C", "CC", environment, what, instead)


def launches_triton(device: torch.device, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `device` is a GPU with all that Triton needs there: its package, and a compiler of what launches."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return _is_there(_c_compilers(environment), environment)


def require_triton(device: torch.device, environment: Mapping[str, str] = os.environ) -> None:
    """Raise TrainingError where Triton runs no kernel on `device`.

    It does on a GPU, where it needs a C compiler for what launches its kernels; with TRITON_INTERPRET=1 it reads them
    line by line on a CPU, which is good for tests alone.
    """
    what, instead = "losses 'triton'", "train.losses to 'auto'"
    _require_package(what, instead)
    if environment.get("TRITON_INTERPRET") == "1":
        return
    if device.type != "cuda":
        raise TrainingError(
            f"{what} have no kernels for {device.type!r}; train on a GPU, set {instead}, or set "
            "TRITON_INTERPRET=1 in the environment, which runs them slowly in Python"
        )
    _require_program(_c_compilers(environment), "C", "CC", environment, what, instead)


def _c_compilers(environment: Mapping[str, str]) -> list[str]:
    return [environment["CC"]] if "CC" in environment else ["gcc", "clang"]


def _is_there(programs: Sequence[str], environment: Mapping[str, str]) -> bool:
    return any(shutil.which(name, path=environment.get("PATH", os.defpath)) for name in programs)


def _require_program(
    wanted: Sequence[str], kind: str, variable: str, environment: Mapping[str, str], what: str, instead: str
) -> None:
    if not _is_there(wanted, environment):
        raise TrainingError(
            f"{what} needs a {kind} compiler, and {' or '.join(wanted)} is not on the PATH; "
            f"install it, let {variable} name another one, or set {instead}"
        )


def _require_package(what: str, instead: str) -> None:
    if find_spec("triton") is None:
        raise TrainingError(
            f"{what} needs Triton, which is not installed; install the package 'triton', or set {instead}"
        )
