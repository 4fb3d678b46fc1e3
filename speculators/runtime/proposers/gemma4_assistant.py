"""Drafting with an assistant of Gemma 4, which reads the verifier's own keys, values and last state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from speculators.errors import EngineError
from speculators.models.cache import SlotWrite
from speculators.models.draft_model import DraftSampler, Proposal
from speculators.models.gemma4_assistant.network import Gemma4Assistant
from speculators.runtime.proposers.draft_head import RowSampler
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.proposers.top_probs import TopProbs
from speculators.runtime.request import Request
from speculators.runtime.verifier import Verifier


class Gemma4AssistantProposer:
    """Drafts tokens one after another at the position of the last verified one; it keeps nothing of its own.

    EngineError where the assistant was made for another verifier.
    """

    def __init__(
        self, assistant: Gemma4Assistant, verifier: Verifier, num_tokens: int, *, probabilistic: bool = False
    ) -> None:
        self.assistant = assistant.to(verifier.device, verifier.dtype)
        self.num_tokens = num_tokens
        self.aux_layer_ids: Sequence[int] = ()
        self.verifier_ids_D: Tensor | None = None
        self.keeps_top_probs = False
        self._key_layers = assistant.sizes.key_layers(verifier.config, verifier.name_or_path)
        self._embed = verifier.model.get_input_embeddings()
        self._probabilistic = probabilistic

    def observe(self, new: NewTokens) -> None:
        """Nothing to do: the verifier's cache has it."""

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        """Draft `num_tokens` a row after the newly verified tokens."""
        sampler = RowSampler(new.requests, probabilistic=self._probabilistic)
        if not self.keeps_top_probs:
            return self._propose(new, num_tokens, sampler)
        watching = TopProbs(sampler, new.requests)
        return watching.told(self._propose(new, num_tokens, watching))

    def move(self, source: int, target: int, length: int) -> None:
        """Nothing to do: the verifier's cache moves."""

    def require_prefix_reuse(self, num_slots: int) -> None:
        """Nothing to check: the verifier's cache is all that is read."""

    def copy_prefix(self, source: int, target: int, length: int, request: Request | None) -> None:
        """Nothing to do: the verifier's cache copies."""

    def forget(self, request: Request) -> None:
        """Nothing to do: nothing is kept."""

    @torch.no_grad()
    def _propose(self, new: NewTokens, num_tokens: int, sampler: DraftSampler) -> Proposal:
        if new.cache is None:
            raise EngineError("an assistant reads its verifier's keys and values, and no cache was given")
        device, rows = new.next_ids_BT.device, len(new.requests)
        last = [max(length, 1) - 1 for length in new.lengths]
        index_B, last_B = torch.arange(rows, device=device), torch.tensor(last, device=device)
        write = SlotWrite.at(new.rows, [s + n for s, n in zip(new.starts, last, strict=True)], 1, device)
        shared = self.assistant.reading(new.cache, self._key_layers, write)
        token_B, state_BW = new.next_ids_BT[index_B, last_B], new.normed_BTH[index_B, last_B]
        ids: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(num_tokens):
            logits_BV, state_BW = self.assistant(self._embed(token_B), state_BW, shared, write)
            token_B, probs_BV = sampler(logits_BV, step)
            ids.append(token_B)
            if probs_BV is not None:
                probs.append(probs_BV)
        return Proposal(
            torch.stack(ids, 1) if ids else new.next_ids_BT.new_empty(rows, 0),
            torch.tensor([num_tokens if length else 0 for length in new.lengths], device=device),
            torch.stack(probs, 1) if probs else None,
        )
