"""Which places a P-EAGLE draft is trained at: conditional drop (COD) sampling, nested from depth to depth.

An element (a, d) stands for the slot d behind the verified position a. Shape suffixes: C context positions, N elements
of depth 0, R elements of one depth, K depths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kept_sizes(num_valid: int, num_depths: int, ratio: float, smallest: float) -> list[int]:
    """How many of a document's `num_valid` elements are kept at each depth, or fewer where fewer have ancestors.

    At depth 0 all, at depth d int((num_valid - d) * max(ratio^d, smallest)); source: arXiv 2602.01469, after PARD.
    """
    shares = [max(ratio**depth, smallest) for depth in range(num_depths)]
    return [max(int((num_valid - depth) * share), 0) for depth, share in enumerate(shares)]


def sample_anchors(counted_KC: Tensor, document_lengths: Sequence[int], ratio: float, smallest: float) -> list[Tensor]:
    """Draw the anchors of each depth, int64 [R] ascending; those of a depth are among those of the depth before.

    `counted_KC` (bool) says where an anchor's element of depth k has something to learn. Every document is sampled by
    itself, `kept_sizes` of those elements whose ancestors were kept. Which ones are drawn from torch's global CPU
    generator, one number a depth-0 element: keeping the smallest numbers of those that are left is, depth by depth, a
    uniform draw.
    """
    device = counted_KC.device
    anchors_N = torch.nonzero(counted_KC[0]).squeeze(1)
    drawn_N = torch.rand(len(anchors_N)).to(device)
    lengths = torch.tensor(document_lengths, dtype=torch.int64, device=device)
    document_N = torch.arange(len(lengths), device=device).repeat_interleave(lengths)[anchors_N]
    valid = torch.bincount(document_N, minlength=len(lengths)).tolist()
    sizes = torch.tensor([kept_sizes(count, len(counted_KC), ratio, smallest) for count in valid], device=device)
    # By document, and in each by the number drawn.
    order_N = drawn_N.argsort(stable=True)
    order_N = order_N[document_N[order_N].argsort(stable=True)]
    document_N, places_N = document_N[order_N], anchors_N[order_N]
    kept_N, anchors = torch.ones_like(document_N, dtype=torch.bool), []
    for depth, counted_C in enumerate(counted_KC):
        kept_N = kept_N & counted_C[places_N]
        kept_N = kept_N & (_rank(kept_N, document_N) < sizes[document_N, depth])
        anchors.append(places_N[kept_N].sort().values)
    return anchors


def _rank(chosen_N: Tensor, document_N: Tensor) -> Tensor:
    """How many elements of the same document are chosen before each, int64 [N]; documents lie one after another."""
    before_N = chosen_N.cumsum(0) - chosen_N.long()
    starts = torch.searchsorted(document_N, document_N)
    return before_N - before_N[starts]
