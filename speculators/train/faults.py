"""Which samples to blame for a step that has no finite gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.models.draft_model import PackedBatch, SampleSource
from speculators.train.dataset import Rows


@dataclass(frozen=True)
class Suspects:
    """Samples of one process's passes, by number: with broken states, of passes with a broken loss, and all of them.

    Broken is what is NaN or infinite.
    """

    states: frozenset[int]
    losses: frozenset[int]
    all: frozenset[int]

    @classmethod
    def among(cls, batches: Sequence[PackedBatch], finite: Sequence[bool]) -> Suspects:
        """Look through the passes of a step; `finite` says of each whether its loss was."""
        states, losses, everything = set[int](), set[int](), set[int]()
        for batch, well in zip(batches, finite, strict=True):
            numbers = _numbers(batch.document_ids)
            everything |= numbers
            if not well:
                losses |= numbers
            broken = [~torch.isfinite(kind).all(-1) for kind in (batch.aux_hidden_states, batch.last_hidden_states)]
            states |= _numbers(batch.document_ids[broken[0] | broken[1]])
        return cls(frozenset(states), frozenset(losses), frozenset(everything))


def blamed(told: Iterable[Suspects]) -> tuple[list[int], str]:
    """The samples to blame, of all processes, and what is wrong with them: as narrow as can be told."""
    suspects = list(told)
    for kind, what in (("states", "hidden states that are not finite"), ("losses", "a loss that is not finite")):
        found = sorted(set().union(*(getattr(one, kind) for one in suspects)))
        if found:
            return found, what
    return sorted(set().union(*(one.all for one in suspects))), "finite losses, but no finite gradient"


def where(source: SampleSource, samples: Sequence[int]) -> str:
    """What samples are called in what they were chosen from, for a message; empty where that is known by nobody."""
    if not isinstance(source, Rows):
        return ""
    return f" (rows {[source.number(sample) for sample in samples]} of the hidden states)"


def _numbers(document_ids: Tensor) -> set[int]:
    return set(document_ids.flatten().tolist()) - {-1}
