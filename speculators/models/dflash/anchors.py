"""Where the blocks of a training batch stand.

A block's anchor is a token that the verifier wrote and that was known when the block was drafted; all that the block
reads of the verifier lies before it. Shape suffixes: B rows, T tokens; C positions without padding, A anchors, H
hidden, X aux states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.errors import TrainingError
from speculators.models.draft_model import PackedBatch, SampleSource
from speculators.models.supervision import document_runs


@dataclass
class Positions:
    """The positions of a batch that are no padding, raw and unshifted: documents one after another.

    `token_ids_C` and `positions_C` int64, `supervised_C` bool, `features_CX`, `last_hidden_states_CH` before the
    verifier's final norm; document d has `document_lengths[d]` of them.
    """

    token_ids_C: Tensor
    supervised_C: Tensor
    features_CX: Tensor
    last_hidden_states_CH: Tensor
    positions_C: Tensor
    document_lengths: list[int]

    @classmethod
    def of(cls, batch: PackedBatch, min_length: int = 0) -> Positions:
        """Leave out padding, and documents shorter than `min_length`; a document is a run of equal ids in a row."""
        runs_N = document_runs(batch.document_ids)
        lengths_D = torch.bincount(runs_N[runs_N >= 0])
        kept_D = lengths_D >= min_length
        # Padding is run -1, which finds the last entry.
        kept = torch.nonzero(torch.cat((kept_D, kept_D.new_zeros(1)))[runs_N]).squeeze(1)

        def picked(tensor: Tensor) -> Tensor:
            return tensor.flatten(0, 1).index_select(0, kept)

        return cls(
            picked(batch.input_ids),
            picked(batch.loss_mask),
            picked(batch.aux_hidden_states),
            picked(batch.last_hidden_states),
            picked(batch.position_ids),
            lengths_D[kept_D].tolist(),
        )

    def anchors(
        self, block_size: int, max_anchors: int, *, before_answers: bool = False, max_blocks: int | None = None
    ) -> Tensor:
        """Indices int64 [A], ascending, of the anchors of this step.

        Position a of a document of T tokens may be one where it is supervised and a < T - `block_size`, so that the
        document reaches beyond the block; with `before_answers` also where only the token after it is supervised.
        Where a document has more than `max_anchors`, so many are drawn by torch's global generator: they are counted a
        document, so that packing does not starve short ones. Where all of them together have more than `max_blocks`,
        those that have most get fewer.
        """
        allowed_C = self.supervised_C.clone()
        if before_answers:
            allowed_C[:-1] |= self.supervised_C[1:]
        places, start = [], 0
        for length in self.document_lengths:
            end = start + max(length - block_size, 0)
            places.append(start + torch.nonzero(allowed_C[start:end]).squeeze(1))
            start += length
        counts = [min(len(indices), max_anchors) for indices in places]
        if max_blocks is not None:
            counts = shared_evenly(counts, max_blocks)
        parts = [_some(indices, count) for indices, count in zip(places, counts, strict=True)]
        return torch.cat(parts) if parts else self.token_ids_C.new_empty(0)


def shared_evenly(wanted: Sequence[int], total: int) -> list[int]:
    """What each gets of `total`: what it wants, or, where that is too much for all, as much as the others or one more.

    Of those that want more than an even share, the last ones get what is over.
    """
    order, given, left = sorted(range(len(wanted)), key=wanted.__getitem__), [0] * len(wanted), total
    for taken, index in enumerate(order):
        # Who comes first in a tie gets the rest: of equal shares the later ones, which the order has last, are larger.
        given[index] = min(wanted[index], left // (len(order) - taken))
        left -= given[index]
    return given


def require_an_anchor(samples: SampleSource, block_size: int, *, before_answers: bool = False) -> None:
    """Raise TrainingError where no sample has an anchor (see `Positions.anchors`): nothing would ever be learnt.

    Samples are read up to the first that has one.
    """
    longest, supervised_N = -1, torch.empty(0, dtype=torch.int64)
    for number in range(len(samples)):
        mask_T = samples[number].loss_mask
        room = len(mask_T) - block_size
        if room > 0 and bool(mask_T[: room + before_answers].any()):
            return
        if longest < 0 or len(mask_T) > samples.lengths[longest]:
            longest, supervised_N = number, torch.nonzero(mask_T).flatten()
    if longest >= 0:
        first_and_last = f"from {int(supervised_N[0])} to {int(supervised_N[-1])}" if len(supervised_N) else "nowhere"
        raise TrainingError(
            f"no block of {block_size} slots finds a place in any of {len(samples)} samples: an anchor is a supervised "
            f"token with {block_size} tokens after it. The longest, sample {longest} with {samples.lengths[longest]} "
            f"tokens, is supervised {first_and_last}; take longer samples or a smaller block_size"
        )


def _some(indices: Tensor, count: int) -> Tensor:
    if len(indices) <= count:
        return indices
    chosen = torch.randperm(len(indices))[:count].sort().values
    return indices[chosen.to(indices.device)]


def documents_of(indices_A: Tensor, document_lengths: Sequence[int]) -> list[int]:
    """How many of the ascending indices lie in each document."""
    ends = torch.tensor(document_lengths, dtype=torch.int64).cumsum(0)
    bounds = torch.searchsorted(indices_A.cpu(), ends).tolist()
    return [end - start for start, end in zip([0, *bounds], bounds, strict=False)]
