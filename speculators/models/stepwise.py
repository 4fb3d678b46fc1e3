"""Drafts that make each token's state from the state before it, and so can draft chains and trees.

Shape suffixes as in `draft_model` and `draft_tree`.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from speculators.models.cache import SlotWrite
from speculators.models.decoder_draft import DecoderDraftModel
from speculators.models.draft_model import DraftContext, DraftSampler, Proposal
from speculators.models.draft_tree import TreeGrowth, TreeShape, TreeWrite
from speculators.models.proposing import Drafts


class StepwiseDraftModel(DecoderDraftModel):
    """A draft that goes on from a token and the state before it: the verifier's, or the one that it made itself."""

    @abstractmethod
    def first_states(self, context: DraftContext) -> Tensor:
        """What the draft reads of the verifier at newly verified positions, as states [B, T, H]."""

    @abstractmethod
    def layer_inputs(self, token_ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Verifier ids [B, T] beside the states [B, T, H] before them -> the first layer's input and residual."""

    @abstractmethod
    def predict(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The last layer's output [B, T, H] -> logits of the next token [B, T, D], and the states to read it with."""

    @torch.no_grad()
    def propose(self, context: DraftContext, num_tokens: int, sampler: DraftSampler) -> Proposal:
        """Bring the cache in step with the verified tokens and draft `num_tokens` more, one after another."""
        drafts = Drafts(self, sampler, num_tokens)
        hidden = self._take_in(context, drafting=num_tokens > 0)
        if num_tokens == 0:
            return drafts.proposal(context)
        logits, states = self.predict(hidden)
        token_ids_B = drafts.draw(logits.squeeze(1))
        for step in range(num_tokens - 1):
            write = SlotWrite.at(context.rows, [end + step for end in context.ends], 1, hidden.device)
            inputs, residual = self.layer_inputs(token_ids_B[:, None], states)
            logits, states = self.predict(
                self.extend(inputs, residual, context.cache, write, [[0]] * len(write.starts))
            )
            token_ids_B = drafts.draw(logits.squeeze(1))
        return drafts.proposal(context)

    @torch.no_grad()
    def propose_tree(self, context: DraftContext, shape: TreeShape) -> Proposal:
        """Bring the cache in step with the verified tokens and draft a tree after them, one pass a level.

        Nodes of a level that are continued are written behind those of the level before, where the next write of
        verified positions lands.
        """
        logits_B1D, states = self.predict(self._take_in(context, drafting=True))
        growth = TreeGrowth(logits_B1D.squeeze(1), shape.top_k)
        everywhere = [list(range(shape.top_k))] * len(context.lengths)
        for _ in range(shape.depth - 1):
            before = states.gather(1, growth.parents_BF[:, :, None].expand(-1, -1, states.shape[2]))
            write = TreeWrite.of(context.rows, context.ends, growth.seen_BFA, growth.levels)
            inputs, residual = self.layer_inputs(self.to_verifier(growth.token_ids_BF), before)
            hidden = self.extend(inputs, residual, context.cache, write, everywhere)
            logits_BFD, states = self.predict(hidden)
            growth.grow(logits_BFD)
        ids_BN, parents_BN = growth.best(shape.total_token)
        sizes = [ids_BN.shape[1] if length else 0 for length in context.lengths]
        lengths_B = torch.tensor(sizes, dtype=torch.int64, device=ids_BN.device)
        return Proposal(self.to_verifier(ids_BN), lengths_B, parents_BK=parents_BN)

    def _take_in(self, context: DraftContext, *, drafting: bool) -> Tensor:
        """Write the verified positions; returns the last layer's output at each row's last one, [B, 1, H]."""
        token_ids_BT = context.token_ids_BT
        write = SlotWrite.at(context.rows, context.starts, token_ids_BT.shape[1], token_ids_BT.device)
        inputs, residual = self.layer_inputs(token_ids_BT, self.first_states(context))
        wanted = [[index] for index in context.last] if drafting else None
        return self.extend(inputs, residual, context.cache, write, wanted)
