"""Parameters that may lie in parts on several processes (torch's FSDP2): whole ones made of them, and back.

What is said to be a collective must be called by every process, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def shard(module: nn.Module, device: torch.device, world_size: int) -> FSDPModule:
    """Split every parameter of a module over all processes, from now on; a collective.

    The module is one unit: its parameters are whole from the beginning of its forward to the end of its backward.
    """
    mesh = init_device_mesh(device.type, (world_size,))
    # Its backward follows at once, and then they are split again.
    sharded: FSDPModule = fully_shard(module.to(device), mesh=mesh, reshard_after_forward=False)
    return sharded


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, of which this process may have a part; a collective where it is split."""
    if not isinstance(tensor, DTensor):
        return tensor
    found: Tensor = tensor.full_tensor()
    return found


def part_like(value: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor that every process has, lying as `like` does."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def whole_state(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's `state_dict` of whole tensors on the CPU; a collective."""
    found = optimizer.state_dict()
    states = {
        index: {name: _on_cpu(value) if isinstance(value, Tensor) else value for name, value in state.items()}
        for index, state in found["state"].items()
    }
    return {**found, "state": states}


def load_whole_state(optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Put what `whole_state` gave back, in parts where the parameters are split."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        index: {
            name: part_like(value, parameters[index]) if _is_moment(value, parameters[index]) else value
            for name, value in state.items()
        }
        for index, state in given["state"].items()
    }
    optimizer.load_state_dict({**given, "state": states})


def _is_moment(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _on_cpu(value: Tensor) -> Tensor:
    return whole(value.detach()).to("cpu")
