"""The reduced vocabulary of a draft: which of the verifier's tokens it can propose, and the maps between the two.

Shape suffixes: V verifier vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from speculators.errors import FormatError
from speculators.formats.faults import error_of, fault
from speculators.formats.vocab_map import map_fault


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """The tokens that a draft can propose.

    `d2t` int64 [D] holds offsets: `verifier_id = draft_id + d2t[draft_id]`. `t2d` bool [V] is true where a token of the
    verifier is kept. FormatError F012 or F015 where the two do not describe one ascending set of tokens.
    """

    d2t: Tensor
    t2d: Tensor

    def __post_init__(self) -> None:
        for name, tensor, dtype in (("d2t", self.d2t, torch.int64), ("t2d", self.t2d, torch.bool)):
            if tensor.dim() != 1 or tensor.dtype != dtype or not tensor.numel():
                got = f"{tensor.dtype} {list(tensor.shape)}"
                raise _invalid(f"{name} is {got}; expected one non-empty row of {dtype}")
        kept = torch.nonzero(self.t2d).flatten().tolist()
        problem = map_fault(self.d2t.tolist(), self.t2d.numel(), kept)
        if problem is not None:
            raise error_of([problem], "draft vocabulary")

    @classmethod
    def full(cls, vocab_size: int) -> DraftVocab:
        """Return the vocabulary that keeps everything; such a map is never stored."""
        return cls(torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool))

    @classmethod
    def from_ids(cls, verifier_ids: Iterable[int], vocab_size: int) -> DraftVocab:
        """Keep the given tokens; FormatError where one is given twice or lies outside 0..vocab_size-1."""
        ids = sorted(verifier_ids)
        if not ids or ids[0] < 0 or ids[-1] >= vocab_size or len(set(ids)) != len(ids):
            raise _invalid(f"{len(ids)} token ids; expected distinct ones within 0..{vocab_size - 1}")
        kept = torch.tensor(ids, dtype=torch.int64)
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[kept] = True
        return cls(kept - torch.arange(len(ids)), t2d)

    @classmethod
    def from_d2t(cls, d2t: Tensor, vocab_size: int, t2d: Tensor | None = None) -> DraftVocab:
        """Take a checkpoint's map; `t2d` is derived where there is none, and decides how `d2t` is read."""
        if t2d is None:
            problem = map_fault(d2t.tolist(), vocab_size)
            if problem is not None and problem.level == "ERROR":
                raise error_of([problem], "draft vocabulary")
            t2d = torch.zeros(vocab_size, dtype=torch.bool)
            t2d[torch.arange(d2t.numel()) + d2t.cpu()] = True
        elif t2d.numel() != vocab_size:
            raise _invalid(f"t2d has {t2d.numel()} entries; expected the verifier's {vocab_size}")
        return cls(d2t, t2d.to(d2t.device))

    @classmethod
    def from_counts(cls, counts_V: Tensor, draft_size: int, always_keep: Iterable[int] = ()) -> DraftVocab:
        """Keep the `draft_size` most frequent tokens of `counts_V` [V], ties to the smaller id, in ascending order.

        Tokens that never occur fill up, smallest id first. Those in `always_keep` (end of turn, special tokens) are in
        whatever their count, at the expense of the least frequent others.
        """
        if counts_V.dim() != 1 or counts_V.dtype == torch.bool or not torch.isfinite(counts_V).all():
            raise _invalid(
                f"token counts are {counts_V.dtype} {list(counts_V.shape)}; expected one row of finite numbers"
            )
        counts, forced = counts_V.cpu(), sorted(set(always_keep))
        vocab_size = counts.numel()
        if (counts < 0).any():
            raise _invalid("token counts are negative in places; expected how often each token occurs")
        if not 0 < draft_size <= vocab_size:
            raise _invalid(f"draft vocabulary of {draft_size}; expected 1 to {vocab_size}, the verifier's size")
        if forced and (forced[0] < 0 or forced[-1] >= vocab_size):
            raise _invalid(f"token ids {forced} to keep; expected all within 0..{vocab_size - 1}")
        if len(forced) > draft_size:
            raise _invalid(f"{len(forced)} tokens to keep do not fit into a draft vocabulary of {draft_size}")
        order = torch.sort(counts, descending=True, stable=True).indices
        is_forced = torch.zeros(vocab_size, dtype=torch.bool)
        is_forced[torch.tensor(forced, dtype=torch.int64)] = True
        by_count = order[~is_forced[order]][: draft_size - len(forced)]
        return cls.from_ids([*forced, *by_count.tolist()], vocab_size)

    @property
    def draft_size(self) -> int:
        """D, the number of tokens that can be proposed."""
        return self.d2t.numel()

    @property
    def verifier_size(self) -> int:
        """V, the number of tokens that the verifier knows."""
        return self.t2d.numel()

    @property
    def is_full(self) -> bool:
        """Whether both vocabularies are the same, so that no map is stored."""
        return self.draft_size == self.verifier_size

    @cached_property
    def draft_ids(self) -> Tensor:
        """The verifier's id of each draft id, int64 [D], ascending."""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    @cached_property
    def _ranks(self) -> Tensor:
        """int64 [V]: the draft id of each of the verifier's tokens, -1 where it has none."""
        return torch.where(self.t2d, self.t2d.cumsum(0) - 1, -1)

    def to_verifier(self, draft_ids: Tensor) -> Tensor:
        """Map int64 draft ids of any shape to the verifier's ids."""
        return draft_ids + self.d2t[draft_ids]

    def to_draft(self, verifier_ids: Tensor) -> Tensor:
        """Map the verifier's ids of any shape to draft ids; -1 where the draft does not have the token."""
        return self._ranks[verifier_ids]

    def coverage(self, counts_V: Tensor) -> float:
        """Return the share of occurrences in `counts_V` [V] that the draft can propose; 1.0 where there are none."""
        total = float(counts_V.sum())
        return float(counts_V[self.t2d].sum()) / total if total else 1.0


def _invalid(text: str) -> FormatError:
    return error_of([fault("d2t-invalid", text)], "draft vocabulary")
