"""Parts of `propose` for drafts that read the verifier's state after its final norm. Suffixes as in `draft_model`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculators.errors import SpeculatorsError
from speculators.models.draft_model import DraftContext, Proposal


def normed_states(context: DraftContext) -> Tensor:
    """The states [B, T, H] that the verifier's head reads; SpeculatorsError where none were given."""
    if context.normed_hidden_states_BTH is None:
        raise SpeculatorsError("this draft reads the verifier's states after its final norm; none were given")
    return context.normed_hidden_states_BTH


def at_last(rows_BTX: Tensor, context: DraftContext) -> Tensor:
    """Of [B, T, ...], what each row has at its last valid position, [B, ...]; at its first where it takes no part."""
    last = [max(length, 1) - 1 for length in context.lengths]
    at_B = torch.tensor(last, device=rows_BTX.device)
    return rows_BTX[torch.arange(len(last), device=rows_BTX.device), at_B]


def proposal_of(context: DraftContext, drafts: Sequence[Tensor], probs: Sequence[Tensor]) -> Proposal:
    """Drafted ids of the verifier [B] a step, and probabilities [B, D] a step where any; rows of length 0 have none."""
    device, rows = context.token_ids_BT.device, len(context.lengths)
    taking_part = [len(drafts) if length else 0 for length in context.lengths]
    return Proposal(
        torch.stack(list(drafts), 1) if drafts else context.token_ids_BT.new_empty(rows, 0),
        torch.tensor(taking_part, dtype=torch.int64, device=device),
        torch.stack(list(probs), 1) if probs else None,
    )
