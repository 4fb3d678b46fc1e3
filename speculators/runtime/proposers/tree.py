"""Drafting trees with a trained draft model."""

from dataclasses import replace

from speculators.models.draft_model import Proposal
from speculators.models.draft_tree import TreeShape
from speculators.models.stepwise import StepwiseDraftModel
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.proposers.proposer import NewTokens


class TreeProposer(DraftHeadProposer):
    """Drafts a tree a row; `num_tokens` is how many levels it has at most."""

    def __init__(self, draft: StepwiseDraftModel, shape: TreeShape, num_slots: int) -> None:
        super().__init__(draft, shape.depth, num_slots)
        self._stepwise, self._shape = draft, shape

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        """Draft trees of `num_tokens` levels after the newly verified tokens."""
        return self._stepwise.propose_tree(self._context(new), replace(self._shape, depth=num_tokens))
