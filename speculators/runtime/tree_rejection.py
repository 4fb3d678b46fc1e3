"""Verification of drafted trees: which path is kept, and which token follows it.

The readable reference. Shapes: B rows, T tokens of a window (the last verified token, then the drafts), S tokens of a
path, V verifier vocabulary. `window_ids_BT` int64 are the window's tokens, `parents_BT` int64 the place that each one
continues (-1 for place 0 and for padding); siblings differ, and stand in the order in which they are tried. `levels` is
how many drafts the longest path has.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.runtime.rejection import draw

Passes = Callable[[Tensor, Tensor], Tensor]


@dataclass
class TreeVerification:
    """Outcome of one verification.

    `places_BS` [B, levels + 1] int64 are those of the last token and of the drafts kept after it, `num_accepted_B` of
    them (padding repeats the last one); `last_B` int64 is the token that follows.
    """

    places_BS: Tensor
    num_accepted_B: Tensor
    last_B: Tensor


def verify_tree_greedy(
    target_ids_BT: Tensor, window_ids_BT: Tensor, parents_BT: Tensor, levels: int
) -> TreeVerification:
    """Keep the path on which each draft is the verifier's argmax before it, `target_ids_BT`; then emit the next one."""

    def passes(at_B: Tensor, child_BT: Tensor) -> Tensor:
        return child_BT & (window_ids_BT == target_ids_BT.gather(1, at_B[:, None]))

    places_BS, num_accepted_B = _descend(parents_BT, levels, passes)
    return TreeVerification(places_BS, num_accepted_B, target_ids_BT.gather(1, places_BS[:, -1:])[:, 0])


def verify_tree(
    law_after: Callable[[Tensor], Tensor],
    window_ids_BT: Tensor,
    parents_BT: Tensor,
    levels: int,
    accept_uniform_BT: Tensor,
    sample_noise_BV: Tensor,
) -> TreeVerification:
    """Recursive rejection sampling that leaves the verifier's distribution unchanged (SpecInfer, arXiv 2305.09781).

    `law_after(at_B)` gives the law [B, V] that the verifier samples from after place at_B of each row. From the last
    token on, siblings are tried one after another: each is one-hot, so x is kept with probability p(x); where it is
    rejected, p loses x and is normalised again. Children of a kept draft are tried next; where none is left, the token
    is drawn from what remains of p. `accept_uniform_BT` is U[0, 1) in float64, `sample_noise_BV` Exp(1).
    """

    def passes(at_B: Tensor, child_BT: Tensor) -> Tensor:
        law_BV = law_after(at_B).double()
        p_BT = law_BV.gather(1, window_ids_BT) * child_BT
        left_BT = law_BV.sum(1, keepdim=True) - (p_BT.cumsum(1) - p_BT)
        return child_BT & (accept_uniform_BT * left_BT < p_BT)

    places_BS, num_accepted_B = _descend(parents_BT, levels, passes)
    at_B = places_BS[:, -1]
    law_BV = law_after(at_B).double()
    tried_BV = torch.zeros_like(law_BV).scatter_add(1, window_ids_BT, _children(parents_BT, at_B).double()) > 0
    left_BV = law_BV.masked_fill(tried_BV, 0.0)
    # Where rounding alone has rejected the last sibling, nothing is left.
    weight_BV = torch.where((left_BV > 0).any(1, keepdim=True), left_BV, law_BV)
    return TreeVerification(places_BS, num_accepted_B, draw(weight_BV, sample_noise_BV))


def _children(parents_BT: Tensor, at_B: Tensor) -> Tensor:
    return parents_BT == at_B[:, None]


def _descend(parents_BT: Tensor, levels: int, passes: Passes) -> tuple[Tensor, Tensor]:
    """Go from place 0 to the first child that passes, as long as there is one; returns the path and its drafts.

    `passes(at_B, child_BT)` says which of the children of places `at_B` do, bool [B, T]; asked again about the same
    place, it says the same.
    """
    places = [torch.zeros(len(parents_BT), dtype=torch.int64, device=parents_BT.device)]
    for _ in range(levels):
        passed_BT = passes(places[-1], _children(parents_BT, places[-1]))
        places.append(torch.where(passed_BT.any(1), passed_BT.long().argmax(1), places[-1]))
    places_BS = torch.stack(places, 1)
    return places_BS, (places_BS[:, 1:] != places_BS[:, :-1]).sum(1)
