"""The orthogonal part of a matrix by iterated polynomials, which is what Muon updates with."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from speculators.models.chunked_loss import even_bounds

# a, b, c of the odd polynomial a x + b x^3 + c x^5.
Quintic = tuple[float, float, float]

# Rows of a panel of a symmetric product: narrower ones are multiplied slower, more of them spare little.
_PANEL, _MOST_PANELS = 192, 4
# How many times wider than high a matrix is from which on two quintics at once spare time, and how many must be before.
_OBLONG, _LEAST_SINGLE = 1.5, 2
# The least that singular values end at which are not too small for the number of polynomials.
_GOAL = 0.7
# Smaller ones are rounding errors, whatever the dtype.
_LEAST = 1e-10
# What singular values are divided by before each polynomial but the last: above its interval one grows without bound,
# and in bfloat16 rounding takes some of them there.
MARGIN = 1.02


def orthogonalise(matrix: Tensor, quintics: Sequence[Quintic], eps: float, *, tight: bool = False) -> Tensor:
    """U p(S) Vᵀ of a matrix U S Vᵀ, p being the quintics one after another on singular values scaled to at most 1.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks"; a X + b (XX')X + c (XX')^2 X. The
    scale is the Frobenius norm, or with `tight` sqrt(|XX'|_F): that bounds the largest singular value better, since
    |XX'|_F^2 is the sum of their fourth powers, and takes no product that is not made anyway. `tight` also makes the
    last two of four or more quintics of an oblong matrix one factor (see `_two_at_once`).
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    single = len(quintics)
    if tight and single >= _LEAST_SINGLE + 2 and x.shape[1] >= _OBLONG * len(x):
        single -= 2
    for number, (a, b, c) in enumerate(quintics[:single]):
        gram = times_transposed(x)
        if tight and number == 0:
            square = gram.norm().clamp(min=eps)
            x, gram = x / square.sqrt(), gram / square
        x = torch.addmm(x, times_transposed(gram, plus=gram, beta=b, alpha=c), x, beta=a)
    if single < len(quintics):
        x = _two_at_once(times_transposed(x), *quintics[single:]) @ x
    return x.T if tall else x


def _two_at_once(gram: Tensor, first: Quintic, second: Quintic) -> Tensor:
    """The symmetric matrix by which two quintics change a matrix X, of which `gram` is XX'.

    Three more products of its size stand for two of X's. In bfloat16 that takes singular values which are not far
    apart: not those at the start, where the small ones drown.
    """
    factor = _even_part(gram, first)
    changed = symmetric_product(times_transposed(factor), gram)
    return symmetric_product(_even_part(changed, second), factor)


def _even_part(gram: Tensor, quintic: Quintic) -> Tensor:
    a, b, c = quintic
    factor = times_transposed(gram, plus=gram, beta=b, alpha=c)
    factor.diagonal().add_(a)
    return factor


def times_transposed(matrix: Tensor, plus: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """alpha matrix @ matrixᵀ + beta plus, the latter symmetric."""
    return symmetric_product(matrix, matrix.T, plus, beta, alpha)


def symmetric_product(
    left: Tensor, right: Tensor, plus: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """alpha left @ right + beta plus, where both are symmetric.

    On a CPU panel by panel below the diagonal: a third of the products mirrors another.
    """
    size = len(left)
    product = left.new_empty(size, size)
    split = left.device.type == "cpu" and size >= 2 * _PANEL
    bounds = even_bounds(size, max(_PANEL, -(-size // _MOST_PANELS)) if split else size)
    for low, high in pairwise(bounds):
        under, panel = product if plus is None else plus, product[low:high, :high]
        torch.addmm(under[low:high, :high], left[low:high], right[:, :high], beta=beta, alpha=alpha, out=panel)
    for low, high in pairwise(bounds[:-1]):
        product[low:high, high:] = product[high:, low:high].T
    return product


@cache
def polar_express(steps: int) -> list[Quintic]:
    """The quintics that bring singular values of at most 1, down to the least possible one, to 0.7..1.3.

    Each is the best one on the interval that those before it have left (Amsel et al., "The Polar Express",
    arXiv 2505.16932), so that fewer are needed than of one and the same.
    """
    low, high = _LEAST, _GOAL
    for _ in range(100):
        middle = sqrt(low * high)
        low, high = (low, middle) if _express(middle, steps)[1] >= _GOAL else (middle, high)
    *early, last = _express(high, steps)[0]
    return [*((a / MARGIN, b / MARGIN**3, c / MARGIN**5) for a, b, c in early), last]


def _express(least: float, steps: int) -> tuple[list[Quintic], float]:
    """The best quintics for singular values of `least` to 1, and the least value that they end at."""
    quintics, most = [], 1.0
    for _ in range(steps):
        a, b, c = best_quintic(least, most)
        quintics.append((a, b, c))
        # It errs by as much above 1 as below, and below first at the lower end.
        least = a * least + b * least**3 + c * least**5
        most = 2 - least
    return quintics, least


def best_quintic(least: float, most: float) -> Quintic:
    """The odd quintic nearest to 1, by its largest error, on [least, most] with 0 < least < most.

    Remez: its error has one size and alternating signs at both ends and at its two extrema between them.
    """
    if most - least < 1e-3:
        # The limit for an interval at 1, where the system below is singular: Newton and Schulz's.
        return 15 / 8, -10 / 8, 3 / 8
    inner = (3 * least + most) / 4, (least + 3 * most) / 4
    coefficients, error = (0.0, 0.0, 0.0), 0.0
    for _ in range(100):
        before, places = error, np.array([least, *inner, most])
        signs = np.array([1.0, -1.0, 1.0, -1.0])
        system = np.stack((places, places**3, places**5, signs), axis=1)
        a, b, c, error = np.linalg.solve(system, np.ones(4)).tolist()
        coefficients = a, b, c
        if abs(error - before) <= 1e-14:
            break
        root = sqrt(9 * b * b - 20 * a * c)
        inner = sqrt((-3 * b - root) / (10 * c)), sqrt((-3 * b + root) / (10 * c))
    return coefficients
