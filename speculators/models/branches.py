"""Whole sequences in one row, without padding, and what all of them begin with only once.

Shape suffixes: Q query heads, N key heads, T queries, E keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.models.hardware import rounded_up
from speculators.models.masks import PackedMask

_QUERY_BLOCK = 192

AttendMasked = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class BlockForm:
    """What a form of attention takes: numbers of queries and keys that are multiples of `multiple`, and the mask of its
    queries `mask_repeats` times."""

    multiple: int = 1
    mask_repeats: int = 1

    def rounded(self, size: int) -> int:
        """The least size that is no less."""
        return rounded_up(size, self.multiple)


# On a CPU every new shape of a product has a kernel of its own, which is kept (see `hardware.padded_rows`).
_MULTIPLE = 32


@dataclass(frozen=True)
class Branches:
    """A row that holds the `shared` first tokens of several sequences, and then what each goes on with.

    `filling` tokens at its end belong to none of them.
    """

    shared: int
    lengths: tuple[int, ...]
    filling: int = 0
    _masks: dict[tuple[int, int, int | None, torch.dtype, BlockForm], Tensor] = field(
        default_factory=dict, compare=False
    )

    @classmethod
    def of(
        cls, sequences: Sequence[Sequence[int]], row_length: Callable[[int], int] = int
    ) -> tuple[Branches, list[int]]:
        """How sequences of at least one token share a row, and the tokens of that row.

        A row of n tokens is filled up to `row_length(n)` of them.
        """
        shared = _common_beginning(sequences) if len(sequences) > 1 else 0
        tokens = [*sequences[0][:shared], *(token for one in sequences for token in one[shared:])]
        filling = row_length(len(tokens)) - len(tokens)
        return cls(shared, tuple(len(one) - shared for one in sequences), filling), tokens + [0] * filling

    def positions(self, device: torch.device) -> Tensor:
        """Position of each token in its sequence, int64 [1, T]."""
        rest = (torch.arange(length) + self.shared for length in (*self.lengths, self.filling))
        parts = [torch.arange(self.shared), *rest]
        return torch.cat(parts)[None].to(device)

    def whole(self, row: Tensor) -> list[Tensor]:
        """What stands in `row` [T, ...] for each of the sequences, whole again, as copies."""
        beginning, *rest, _ = row.split([self.shared, *self.lengths, self.filling])
        return [torch.cat((beginning, one)) for one in rest]

    def blocks(self) -> Iterator[tuple[slice, slice, int]]:
        """Queries that are attended together: where they stand, where their sequence's own keys stand up to the last
        of them, and how many shared keys come before those."""
        start = 0
        for number, length in enumerate((self.shared, *self.lengths, self.filling)):
            for first in range(0, length, _QUERY_BLOCK):
                last = min(first + _QUERY_BLOCK, length)
                yield slice(start + first, start + last), slice(start, start + last), self.shared if number else 0
            start += length

    def mask(self, queries: int, keys: int, window: int | None, like: Tensor, form: BlockForm) -> Tensor:
        """0 where the last `queries` of `keys` positions see, and -inf elsewhere, in the form of a block.

        Queries beyond, which fill a block up, see everything, and nobody sees the keys beyond.
        """
        known = (queries, keys, window, like.dtype, form)
        if known not in self._masks:
            index = torch.arange(keys, device=like.device)
            mask = like.new_zeros(form.rounded(queries), form.rounded(keys))
            seen = PackedMask(window).in_document(index[-queries:, None], index)
            mask[:queries, :keys].masked_fill_(~seen, float("-inf"))
            mask[:queries, keys:] = float("-inf")
            self._masks[known] = mask.repeat(form.mask_repeats, 1)
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
    form: BlockForm = BlockForm(),
) -> Tensor:
    """Causal attention inside each sequence, at most `window` keys a query; returns [T, Q, D].

    `attend(queries, keys, values, mask)` computes a block; the mask is additive, [T, E], repeated as `form` says.
    """
    out = q_QTD.new_empty(q_QTD.shape[1], q_QTD.shape[0], v_NTD.shape[-1])
    for queries, own, shared in branches.blocks():
        width = queries.stop - queries.start
        keys = shared + own.stop - own.start
        seen = keys if window is None else min(keys, window + width - 1)
        mask = branches.mask(width, seen, window, q_QTD, form)
        missing = form.rounded(seen) - seen
        k_NED, v_NED = (_last_keys(tensor, shared, own, seen, missing) for tensor in (k_NTD, v_NTD))
        q = F.pad(q_QTD[:, queries], (0, 0, 0, form.rounded(width) - width))
        out[queries] = attend(q, k_NED, v_NED, mask)[:, :width].transpose(0, 1)
    return out


def _last_keys(tensor_NTD: Tensor, shared: int, own: slice, seen: int, missing: int) -> Tensor:
    """The last `seen` keys of the shared and a sequence's own, and `missing` zeros behind them."""
    first = tensor_NTD[:, max(shared + own.stop - own.start - seen, 0) : shared]
    rest = tensor_NTD[:, own][:, -seen:]
    parts = [first] * (first.shape[1] > 0) + [rest]
    parts += [tensor_NTD.new_zeros(len(tensor_NTD), missing, tensor_NTD.shape[2])] * (missing > 0)
    return torch.cat(parts, 1) if len(parts) > 1 else rest


def form_of_products(groups: int) -> BlockForm:
    """What `attend_in_products` takes, with so many query heads to a key head."""
    return BlockForm(_MULTIPLE, groups)


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
