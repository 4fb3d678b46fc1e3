"""The definitions of the losses, on dense logits: what tests of the chunked and of the fused ones compare with."""

from collections.abc import Callable

import torch
from torch import Tensor

from speculators.models.losses import Head

ROWS = torch.tensor([4, 0, 3, 3, 6, 4, 4, 1])  # verifier rows 2 and 5 are compared with nothing


def divergence(one: Tensor, other: Tensor) -> Tensor:
    return (one * (one.log() - other.log())).sum(-1)


def variation(q: Tensor, p: Tensor) -> Tensor:
    return (p - q).abs().sum(-1) / 2


def hybrid(q: Tensor, p: Tensor) -> Tensor:
    share = torch.exp(-3 * (1 - variation(q, p).detach()))
    return share * divergence(p, q) + (1 - share) * variation(q, p)


def top_ten(q: Tensor, p: Tensor) -> Tensor:
    counted = p >= p.sort(-1, descending=True).values[:, min(10, p.shape[1]) - 1, None]
    return -(p * q.log() * counted).sum(-1)


DEFINITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl_div": lambda q, p: divergence(p, q),
    "reverse_kl": lambda q, p: divergence(q, p),
    "js": lambda q, p: divergence(p, (p + q) / 2) / 2 + divergence(q, (p + q) / 2) / 2,
    "ce": lambda q, p: -q.log()[torch.arange(len(q)), p.argmax(-1)],
    "tv": variation,
    "lk_hybrid": hybrid,
    "nla": lambda q, p: -torch.log((1 - variation(q, p)).clamp_min(1e-5)),
    "soft_ce": lambda q, p: -(p * q.log()).sum(-1),
    "top10_ce": top_ten,
}


def logits_of(hidden: Tensor, head: Head) -> Tensor:
    logits = head.scale * (hidden @ head.weight.T)
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def dense(
    weights: dict[str, float], hidden: Tensor, draft: Head, teacher_hidden: Tensor, teacher: Head, rows: Tensor = ROWS
) -> Tensor:
    """The losses as sums over probabilities of all rows at once."""
    q = logits_of(hidden, draft).softmax(-1)
    p = logits_of(teacher_hidden, teacher).softmax(-1)[rows]
    return sum(weight * DEFINITIONS[name](q, p) for name, weight in weights.items())
