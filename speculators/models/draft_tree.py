"""Trees of drafts: several continuations of a row at once, side by side in a slot cache.

A tree is a list of nodes in which each one stands after the node that it continues. Shape suffixes: B rows, D draft
vocabulary, F nodes of a level that are continued, K children of each, P nodes that were made, N nodes that are kept, T
tokens of a write, A places of a tree in the cache, E keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.models.cache import SlotWrite


@dataclass(frozen=True)
class TreeShape:
    """How large trees are: children of a node and nodes continued a level (`top_k`), levels, and nodes that are kept.

    `depth` counts drafts on the longest path, `total_token` all drafts of a tree.
    """

    top_k: int
    depth: int
    total_token: int


def depths_of(parents: Sequence[int]) -> list[int]:
    """The level of each node, from 1 on; `parents` are places in the same list, -1 for a node of level 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def paths_of(token_ids: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The tokens on the way to each node, its own the last."""
    paths: list[list[int]] = []
    for token, parent in zip(token_ids, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
    return paths


@dataclass(kw_only=True)
class TreeWrite(SlotWrite):
    """A write of tokens of trees, which stand in the cache one after another but see only the path that they continue.

    A row's tree begins at place `firsts[b]`; every token sees all places before it, and of the A places from there on
    those where `seen_BTA` (bool) is true. `depths_BA` int64 are their levels, from 0 on, `positions_BT` those of the
    tokens written, counted from the beginning of the row.
    """

    firsts: list[int]
    seen_BTA: Tensor
    depths_BA: Tensor

    @classmethod
    def of(cls, rows: slice, firsts: Sequence[int], seen_BTA: Tensor, depths_BA: Tensor) -> TreeWrite:
        """Plan a write of the last T of the A tokens that the trees have then."""
        _, width, places = seen_BTA.shape
        first_B1 = torch.tensor(list(firsts), device=seen_BTA.device)[:, None]
        return cls(
            rows,
            [first + places - width for first in firsts],
            width,
            max(firsts) + places,
            first_B1 + depths_BA[:, places - width :],
            firsts=list(firsts),
            seen_BTA=seen_BTA,
            depths_BA=depths_BA,
        )

    @property
    def places_BT(self) -> Tensor:
        """Where in the cache each token is written, int64."""
        starts_B1 = torch.tensor(self.starts, device=self.positions_BT.device)[:, None]
        return starts_B1 + torch.arange(self.width, device=self.positions_BT.device)

    def _build_mask(self, window: int | None, causal: bool) -> Tensor | None:
        assert causal
        device, places = self.positions_BT.device, self.depths_BA.shape[1]
        first_B1 = torch.tensor(self.firsts, device=device)[:, None]
        place_BE = torch.arange(self.end, device=device) - first_B1
        within_BE, index_BE = (place_BE >= 0) & (place_BE < places), place_BE.clamp(0, places - 1)
        seen_BTE = self.seen_BTA.gather(2, index_BE[:, None].expand(-1, self.width, -1)) & within_BE[:, None]
        mask_BTE = seen_BTE | (place_BE < 0)[:, None]
        if window is not None and self.end > window:
            position_BE = first_B1 + torch.where(within_BE, self.depths_BA.gather(1, index_BE), place_BE)
            mask_BTE &= position_BE[:, None] > self.positions_BT[:, :, None] - window
        return mask_BTE[:, None]


@dataclass(frozen=True)
class WindowTrees:
    """The trees that one verification looks at: token 0 of a row is its last one, its drafts follow.

    `parents_BT` int64 has the place in the window that each token continues, -1 for token 0 and for padding.
    """

    parents_BT: Tensor

    @classmethod
    def of(cls, parents: Sequence[Sequence[int]], device: torch.device) -> WindowTrees:
        """Of drafts whose parents are places among the drafts, -1 for the last token."""
        width = max(map(len, parents))
        rows = [[-1, *(parent + 1 for parent in row), *[-1] * (width - len(row))] for row in parents]
        return cls(torch.tensor(rows, dtype=torch.int64, device=device))

    def seen(self) -> Tensor:
        """Whether a token of the window lies on the path to another, itself included; bool [B, T, T], query by key."""
        index_T = torch.arange(self.parents_BT.shape[1], device=self.parents_BT.device)
        near_BTT = (self.parents_BT[:, :, None] == index_T) | (index_T[:, None] == index_T)
        for _ in range(len(index_T).bit_length()):  # each time, paths of twice the length
            near_BTT = near_BTT.float() @ near_BTT.float() > 0
        return near_BTT

    def write(self, rows: slice, firsts: Sequence[int]) -> TreeWrite:
        """The write of whole windows, row b from place `firsts[b]` on."""
        seen_BTT = self.seen()
        return TreeWrite.of(rows, firsts, seen_BTT, seen_BTT.sum(-1) - 1)


class TreeGrowth:
    """Trees of B rows that grow level by level by the product of the draft's probabilities (EAGLE-2, arXiv 2406.16858).

    Every node of the frontier gets its `top_k` likeliest children; of all of them, the `top_k` with the largest product
    along their path are the next frontier. `token_ids_BF` int64 are the draft ids of the frontier, `parents_BF` which
    node of the frontier before each continues, `seen_BFA` (bool) which of all nodes continued so far lie on its path,
    itself included. Built from logits of the first level.
    """

    def __init__(self, logits_BD: Tensor, top_k: int) -> None:
        self._top_k = top_k
        self._scores_BF, self.token_ids_BF = logits_BD.float().log_softmax(-1).topk(top_k)
        rows, device = len(logits_BD), logits_BD.device
        self._nodes_BF = torch.arange(top_k, device=device).expand(rows, -1)
        self.parents_BF = torch.zeros_like(self._nodes_BF)
        self.seen_BFA = torch.eye(top_k, dtype=torch.bool, device=device).expand(rows, -1, -1)
        self._scores, self._ids = [self._scores_BF], [self.token_ids_BF]
        self._parents = [torch.full_like(self._nodes_BF, -1)]

    @property
    def levels(self) -> Tensor:
        """The level of each node continued so far, from 0 on; int64 [B, A]."""
        rows, width, places = self.seen_BFA.shape
        return (torch.arange(places, device=self.seen_BFA.device) // width).expand(rows, -1)

    def grow(self, logits_BFD: Tensor) -> None:
        """Add the children of the frontier, by their logits, and choose the next frontier."""
        logprobs_BFK, ids_BFK = logits_BFD.float().log_softmax(-1).topk(self._top_k)
        scores_BP = (self._scores_BF[:, :, None] + logprobs_BFK.clamp(max=0)).flatten(1)
        ids_BP, made = ids_BFK.flatten(1), sum(scores.shape[1] for scores in self._scores)
        self._scores.append(scores_BP)
        self._ids.append(ids_BP)
        self._parents.append(self._nodes_BF.repeat_interleave(self._top_k, 1))
        chosen_BF = _largest(scores_BP, self._top_k)
        self._scores_BF, self.token_ids_BF = scores_BP.gather(1, chosen_BF), ids_BP.gather(1, chosen_BF)
        self._nodes_BF, self.parents_BF = made + chosen_BF, chosen_BF // self._top_k
        seen_BFA = self.seen_BFA.gather(1, self.parents_BF[:, :, None].expand(-1, -1, self.seen_BFA.shape[2]))
        itself = torch.eye(self._top_k, dtype=torch.bool, device=scores_BP.device).expand(len(scores_BP), -1, -1)
        self.seen_BFA = torch.cat((seen_BFA, itself), 2)

    def best(self, total: int) -> tuple[Tensor, Tensor]:
        """The `total` nodes of the largest products (all, where there are fewer), level by level, the likeliest sibling
        first.

        They are a tree: a product never grows along a path, and of equal ones the earlier comes first. Returns draft
        ids and parents (places among the nodes returned, -1 on the first level), both int64 [B, N].
        """
        scores_BP, ids_BP, parents_BP = (torch.cat(part, 1) for part in (self._scores, self._ids, self._parents))
        kept_BN = _largest(scores_BP, total).sort(1).values
        place_BN = torch.arange(kept_BN.shape[1], device=kept_BN.device).expand_as(kept_BN)
        place_BP = torch.full_like(parents_BP, -1).scatter(1, kept_BN, place_BN)
        parents_BN = parents_BP.gather(1, kept_BN)
        placed_BN = place_BP.gather(1, parents_BN.clamp(min=0))
        return ids_BP.gather(1, kept_BN), torch.where(parents_BN < 0, -1, placed_BN)


def _largest(scores_BP: Tensor, count: int) -> Tensor:
    """Places of the `count` largest scores a row, the largest first; of equal ones the earlier comes first."""
    order_BP: Tensor = scores_BP.sort(stable=True, dim=1, descending=True).indices
    return order_BP[:, :count]
