"""A moving average of the weights, which is often better than the weights themselves where the rate is still high."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


def decay_at(decay: float, updates: int) -> float:
    """How much of the average is kept at an update, n = `updates` (from 0) having been made.

    min(decay, (1 + n) / (10 + n)): the ramp keeps fresh random weights out of the average of a short run. Source:
    `num_updates` of TensorFlow's `tf.train.ExponentialMovingAverage`.
    """
    return min(decay, (1 + updates) / (10 + updates))


class AveragedWeights:
    """An exponential moving average of parameters: `average += (1 - decay) (parameter - average)` after every step.

    `values` are the averages by name: float32, and split over processes where the parameters are.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self._parameters = parameters
        self._decay = decay
        self.values = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Take in the parameters of one more step, `updates` (from 0) having been taken in before."""
        weight = 1 - decay_at(self._decay, updates)
        for name, average in self.values.items():
            average.lerp_(self._parameters[name].detach(), weight)

    @contextmanager
    def in_place(self, changed: Callable[[], None]) -> Iterator[None]:
        """The parameters have the averages' values as long as this lasts; `changed` is called whenever they got others.

        They get their own back to the bit, after an exception too. No second copy is made but of one tensor at a time.
        """
        self._swap()
        changed()
        try:
            yield
        finally:
            self._swap()
            changed()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, average in self.values.items():
            parameter = self._parameters[name]
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)
