"""Optimizers over float32 parameters, and learning-rate schedules as pure functions of the step."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

from speculators.errors import TrainingError
from speculators.models.hardware import multiplies_bfloat16
from speculators.train.config import ScheduleName, TrainConfig
from speculators.train.orthogonal import orthogonalise, polar_express
from speculators.train.sharding import part_like, whole
from speculators.train.threads import share_out

# What a group of parameters multiplies the learning rate by.
RATE = "rate"


class WholeMatrixMuon(Muon):
    """`torch.optim.Muon` whose orthogonalisation runs in `dtype`, on whole matrices where parameters are split.

    Same state and same update rule. torch's rounds the Newton-Schulz iteration to bfloat16, which a CPU without
    instructions for it multiplies some 25 times slower than float32, and makes both halves of products that are
    symmetric. A split matrix is gathered by every process, which keeps its own part of the update. With `express`, the
    iteration's polynomials are those of `orthogonal.polar_express` instead of torch's one.
    """

    dtype = torch.float32
    express = False

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        changed = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(isinstance(p, DTensor) or p.device.type != "cpu" for p, _ in changed):
            for parameter, group in changed:
                self._update(parameter, group)
        else:
            # Largest first, so that no thread is left with a large one at the end.
            changed.sort(key=lambda item: -item[0].numel() * min(item[0].shape))
            share_out(lambda item: self._update(*item), changed)
        return loss

    @torch.no_grad()
    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        matrix = whole(update).to(self.dtype)
        steps = group["ns_steps"]
        quintics = polar_express(steps) if self.express else [group["ns_coefficients"]] * steps
        matrix = orthogonalise(matrix, quintics, group["eps"], tight=self.express)
        # The update of a tall matrix comes transposed, which is turned faster before it is widened.
        update = part_like(matrix.contiguous().to(parameter.dtype), parameter)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def build_optimizers(
    parameters: Iterable[tuple[str, nn.Parameter]], config: TrainConfig, tables: Collection[str] = ()
) -> dict[str, Optimizer]:
    """One or two optimizers over named trainable parameters, by name.

    "adamw": AdamW over all. "muon": Muon over matrices other than token tables, AdamW over the rest; Muon's updates are
    scaled to AdamW's RMS (0.2 sqrt(max(rows, columns)), Liu et al., "Muon is scalable for LLM training"), so that one
    learning rate serves both. Norms and other vectors get no weight decay. Each group of parameters has its `rate`, by
    which `set_learning_rate` multiplies: `norm_rate` for vectors, `head_rate` for token tables. TrainingError when a
    parameter is not float32, none is trainable, or a rate is given for parameters that the draft does not train.
    """
    named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if not named:
        raise TrainingError("the draft has no trainable parameter; expected at least one with requires_grad")
    wrong = next((name for name, parameter in named if parameter.dtype is not torch.float32), None)
    if wrong is not None:
        raise TrainingError(f"parameter {wrong} is not float32; master weights are float32, whatever the compute dtype")
    heads = [parameter for name, parameter in named if name in tables]
    linear = [parameter for name, parameter in named if name not in tables and parameter.ndim >= 2]
    vectors = [parameter for name, parameter in named if name not in tables and parameter.ndim < 2]
    _require_some(heads, "head_rate", config.head_rate, "heads and embeddings")
    _require_some(vectors, "norm_rate", config.norm_rate, "norms and other vectors")
    muon = [parameter for parameter in linear if config.optimizer == "muon" and parameter.ndim == 2]
    taken = {id(parameter) for parameter in muon}
    split = any(isinstance(parameter, DTensor) for _, parameter in named)
    optimizers: dict[str, Optimizer] = {}
    if muon:
        optimizers["muon"] = _muon(muon, config, split)
    decay = config.weight_decay
    groups = [
        {"params": [p for p in linear if id(p) not in taken], "weight_decay": decay, RATE: 1.0},
        {"params": heads, "weight_decay": decay, RATE: config.head_rate},
        {"params": vectors, "weight_decay": 0.0, RATE: config.norm_rate},
    ]
    filled = [group for group in groups if group["params"]]
    if filled:
        optimizers["adamw"] = AdamW(filled, lr=config.learning_rate, betas=config.betas, fused=True)
    return optimizers


def _muon(matrices: list[nn.Parameter], config: TrainConfig, split: bool) -> Optimizer:
    device = matrices[0].device
    in_bfloat16 = multiplies_bfloat16(device)
    express = config.orthogonalisation == "polar_express"
    by_torch = in_bfloat16 and not split and device.type != "cpu" and not express
    optimizer = (Muon if by_torch else WholeMatrixMuon)(
        matrices,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        ns_steps=config.ns_steps,
        adjust_lr_fn="match_rms_adamw",
    )
    if isinstance(optimizer, WholeMatrixMuon):
        optimizer.dtype = torch.bfloat16 if in_bfloat16 else torch.float32
        optimizer.express = express
    optimizer.param_groups[0][RATE] = 1.0
    return optimizer


def _require_some(parameters: Collection[Tensor], name: str, rate: float, what: str) -> None:
    if rate != 1.0 and not parameters:
        raise TrainingError(f"train.{name} is {rate}, but the draft trains no {what}; leave {name} at 1")


def set_learning_rate(optimizers: Mapping[str, Optimizer], learning_rate: float) -> None:
    """Set the rate of every group before a step: so many times `learning_rate` as the group says."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group[RATE]


def schedule_factor(
    schedule: ScheduleName, step: int, total_steps: int, *, warmup_ratio: float, decay_ratio: float = 0.2
) -> float:
    """Share of the peak learning rate at optimizer step `step` (from 0) of `total_steps`.

    Warm-up rises linearly over the first ceil(warmup_ratio * total_steps) steps and reaches 1 at its last one. Then:
    linear falls to 0 at `total_steps`, cosine likewise along half a period, constant stays at 1, wsd stays at 1 and
    falls linearly over the last ceil(decay_ratio * total_steps) steps.
    """
    warmup = math.ceil(warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    first = warmup
    if schedule == "wsd":
        first = max(warmup, total_steps - math.ceil(decay_ratio * total_steps))
    if step < first:
        return 1.0
    progress = (step - first) / max(total_steps - first, 1)
    return (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress


def learning_rate_at(config: TrainConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0)."""
    factor = schedule_factor(
        config.schedule, step, total_steps, warmup_ratio=config.warmup_ratio, decay_ratio=config.decay_ratio
    )
    return config.learning_rate * factor


def clip_gradients(parameters: Iterable[Tensor], clip_norm: float) -> float:
    """Scale gradients so that their joint L2 norm is at most `clip_norm`; returns the norm before that."""
    return float(whole(nn.utils.clip_grad_norm_(parameters, clip_norm)))
