"""Layers of transformers' own models that read one token after another, over a slot cache or over sequences in a row.

What such a layer computes is its own; where its states lie, and which tokens they have read, is said by
`SlotKeyValues` or by `branching`. Shape suffixes: B rows, T tokens, H hidden, C channels taken in of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from speculators.models.attention_interface import SlotKeyValues, current_branches
from speculators.models.branches import Branches


class ReadTokens(Protocol):
    """What a recurrence reads of some tokens."""

    @property
    def count(self) -> int:
        """How many they are, T."""
        ...

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same change of every tensor, all of which begin with [B, T]."""
        ...

    def only(self, valid_BT: Tensor) -> Self:
        """The same, but tokens that are not valid leave the state as it is."""
        ...


Tokens = TypeVar("Tokens", bound=ReadTokens)


class SlotLayer(ABC):
    """One layer of transformers, cut where what it keeps goes in and comes out."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    @property
    def context(self) -> int:
        """Tokens before one that the layer's convolution sees."""
        return int(self.module.conv_kernel_size) - 1

    @abstractmethod
    def over_slots(self, hidden_BTH: Tensor, slots: SlotKeyValues) -> Tensor:
        """One write of a slot cache, [B, T, H] -> [B, T, H]."""

    @abstractmethod
    def over_branches(self, hidden_1TH: Tensor, branches: Branches) -> Tensor:
        """Whole sequences in one row: what all begin with is read once, and each goes on from there."""

    def branch_inputs(self, inputs_1TC: Tensor, branches: Branches) -> tuple[Tensor | None, list[Tensor], Tensor]:
        """Inputs of what all sequences begin with (None: nothing) and of the rest of each; and those of the filling.

        Each is behind the `context` inputs before it, which are zeros at the beginning.
        """
        before = inputs_1TC.new_zeros(1, self.context, inputs_1TC.shape[2])
        shared, *rest, filling = inputs_1TC.split([branches.shared, *branches.lengths, branches.filling], 1)
        joined = torch.cat([before, shared], 1)
        before = joined[:, joined.shape[1] - self.context :]
        return joined if branches.shared else None, [torch.cat([before, one], 1) for one in rest], filling

    def take_over(self) -> None:
        """Run in the place of the module's own forward where there is a slot cache or a row of branches."""
        # As an attribute of the instance it is what `nn.Module.__call__` runs.
        vars(self.module)["forward"] = partial(_forward, self, self.module.forward)


def _forward(layer: SlotLayer, original: Callable[..., Tensor], hidden_states: Tensor, **options: Any) -> Tensor:
    branches = current_branches()
    if branches is not None:
        return layer.over_branches(hidden_states, branches)
    cache = options.get("cache", options.get("cache_params"))  # the latter in transformers before 5.24
    if isinstance(cache, SlotKeyValues):
        return layer.over_slots(hidden_states, cache)
    return original(hidden_states, **options)


class RecurrentLayer(SlotLayer, Generic[Tokens]):
    """A convolution over a few tokens, and a recurrence behind it whose state is float32."""

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a row's state."""

    @abstractmethod
    def project(self, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """What is taken in of each token, [B, T, C], and what gates the output."""

    @abstractmethod
    def convolve(self, joined_BTC: Tensor) -> Tokens:
        """The tokens behind the first `context`, as the recurrence reads them."""

    @abstractmethod
    def recur(self, tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [B, T, ...] and the state behind the last token."""

    @abstractmethod
    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """Outputs of the recurrence -> [B, T, H]."""

    def over_slots(self, hidden_BTH: Tensor, slots: SlotKeyValues) -> Tensor:
        """One write: what waits of it and before it is read by the state first, and open tokens leave it as it is."""
        layer, plan, states = self.module.layer_idx, slots.state_plan, slots.running
        inputs_BTC, gate = self.project(hidden_BTH)
        joined = states.joined(layer, plan, inputs_BTC, self.context)
        tokens = self.convolve(joined)
        state = states.state(layer, plan, self.state_shape)
        outputs = []
        if plan.num_settled:
            settled = tokens.map(lambda x: x[:, : plan.num_settled]).only(plan.settled_BT)
            out, new_state = self.recur(settled, state)
            state.copy_(new_state)
            outputs.append(out)
        if plan.num_open:
            places_BT = plan.open_BT.clamp(max=tokens.count - 1)
            outputs.append(self.recur(tokens.map(lambda x: x[plan.batch, places_BT]), state)[0])
        states.keep(layer, plan, joined, self.context)
        return self.finish(torch.cat(outputs, 1)[plan.batch, plan.outputs_BT], gate)

    def over_branches(self, hidden_1TH: Tensor, branches: Branches) -> Tensor:
        """Whole sequences in one row: what all begin with is read once, and each goes on from there."""
        inputs_1TC, gate = self.project(hidden_1TH)
        shared, rest, filling = self.branch_inputs(inputs_1TC, branches)
        state = hidden_1TH.new_zeros((1, *self.state_shape), dtype=torch.float32)
        outputs = []
        if shared is not None:
            out, state = self.recur(self.convolve(shared), state)
            outputs.append(out)
        outputs += [self.recur(self.convolve(one), state)[0] for one in rest]
        outputs.append(outputs[0].new_zeros(1, filling.shape[1], *outputs[0].shape[2:]))
        return self.finish(torch.cat(outputs, 1), gate)
