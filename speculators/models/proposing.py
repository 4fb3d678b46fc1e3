"""Parts of `propose`: what a draft reads of the verifier, and its tokens while they are drawn.

Suffixes as in `draft_model`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculators.errors import SpeculatorsError
from speculators.models.draft_model import DraftContext, DraftModel, DraftSampler, Proposal


def aux_states(context: DraftContext, draft: DraftModel) -> Tensor:
    """The aux states [B, T, A*H] of a context; SpeculatorsError where none were given."""
    if context.aux_hidden_states_BTX is None:
        raise SpeculatorsError(f"this draft reads the verifier's states {draft.aux_layer_ids}; none were given")
    return context.aux_hidden_states_BTX


def normed_states(context: DraftContext) -> Tensor:
    """The states [B, T, H] that the verifier's head reads; SpeculatorsError where none were given."""
    if context.normed_hidden_states_BTH is None:
        raise SpeculatorsError("this draft reads the verifier's states after its final norm; none were given")
    return context.normed_hidden_states_BTH


def at_last(rows_BTX: Tensor, context: DraftContext) -> Tensor:
    """Of [B, T, ...], what each row has at its last valid position, [B, ...]; see `DraftContext.last`."""
    last_B = torch.tensor(context.last, device=rows_BTX.device)
    return rows_BTX[torch.arange(len(last_B), device=rows_BTX.device), last_B]


class Drafts:
    """The tokens of one proposal, drawn step by step.

    `token_ids` are the verifier's ids [B] of each step so far, `probs` what they were drawn from, [B, D] a step, or
    empty for one-hot drafts. SpeculatorsError where more tokens are asked for than the draft makes at once.
    """

    def __init__(self, draft: DraftModel, sampler: DraftSampler, num_tokens: int) -> None:
        most = draft.config.max_speculative_tokens
        if most is not None and num_tokens > most:
            raise SpeculatorsError(
                f"{num_tokens} draft tokens asked for; this draft makes at most {most} at once: ask for fewer, or "
                "train one that makes more"
            )
        self.token_ids: list[Tensor] = []
        self.probs: list[Tensor] = []
        self._draft, self._sampler = draft, sampler

    def draw(self, logits_BD: Tensor) -> Tensor:
        """Draw the next token of every row from logits over draft ids; returns the verifier's ids [B], int64."""
        ids_B, probs_BD = self._sampler(logits_BD, len(self.token_ids))
        self.token_ids.append(self._draft.to_verifier(ids_B))
        if probs_BD is not None:
            self.probs.append(probs_BD)
        return self.token_ids[-1]

    def proposal(self, context: DraftContext, confidence_BK: Tensor | None = None) -> Proposal:
        """What was drawn; rows of length 0 have no drafts."""
        ids_BT, rows, steps = context.token_ids_BT, len(context.lengths), len(self.token_ids)
        taking_part = [steps if length else 0 for length in context.lengths]
        return Proposal(
            torch.stack(self.token_ids, 1) if steps else ids_BT.new_empty(rows, 0),
            torch.tensor(taking_part, dtype=torch.int64, device=ids_BT.device),
            torch.stack(self.probs, 1) if self.probs else None,
            confidence_BK,
        )
