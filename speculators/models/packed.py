"""Weights of a frozen model in the order in which oneDNN multiplies by them, for long passes on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from speculators.models.hardware import multiplies_bfloat16
from speculators.models.layers import SKINNY_ROWS, SkinnyLinear

_PACKED_ROWS = 2048  # of a usual product: oneDNN's layout depends on their order of magnitude
# Classes of transformers whose forward is that of `PackedGatedMlp`.
_GATED_BY_SILU = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})


class PackedLinear(SkinnyLinear):
    """A frozen bfloat16 linear layer on a CPU with a copy of its weight as oneDNN multiplies by it.

    Without that, oneDNN puts the weight in order anew in each product. What has few rows or a gradient, or lies
    elsewhere, goes by the weight itself. A layer that is copied or pickled is a `SkinnyLinear` there.
    """

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
        """[..., in] -> [..., out]."""
        return self.product(input) if self.takes(input) else super().forward(input)

    def takes(self, hidden: Tensor) -> bool:
        """Whether the packed weight multiplies `hidden`."""
        rows = hidden.numel() // self.in_features
        here = hidden.dtype == torch.bfloat16 and hidden.device.type == "cpu"
        return here and rows not in SKINNY_ROWS and not torch.is_grad_enabled()

    def product(self, hidden: Tensor, activation: str = "none") -> Tensor:
        """The product by the packed weight, with oneDNN's `activation` ("swish" is SiLU) before it is rounded."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, activation, [], "")
        return out

    def times(self, hidden: Tensor, other: Tensor) -> Tensor:
        """The product by the packed weight, times `other`, rounded once."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(hidden, other, self.packed, self.bias, "mul")
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        # An opaque layout has no storage that could be copied.
        state = {name: value for name, value in self.__dict__.items() if name != "packed"}
        return object.__new__, (SkinnyLinear,), state


class PackedGatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)) of packed linear layers, which activate and multiply their products as they are made.

    A gate is rounded after its activation, not before, and the product of both once.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
        """[..., hidden] -> [..., hidden]."""
        gate, up = self.gate_proj, self.up_proj
        if isinstance(gate, PackedLinear) and isinstance(up, PackedLinear) and gate.takes(input):
            out: Tensor = self.down_proj(up.times(input, gate.product(input, "swish")))
        else:
            out = self.down_proj(self.act_fn(gate(input)) * up(input))
        return out


def pack_linears(module: nn.Module, most_bytes: int) -> bool:
    """Turn every `SkinnyLinear` inside `module` into a `PackedLinear`, in place; weights and names stay.

    Likewise the gated MLPs of transformers that are known to be down(silu(gate(x)) * up(x)) become `PackedGatedMlp`s.

    False, and nothing is changed, where the processor or torch has no such products, a weight is not bfloat16, or the
    copies would take more than `most_bytes`.
    """
    children = [child for child in module.modules() if type(child) is SkinnyLinear]
    weights = [child.weight for child in children]
    fit = sum(weight.nbytes for weight in weights) <= most_bytes
    if not (fit and _multiplies_packed() and all(_packable(weight) for weight in weights)):
        return False
    for child in children:
        # No buffer: its opaque layout is neither saved nor moved with the module.
        packed = torch.ops.mkldnn._reorder_linear_weight(child.weight.detach(), _PACKED_ROWS)
        object.__setattr__(child, "packed", packed)
        child.__class__ = PackedLinear
    for mlp in module.modules():
        if type(mlp).__name__ in _GATED_BY_SILU and isinstance(mlp.act_fn, SiLUActivation):
            mlp.__class__ = PackedGatedMlp
    return True


def _multiplies_packed() -> bool:
    known = all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    return known and multiplies_bfloat16(torch.device("cpu"))


def _packable(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and not weight.requires_grad
