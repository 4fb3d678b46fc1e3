"""Whole sequences in one row, without padding, and what all of them begin with only once.

Shape suffixes: Q query heads, N key heads, T queries, E keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.models.masks import PackedMask

_QUERY_BLOCK = 128

AttendMasked = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Branches:
    """A row that holds the `shared` first tokens of several sequences, and then what each goes on with."""

    shared: int
    lengths: tuple[int, ...]
    _masks: dict[tuple[int, int, int | None, torch.dtype, int], Tensor] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> tuple[Branches, list[int]]:
        """How sequences of at least one token share a row, and the tokens of that row."""
        shared = _common_beginning(sequences) if len(sequences) > 1 else 0
        tokens = [*sequences[0][:shared], *(token for one in sequences for token in one[shared:])]
        return cls(shared, tuple(len(one) - shared for one in sequences)), tokens

    def positions(self, device: torch.device) -> Tensor:
        """Position of each token in its sequence, int64 [1, T]."""
        parts = [torch.arange(self.shared), *(torch.arange(length) + self.shared for length in self.lengths)]
        return torch.cat(parts)[None].to(device)

    def whole(self, row: Tensor) -> list[Tensor]:
        """What stands in `row` [T, ...] for each of the sequences, whole again."""
        beginning, *rest = row.split([self.shared, *self.lengths])
        return [torch.cat((beginning, one)) if self.shared else one for one in rest]

    def blocks(self) -> Iterator[tuple[slice, slice, int]]:
        """Queries that are attended together: where they stand, where their sequence's own keys stand up to the last
        of them, and how many shared keys come before those."""
        start = 0
        for number, length in enumerate((self.shared, *self.lengths)):
            for first in range(0, length, _QUERY_BLOCK):
                last = min(first + _QUERY_BLOCK, length)
                yield slice(start + first, start + last), slice(start, start + last), self.shared if number else 0
            start += length

    def mask(self, queries: int, keys: int, window: int | None, like: Tensor, repeats: int = 1) -> Tensor:
        """0 where the last `queries` of `keys` positions see and -inf elsewhere, [repeats * queries, keys]."""
        known = (queries, keys, window, like.dtype, repeats)
        if known not in self._masks:
            index = torch.arange(keys, device=like.device)
            seen = PackedMask(window).in_document(index[-queries:, None], index)
            hidden = torch.zeros(queries, keys, dtype=like.dtype, device=like.device)
            self._masks[known] = hidden.masked_fill_(~seen, float("-inf")).repeat(repeats, 1)
        return self._masks[known]


def _common_beginning(sequences: Sequence[Sequence[int]]) -> int:
    """Tokens that all begin with; each keeps at least one of its own."""
    limit = min(map(len, sequences)) - 1
    first, last = min(map(list, sequences)), max(map(list, sequences))  # in the order of lists: these differ first
    return next((place for place in range(limit) if first[place] != last[place]), limit)


def attend_branches(
    q_QTD: Tensor,
    k_NTD: Tensor,
    v_NTD: Tensor,
    branches: Branches,
    window: int | None,
    attend: AttendMasked,
    mask_repeats: int = 1,
) -> Tensor:
    """Causal attention inside each sequence, at most `window` keys a query; returns [T, Q, D].

    `attend(queries, keys, values, mask)` computes a block; the mask is additive, [mask_repeats * T, E].
    """
    out = q_QTD.new_empty(q_QTD.shape[1], q_QTD.shape[0], v_NTD.shape[-1])
    for queries, own, shared in branches.blocks():
        keys, values = k_NTD[:, own], v_NTD[:, own]
        if shared:
            keys, values = (torch.cat((all_[:, :shared], one), 1) for all_, one in ((k_NTD, keys), (v_NTD, values)))
        width = queries.stop - queries.start
        seen = keys.shape[1] if window is None else min(keys.shape[1], window + width - 1)
        mask = branches.mask(width, seen, window, q_QTD, mask_repeats)
        out[queries] = attend(q_QTD[:, queries], keys[:, -seen:], values[:, -seen:], mask).transpose(0, 1)
    return out


def attend_in_products(q_QTD: Tensor, k_NED: Tensor, v_NED: Tensor, mask_FE: Tensor, scale: float) -> Tensor:
    """Grouped-query attention [Q, T, D] of a block as two products with a softmax between, without gradients.

    The query heads of one key head are folded into the queries, as is the mask: F of them. On a CPU this is faster than
    torch's fused kernel for a few hundred keys. In half precision the scores are rounded once, as in transformers'
    eager attention.
    """
    heads, width, size = q_QTD.shape
    folded = q_QTD.reshape(k_NED.shape[0], -1, size)
    scores = torch.baddbmm(mask_FE.expand(len(folded), -1, -1), folded, k_NED.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), v_NED).view(heads, width, -1)


def attend_fused(q_QTD: Tensor, k_NED: Tensor, v_NED: Tensor, mask_TE: Tensor, scale: float) -> Tensor:
    """The same by torch's fused kernel, with a mask [T, E]."""
    grouped = q_QTD.shape[0] != k_NED.shape[0]
    return F.scaled_dot_product_attention(
        q_QTD[None], k_NED[None], v_NED[None], attn_mask=mask_TE[None, None], scale=scale, enable_gqa=grouped
    )[0]
