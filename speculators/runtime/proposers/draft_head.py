"""Drafting with a trained draft model that reads the verifier's hidden states."""

from collections.abc import Sequence

import torch
from torch import Tensor

from speculators.errors import EngineError
from speculators.models.cache import SlotCache
from speculators.models.draft_model import DraftContext, DraftModel, Proposal
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.proposers.top_probs import TopProbs
from speculators.runtime.rejection import draw
from speculators.runtime.request import Request
from speculators.runtime.sampling import exponential


class RowSampler:
    """Chooses draft tokens a row: the likeliest one, or a draw from softmax(logits / temperature) for sampled requests.

    top_k, top_p and min_p do not apply to drafts; whatever a draft proposes, verification keeps the output's law.
    """

    def __init__(self, requests: Sequence[Request], *, probabilistic: bool) -> None:
        self._requests = requests
        self._sampled = [i for i, r in enumerate(requests) if probabilistic and not r.params.greedy]

    def __call__(self, logits_BD: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        """Draft ids [B] int64 and, when a row was sampled, the probabilities [B, D] (zero for greedy rows)."""
        ids_B = logits_BD.argmax(-1)
        if not self._sampled:
            return ids_B, None
        rows = torch.tensor(self._sampled, device=logits_BD.device)
        chosen = [self._requests[i] for i in self._sampled]
        temperature_N1 = torch.tensor([[r.params.temperature] for r in chosen], device=logits_BD.device)
        probs_ND = (logits_BD[rows].float() / temperature_N1).softmax(-1)
        noise = [exponential(probs_ND.shape[1], r.noise.draft) for r in chosen if r.noise is not None]
        ids_B[rows] = draw(probs_ND, torch.stack(noise))
        probs_BD = torch.zeros(logits_BD.shape, device=logits_BD.device)
        probs_BD[rows] = probs_ND
        return ids_B, probs_BD


class DraftHeadProposer:
    """Runs a DraftModel in step with the verifier: the draft's cache always holds verifier-derived entries."""

    def __init__(self, draft: DraftModel, num_tokens: int, num_slots: int, *, probabilistic: bool = False) -> None:
        self.draft = draft.require_complete().eval()
        self.num_tokens = num_tokens
        self.aux_layer_ids: Sequence[int] = tuple(draft.aux_layer_ids)
        self.verifier_ids_D: Tensor | None = draft.verifier_ids_D
        self.keeps_top_probs = False
        self._probabilistic = probabilistic
        self._cache = draft.make_cache(num_slots)

    def observe(self, new: NewTokens) -> None:
        """Bring the draft's cache in step with verified tokens."""
        self._run(new, 0)

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        """Draft `num_tokens` a row after the newly verified tokens."""
        return self._run(new, num_tokens)

    def move(self, source: int, target: int, length: int) -> None:
        """Let the draft's cache follow a request to another row."""
        self._cache.move(source, target, length)

    def require_prefix_reuse(self, num_slots: int) -> None:
        """Raise EngineError where the draft's cache has fewer rows, or inputs of each row's end that it needs again."""
        if not self._cache.goes_on_anywhere:
            raise EngineError(
                "enable_prefix_caching: a draft of several blocks reads a request's last inputs again, which another "
                "request's first tokens do not have; leave it out, or draft with one block"
            )
        require_slots(self._cache, num_slots)

    def copy_prefix(self, source: int, target: int, length: int, request: Request | None) -> None:
        """Copy the draft's keys and values of a row's first tokens."""
        self._cache.move(source, target, length)

    def forget(self, request: Request) -> None:
        """Nothing to do: the next request in the row overwrites the cache."""

    def _context(self, new: NewTokens) -> DraftContext:
        return DraftContext(
            token_ids_BT=new.next_ids_BT,
            aux_hidden_states_BTX=new.aux_BTX,
            starts=new.starts,
            lengths=new.lengths,
            cache=self._cache,
            rows=new.rows,
            normed_hidden_states_BTH=new.normed_BTH,
        )

    @torch.no_grad()
    def _run(self, new: NewTokens, num_tokens: int) -> Proposal:
        context = self._context(new)
        sampler = RowSampler(new.requests, probabilistic=self._probabilistic)
        if not self.keeps_top_probs:
            return self.draft.propose(context, num_tokens, sampler)
        watching = TopProbs(sampler, new.requests)
        return watching.told(self.draft.propose(context, num_tokens, watching))


def require_slots(cache: SlotCache, num_slots: int) -> None:
    """Raise EngineError where a draft's cache has fewer rows than requests will be kept."""
    if cache.num_slots < num_slots:
        raise EngineError(
            f"enable_prefix_caching: the draft's cache has {cache.num_slots} rows, expected {num_slots}: those of "
            "running requests and of finished ones; build the proposer for EngineLimits.num_slots"
        )
