"""Verification rules in numpy, one row and one token at a time, as their definitions read; independent of the package.

Of a row: `p` [K+1, V] and `q` [K, V] (None: one-hot drafts), the drafts `x`, the coins `u` and the noise `e` of the
token after them. Each returns what is emitted.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def ratio(p: Floats, q: Floats | None, x: list[int], i: int) -> float:
    """p(x) / q(x) at position i, 0 where the draft cannot have been drawn."""
    below = 1.0 if q is None else float(q[i, x[i]])
    return float(p[i, x[i]]) / below if below > 0 else 0.0


def race(weights: Floats, e: Floats) -> int:
    """A draw from the normalised weights."""
    return int(np.argmax(weights / e))


def residual(p: Floats, q: Floats | None, x: list[int], i: int, share: float = 1.0) -> Floats:
    """max(share * p - q, 0) at position i, q being 1 at x and 0 elsewhere where drafts are one-hot."""
    drafted = np.eye(p.shape[1])[x[i]] if q is None else q[i]
    return np.maximum(share * p[i] - drafted, 0)


def after(p: Floats, q: Floats | None, x: list[int], kept: int, e: Floats, share: float = 1.0) -> list[int]:
    """The kept drafts and one token more."""
    if kept == len(x):
        return [*x, race(p[kept], e)]
    left = residual(p, q, x, kept, share)
    if q is None:
        # Of the smaller residual of a share no more remains than the verifier's law without the draft.
        left = np.where(np.arange(p.shape[1]) == x[kept], 0, p[kept])
    return [*x[:kept], race(left if left.max() > 0 else p[kept], e)]


def standard(p: Floats, q: Floats | None, x: list[int], u: Floats, e: Floats, tolerance: Floats | None = None):
    """Leviathan et al.; with a tolerance, vLLM-Ascend's entropy rule."""
    kept = 0
    for i in range(len(x)):
        coin = u[i] if tolerance is None else tolerance[i] * u[i]
        if not coin < ratio(p, q, x, i):
            break
        kept += 1
    return after(p, q, x, kept, e)


def block_shares(p: Floats, q: Floats | None, x: list[int]) -> list[float]:
    """P_0 .. P_K."""
    found = [1.0]
    for i in range(len(x)):
        found.append(min(found[-1] * ratio(p, q, x, i), 1.0))
    return found


def block(p: Floats, q: Floats | None, x: list[int], u: Floats, e: Floats) -> list[int]:
    """Sun et al., algorithm 2."""
    share = block_shares(p, q, x)
    kept = 0
    for i in range(1, len(x) + 1):
        if i == len(x):
            threshold = share[i]
        else:
            mass = residual(p, q, x, i, share[i]).sum()
            threshold = mass / (mass + 1 - share[i]) if mass + 1 - share[i] > 0 else 1.0
        if u[i - 1] < threshold:
            kept = i
    return after(p, q, x, kept, e, share[kept])


def ascend_block(p: Floats, q: Floats | None, x: list[int], u: Floats, e: Floats, tolerance: Floats | None = None):
    """vLLM-Ascend's block rule."""
    kept, left, coins = 0, 1.0, 1.0
    for i in range(len(x)):
        left *= min(ratio(p, q, x, i), 1.0)
        coins *= u[i]
        if coins * (1.0 if tolerance is None else tolerance[i]) < left:
            kept = i + 1
    return after(p, q, x, kept, e, block_shares(p, q, x)[kept])


def synthetic(p: Floats, q: Floats | None, x: list[int], u: Floats, e: Floats, rates: list[float]) -> list[int]:
    """A coin a draft."""
    kept = 0
    while kept < len(x) and u[kept] < rates[kept]:
        kept += 1
    return after(p, q, x, kept, e)


def tolerances(logits: Floats, threshold: float, alpha: float) -> Floats:
    """min(exp(-alpha H), threshold) a position, H being the entropy of the raw logits."""
    law = np.exp(logits - logits.max(-1, keepdims=True))
    law /= law.sum(-1, keepdims=True)
    return np.minimum(np.exp(alpha * (law * np.log(law + 1e-10)).sum(-1)), threshold)
