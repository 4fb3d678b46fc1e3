"""How likely drafts are to be accepted, learnt while serving, for drafts without a confidence head."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGEST_FEATURE = 40.0
_RIDGE = 1e-3
_DAMPING = 50
_NEWTON_STEPS = 6
_MOST_HALVINGS = 30


class AcceptanceEstimator:
    """Logistic regression of acceptance on the draft's own certainty, one bias a position, refitted as requests run.

    A draft at position i whose likeliest token had probability p is accepted, once those before it were, with
    probability sigmoid(w logit(p) + b_i). Every `interval` steps, w >= 0 and the biases are fitted to the last
    `memory` outcomes of each position by Newton's method (iteratively reweighted least squares) with ridge 1e-3;
    parameters go n / (n + 50) of the way there, where n outcomes speak of them.
    """

    def __init__(self, num_positions: int, *, interval: int = 100, memory: int = 1024) -> None:
        self.slope = 0.5
        self.bias_K = torch.full((num_positions,), -0.2, dtype=torch.float64)
        self._interval, self._steps = interval, 0
        self._seen: list[deque[tuple[float, bool]]] = [deque(maxlen=memory) for _ in range(num_positions)]

    def features(self, top_probs_BK: Tensor) -> Tensor:
        """Logits of probabilities, float64, within [-40, 40]."""
        return top_probs_BK.double().logit().clamp(-_LARGEST_FEATURE, _LARGEST_FEATURE)

    def predict(self, features_BK: Tensor) -> Tensor:
        """How likely each draft is to be accepted once those before it were, [B, K] float64."""
        return torch.sigmoid(self.slope * features_BK + self.bias_K[: features_BK.shape[1]])

    def learn(self, features_L: list[float], num_accepted: int) -> None:
        """Take notice that of L verified drafts the first `num_accepted` were accepted.

        The one after them was refused; nothing is known about those that follow it.
        """
        for position, feature in enumerate(features_L[: num_accepted + 1]):
            self._seen[position].append((feature, position < num_accepted))

    def step(self) -> None:
        """Count a verification; refit when it is time."""
        self._steps += 1
        if self._steps % self._interval == 0:
            self._refit()

    def _refit(self) -> None:
        counts_K = torch.tensor([len(seen) for seen in self._seen], dtype=torch.float64)
        if not counts_K.any():
            return
        outcomes = _Outcomes.of(self._seen)
        fitted = torch.cat([torch.tensor([self.slope], dtype=torch.float64), self.bias_K])
        for _ in range(_NEWTON_STEPS):
            fitted = outcomes.nearer(fitted)
        share_K = counts_K / (counts_K + _DAMPING)
        share = float(counts_K.sum() / (counts_K.sum() + _DAMPING))
        self.slope += share * (float(fitted[0]) - self.slope)
        self.bias_K += share_K * (fitted[1:] - self.bias_K)


@dataclass(frozen=True)
class _Outcomes:
    """Features, outcomes (1 accepted, 0 refused) and positions of N drafts; P = 1 + K parameters, the slope first."""

    x_N: Tensor
    y_N: Tensor
    at_N: Tensor

    @classmethod
    def of(cls, seen: Sequence[Sequence[tuple[float, bool]]]) -> "_Outcomes":
        """Outcomes that were kept a position."""
        rows = [(x, float(y), position) for position, kept in enumerate(seen) for x, y in kept]
        x, y, at = zip(*rows, strict=True)
        return cls(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64), torch.tensor(at))

    def nearer(self, fitted_P: Tensor) -> Tensor:
        """One Newton step towards the likeliest parameters, halved until it makes the outcomes likelier."""
        step_P, before = self._newton_step(fitted_P), self._loss(fitted_P)
        for halvings in range(_MOST_HALVINGS):
            moved_P = fitted_P + step_P * 0.5**halvings
            moved_P[0] = moved_P[0].clamp(min=0.0)
            if self._loss(moved_P) < before:
                return moved_P
        return fitted_P

    def _logits(self, fitted_P: Tensor) -> Tensor:
        return fitted_P[0] * self.x_N + fitted_P[1:][self.at_N]

    def _loss(self, fitted_P: Tensor) -> float:
        return float(F.binary_cross_entropy_with_logits(self._logits(fitted_P), self.y_N, reduction="sum"))

    def _newton_step(self, fitted_P: Tensor) -> Tensor:
        p_N = torch.sigmoid(self._logits(fitted_P))
        weight_N, error_N = p_N * (1 - p_N), self.y_N - p_N

        def by_position(values_N: Tensor) -> Tensor:
            return torch.zeros(len(fitted_P) - 1, dtype=torch.float64).index_add_(0, self.at_N, values_N)

        slope_part = (weight_N * self.x_N * self.x_N).sum()[None]
        hessian_PP = torch.diag(torch.cat([slope_part, by_position(weight_N)]) + _RIDGE)
        hessian_PP[0, 1:] = hessian_PP[1:, 0] = by_position(weight_N * self.x_N)
        gradient_P = torch.cat([(error_N * self.x_N).sum()[None], by_position(error_N)])
        step_P: Tensor = torch.linalg.solve(hessian_PP, gradient_P)
        return step_P
