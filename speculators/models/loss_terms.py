"""The table of losses between a draft's distribution q and its verifier's p, each with its gradient by hand.

With z the draft's logits and g the derivative by q, the derivative by z is q (g - sum q g). Shape suffixes: R rows,
D draft vocabulary. Sums run over the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import log

import torch
from torch import Tensor

# lk_hybrid moves from the divergence to total variation at this rate, as its rows come to be accepted.
LK_RATE = 3.0
# nla's loss of a row that can never be accepted is -log of this.
NLA_FLOOR = 1e-5
# Of the verifier's likeliest tokens, how many top10_ce counts.
TOP_TOKENS = 10


class Distributions:
    """q and p of some rows, from log q and log p [R, D] and p's likeliest token [R]; what is asked for is kept."""

    def __init__(self, log_q_RD: Tensor, log_p_RD: Tensor, label_R: Tensor) -> None:
        self.log_q, self.log_p, self.label_R1 = log_q_RD, log_p_RD, label_R[:, None]

    @cached_property
    def q(self) -> Tensor:
        """The draft's probabilities."""
        return self.log_q.exp()

    @cached_property
    def p(self) -> Tensor:
        """The verifier's probabilities."""
        return self.log_p.exp()

    @cached_property
    def log_mean(self) -> Tensor:
        """log((p + q) / 2)."""
        return torch.logaddexp(self.log_p, self.log_q) - log(2)

    @cached_property
    def total_variation(self) -> Tensor:
        """1/2 sum |p - q|, [R]."""
        sums: Tensor = torch.linalg.vector_norm(self.q - self.p, ord=1, dim=-1)
        return sums / 2

    @cached_property
    def overlap(self) -> Tensor:
        """sum min(p, q), [R]: the probability that a drawn draft token is accepted, 1 - total variation."""
        return torch.minimum(self.p, self.q).sum(-1)

    @cached_property
    def overlap_gradient(self) -> Tensor:
        """By the logits: q (s - sum q s), where s = 1 at q < p and 0 elsewhere."""
        gained = self.q * (self.q < self.p)
        return gained - self.q * gained.sum(-1, keepdim=True)

    @cached_property
    def cross_entropy(self) -> Tensor:
        """-log q of the verifier's likeliest token, [R]."""
        return -self.log_q.gather(-1, self.label_R1).squeeze(-1)


@dataclass(frozen=True)
class Term:
    """One loss: its value a row [R], and its gradient by the draft's logits [R, D] (a new tensor)."""

    loss: Callable[[Distributions], Tensor]
    gradient: Callable[[Distributions], Tensor]


def _kl_div(rows: Distributions) -> Tensor:
    """sum p (log p - log q)."""
    return (rows.p * (rows.log_p - rows.log_q)).sum(-1)


def _kl_div_gradient(rows: Distributions) -> Tensor:
    return rows.q - rows.p


def _reverse_kl(rows: Distributions) -> Tensor:
    """sum q (log q - log p)."""
    return (rows.q * (rows.log_q - rows.log_p)).sum(-1)


def _reverse_kl_gradient(rows: Distributions) -> Tensor:
    return _centred(rows.q, rows.log_q - rows.log_p)


def _js(rows: Distributions) -> Tensor:
    """1/2 KL(p, m) + 1/2 KL(q, m), m = (p + q) / 2."""
    of_p = rows.p * (rows.log_p - rows.log_mean)
    return of_p.add_(rows.q * (rows.log_q - rows.log_mean)).sum(-1) / 2


def _js_gradient(rows: Distributions) -> Tensor:
    return _centred(rows.q, rows.log_q - rows.log_mean).div_(2)


def _cross_entropy(rows: Distributions) -> Tensor:
    return rows.cross_entropy


def _cross_entropy_gradient(rows: Distributions) -> Tensor:
    gradient = rows.q.clone()
    return gradient.scatter_add_(-1, rows.label_R1, gradient.new_full(rows.label_R1.shape, -1.0))


def _total_variation(rows: Distributions) -> Tensor:
    return rows.total_variation


def _total_variation_gradient(rows: Distributions) -> Tensor:
    return -rows.overlap_gradient


def _lk_hybrid(rows: Distributions) -> Tensor:
    """l KL(p, q) + (1 - l) TV, l = exp(-3 (1 - TV)) taken as a constant."""
    return torch.lerp(rows.total_variation, _kl_div(rows), _divergence_share(rows))


def _lk_hybrid_gradient(rows: Distributions) -> Tensor:
    return torch.lerp(_total_variation_gradient(rows), _kl_div_gradient(rows), _divergence_share(rows)[:, None])


def _divergence_share(rows: Distributions) -> Tensor:
    return torch.exp(-LK_RATE * (1 - rows.total_variation))


def _negative_log_acceptance(rows: Distributions) -> Tensor:
    """-log(max(overlap, 1e-5))."""
    return -torch.log(rows.overlap.clamp_min(NLA_FLOOR))


def _negative_log_acceptance_gradient(rows: Distributions) -> Tensor:
    inverse_R = torch.where(rows.overlap < NLA_FLOOR, 0.0, 1 / rows.overlap.clamp_min(NLA_FLOOR))
    return -(rows.overlap_gradient * inverse_R[:, None])


def _soft_cross_entropy(rows: Distributions) -> Tensor:
    """-sum p log q: kl_div and the verifier's entropy, so that both have one gradient."""
    return -(rows.p * rows.log_q).sum(-1)


def _top_cross_entropy(rows: Distributions) -> Tensor:
    """-sum p log q over the verifier's ten likeliest tokens (HASS, arXiv 2408.15766)."""
    top_RK = _top_tokens(rows)
    return -(rows.p.gather(-1, top_RK) * rows.log_q.gather(-1, top_RK)).sum(-1)


def _top_cross_entropy_gradient(rows: Distributions) -> Tensor:
    top_RK = _top_tokens(rows)
    p_RK = rows.p.gather(-1, top_RK)
    return (rows.q * p_RK.sum(-1, keepdim=True)).scatter_add_(-1, top_RK, -p_RK)


def _top_tokens(rows: Distributions) -> Tensor:
    return rows.log_p.topk(min(TOP_TOKENS, rows.log_p.shape[-1]), sorted=False).indices


def _centred(q_RD: Tensor, derivative_RD: Tensor) -> Tensor:
    """q (g - sum q g); overwrites g."""
    mean_R1 = torch.linalg.vecdot(q_RD, derivative_RD)[:, None]
    return derivative_RD.sub_(mean_R1).mul_(q_RD)


TERMS: dict[str, Term] = {
    "kl_div": Term(_kl_div, _kl_div_gradient),
    "reverse_kl": Term(_reverse_kl, _reverse_kl_gradient),
    "js": Term(_js, _js_gradient),
    "ce": Term(_cross_entropy, _cross_entropy_gradient),
    "tv": Term(_total_variation, _total_variation_gradient),
    "lk_hybrid": Term(_lk_hybrid, _lk_hybrid_gradient),
    "nla": Term(_negative_log_acceptance, _negative_log_acceptance_gradient),
    "soft_ce": Term(_soft_cross_entropy, _kl_div_gradient),
    "top10_ce": Term(_top_cross_entropy, _top_cross_entropy_gradient),
}
