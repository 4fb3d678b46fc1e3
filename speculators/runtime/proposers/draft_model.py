"""Drafting with a second causal language model, one token after another or all at once.

The draft reads the same tokens as the verifier, unshifted, and nothing of its states. Its cache row of a request holds
the keys of the request's first tokens and, behind them, of the drafts of the last round: those that were accepted are
not computed again. Shape suffixes: B rows, T tokens, K drafts, D rows of the draft's head, C ids that may be drafted.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculators.errors import EngineError
from speculators.models.cache import SlotWrite
from speculators.models.draft_model import DraftSampler, Proposal
from speculators.models.slot_states import kept_states
from speculators.runtime.description import LanguageModel, has_static_rotation
from speculators.runtime.proposers.draft_head import RowSampler, require_slots
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.proposers.top_probs import TopProbs
from speculators.runtime.proposers.vocab_mapping import VocabMapping, same_vocabulary, shared_tokens
from speculators.runtime.request import Request
from speculators.runtime.verifier import Verifier

logger = logging.getLogger(__name__)

# Where the config of a model that was trained to draft in parallel names the token that stands for one to be drafted.
MASK_TOKEN_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")
# Layers whose cache forgets by moving a length, or that have none; others are known where `kept_states` has them.
_FORGETFUL_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "moe", "mlp"})


@dataclass
class _CacheRow:
    """What a cache row holds: keys of the first `held` tokens of `request`, then of `drafts` (verifier ids)."""

    request: Request | None = None
    held: int = 0
    drafts: list[int] = field(default_factory=list)
    stopped: bool = False

    def advance(self, known: int) -> list[int]:
        """What is to be computed of the request's first `known` tokens, at least the last; all count as held then."""
        assert self.request is not None
        tokens = self.request.tokens
        for draft in self.drafts:
            if self.held >= known or tokens[self.held] != draft:
                break
            self.held += 1
        start = min(self.held, known - 1)
        self.held, self.drafts = known, []
        return tokens[start:known]


@dataclass
class _Round:
    """One proposal: `known` tokens of each row are verified, and `counts` drafts of it will be used."""

    new: NewTokens
    rows: list[_CacheRow]
    known: list[int]
    counts: list[int]
    num_tokens: int
    sampler: DraftSampler


class DraftModelProposer:
    """Decodes drafts one after another with a causal language model that has a cache of its own.

    `draft` is any model that `Verifier` reads. `vocabulary` says which tokens it may propose
    and how it reads the verifier's (None: its ids are the verifier's, every one of them); see `draft_model_proposer`.
    Requests of more than `max_length` tokens (None: as many as the draft has positions for) are drafted for no longer,
    and the log says so once for each. `probabilistic` draws the drafts of sampled requests from
    softmax(logits / temperature).
    """

    def __init__(
        self,
        draft: Verifier,
        num_tokens: int,
        num_slots: int,
        *,
        vocabulary: VocabMapping | None = None,
        probabilistic: bool = False,
        max_length: int | None = None,
    ) -> None:
        _require_known_layers(draft)
        self.draft = draft
        self.num_tokens = num_tokens
        self.max_length = _context(draft, max_length)
        self.vocabulary = (vocabulary or VocabMapping.identity(draft.vocab_size)).to(draft.device)
        keeps_ids = self.vocabulary.keeps_ids
        self.aux_layer_ids: Sequence[int] = ()
        self.verifier_ids_D: Tensor | None = None if keeps_ids else self.vocabulary.verifier_ids_C
        self._first_tokens = len(self.vocabulary.draft_ids_C) if keeps_ids else None
        self.keeps_top_probs = False
        self._probabilistic = probabilistic
        self._reusable = has_static_rotation(draft.config) and not kept_states(draft.config)
        self._cache = draft.make_cache(num_slots)
        self._rows = [_CacheRow() for _ in range(num_slots)]

    def observe(self, new: NewTokens) -> None:
        """Bring the draft's cache in step with verified tokens."""
        self._extend(new.rows, self._rows_of(new), _known(new))

    @torch.no_grad()
    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        """Draft `num_tokens` a row after the newly verified tokens, fewer where the draft's context ends."""
        rows, known = self._rows_of(new), _known(new)
        if num_tokens == 0 or all(row.stopped for row in rows):
            self._extend(new.rows, rows, known)
            return Proposal(
                torch.zeros(len(rows), 0, dtype=torch.int64, device=self.draft.device),
                torch.zeros(len(rows), dtype=torch.int64, device=self.draft.device),
            )
        lag = max(n - row.held - len(row.drafts) for row, n in zip(rows, known, strict=True) if not row.stopped)
        if lag > self.num_tokens + 1:
            # Not in the pass below, which would make logits of every position.
            self._extend(new.rows, rows, [max(n - 1, 1) for n in known])
        counts = [
            0 if row.stopped or not length else min(num_tokens, self.max_length - n + 1)
            for row, length, n in zip(rows, new.lengths, known, strict=True)
        ]
        sampler = RowSampler(new.requests, probabilistic=self._probabilistic)
        if not self.keeps_top_probs:
            return self._propose(_Round(new, rows, known, counts, num_tokens, sampler))
        watching = TopProbs(sampler, new.requests)
        return watching.told(self._propose(_Round(new, rows, known, counts, num_tokens, watching)))

    def move(self, source: int, target: int, length: int) -> None:
        """Let the draft's cache follow a request to another row."""
        row = self._rows[source]
        self._cache.move(source, target, row.held + len(row.drafts))
        self._rows[source], self._rows[target] = _CacheRow(), row

    def require_prefix_reuse(self, num_slots: int) -> None:
        """Raise EngineError where the draft's cache has fewer rows."""
        require_slots(self._cache, num_slots)

    def copy_prefix(self, source: int, target: int, length: int, request: Request | None) -> None:
        """Copy the draft's keys and values of a row's first tokens, as far as it has them; the rest is computed."""
        held = min(self._rows[source].held, length) if self._reusable else 0
        if held:
            self._cache.move(source, target, held)
        self._rows[target] = _CacheRow(request, held)

    def forget(self, request: Request) -> None:
        """Nothing to do: the next request in the row has a row of its own."""

    def _propose(self, this: _Round) -> Proposal:
        """Decode the drafts of a round, each from the one before it."""
        logits_BD = self._first_logits(this, 1)[:, 0]
        starts = settled = [0 if row.stopped else n - 1 for row, n in zip(this.rows, this.known, strict=True)]
        token_B = self.vocabulary.read(self._tensor([self._token_at(row) for row in this.rows]))
        drawn: list[tuple[Tensor, Tensor | None]] = []
        for step in range(this.num_tokens):
            if step:
                # A row that drafts no more writes its last token once more, where it is already.
                going = [step < count for count in this.counts]
                starts = [start + goes for start, goes in zip(starts, going, strict=True)]
                token_B = torch.where(self._tensor(going), self.vocabulary.draft_ids_C[drawn[-1][0]], token_B)
                write = SlotWrite.at(this.new.rows, starts, 1, self.draft.device, settled=settled)
                out = self.draft.forward(token_B[:, None], self._cache, write)
                assert out.logits_BTV is not None
                logits_BD = out.logits_BTV[:, 0]
            drawn.append(this.sampler(self._proposable(logits_BD), step))
        proposal = self._proposal(this, drawn)
        for row, count, ids in zip(this.rows, this.counts, proposal.token_ids_BK.tolist(), strict=True):
            row.drafts = ids[: max(count - 1, 0)]
        return proposal

    def _first_logits(self, this: _Round, count: int, mask_token_id: int = 0) -> Tensor:
        """Compute what is verified, with `count - 1` mask tokens behind it; logits [B, count, D] from the last on."""
        logits_BTD, lengths = self._extend(
            this.new.rows, this.rows, this.known, need_logits=True, masks=[mask_token_id] * (count - 1)
        )
        assert logits_BTD is not None
        places_BK = self._tensor(lengths)[:, None] - 1 + torch.arange(count, device=self.draft.device)
        return logits_BTD[torch.arange(len(lengths), device=self.draft.device)[:, None], places_BK]

    def _extend(
        self,
        where: slice,
        rows: list[_CacheRow],
        known: list[int],
        *,
        need_logits: bool = False,
        masks: Sequence[int] = (),
    ) -> tuple[Tensor | None, list[int]]:
        """Compute the tokens that the rows do not hold yet; logits [B, T, D], and how many tokens each row computed.

        Rows that are not drafted for write one token at the beginning of their own row, which nobody reads.
        """
        if all(row.stopped for row in rows):
            return None, [1] * len(rows)
        tokens = [[0] if row.stopped else row.advance(n) for row, n in zip(rows, known, strict=True)]
        lengths = [len(some) for some in tokens]
        width = max(lengths) + len(masks)
        ids_BT = self.vocabulary.read(self._tensor([[*some, *[0] * (width - len(some))] for some in tokens]))
        for place, mask in enumerate(masks):
            ids_BT[torch.arange(len(rows), device=ids_BT.device), self._tensor(lengths) + place] = mask
        starts = [0 if row.stopped else n - length for row, n, length in zip(rows, known, lengths, strict=True)]
        write = SlotWrite.at(
            where,
            starts,
            width,
            self.draft.device,
            lengths=[length + len(masks) for length in lengths],
            # The last token may be written once more.
            settled=[0 if row.stopped else n - 1 for row, n in zip(rows, known, strict=True)],
        )
        return self.draft.forward(ids_BT, self._cache, write, need_logits=need_logits).logits_BTV, lengths

    def _rows_of(self, new: NewTokens) -> list[_CacheRow]:
        """The cache rows of these requests: fresh ones for new requests, stopped where the context does not suffice."""
        first = new.rows.start or 0
        for slot, request in enumerate(new.requests, first):
            if self._rows[slot].request is not request:
                self._rows[slot] = _CacheRow(request)
            row = self._rows[slot]
            if not row.stopped and len(request.tokens) > self.max_length:
                row.stopped, row.held, row.drafts = True, 0, []
                logger.warning(
                    "request %s: its %d tokens are more than draft model %r takes (%d); it goes on without speculation",
                    request.request_id,
                    len(request.tokens),
                    self.draft.name_or_path,
                    self.max_length,
                )
        return self._rows[first : first + len(new.requests)]

    def _token_at(self, row: _CacheRow) -> int:
        """The last token that a row holds."""
        return 0 if row.stopped or row.request is None else row.request.tokens[row.held - 1]

    def _proposable(self, logits_BD: Tensor) -> Tensor:
        """Logits [B, C] of the tokens that may be drafted."""
        if self._first_tokens is not None:
            return logits_BD[:, : self._first_tokens]
        return logits_BD[:, self.vocabulary.draft_ids_C]

    def _proposal(self, this: _Round, drawn: list[tuple[Tensor, Tensor | None]]) -> Proposal:
        ids_BK = torch.stack([self.vocabulary.verifier_ids_C[chosen_B] for chosen_B, _ in drawn], 1)
        probs = [probs_BC for _, probs_BC in drawn if probs_BC is not None]
        return Proposal(ids_BK, self._tensor(this.counts), torch.stack(probs, 1) if probs else None)

    def _tensor(self, values: Sequence[int] | Sequence[bool] | Sequence[list[int]]) -> Tensor:
        return torch.tensor(values, device=self.draft.device)


class ParallelDraftModelProposer(DraftModelProposer):
    """Makes all drafts in one pass, from mask tokens behind the last verified one (PARD, arXiv 2504.18583).

    `mask_token_id` is the draft's id of that token (None: as its config says, see `mask_token_of`). Nothing of the
    masks is kept: what was accepted is computed again with its own tokens. The other arguments are those of
    `DraftModelProposer`.
    """

    def __init__(
        self,
        draft: Verifier,
        num_tokens: int,
        num_slots: int,
        *,
        mask_token_id: int | None = None,
        vocabulary: VocabMapping | None = None,
        probabilistic: bool = False,
        max_length: int | None = None,
    ) -> None:
        super().__init__(
            draft, num_tokens, num_slots, vocabulary=vocabulary, probabilistic=probabilistic, max_length=max_length
        )
        self.mask_token_id = mask_token_of(draft) if mask_token_id is None else mask_token_id

    def _propose(self, this: _Round) -> Proposal:
        logits_BKD = self._first_logits(this, this.num_tokens, self.mask_token_id)
        drawn = [this.sampler(self._proposable(logits_BKD[:, k]), k) for k in range(this.num_tokens)]
        return self._proposal(this, drawn)


def draft_model_proposer(
    verifier: Verifier,
    draft: Verifier,
    num_tokens: int,
    num_slots: int,
    *,
    parallel: bool = False,
    heterogeneous: bool = False,
    probabilistic: bool = False,
    max_length: int | None = None,
) -> DraftModelProposer:
    """The proposer of a draft model, once its vocabulary has been compared with the verifier's.

    `parallel` is `parallel_drafting`, `heterogeneous` is `use_heterogeneous_vocab`. EngineError where drafts of two
    vocabularies are to be drawn at random, and as `draft_vocabulary` raises it.
    """
    if heterogeneous and probabilistic:
        raise EngineError(
            "use_heterogeneous_vocab with draft_sample_method='probabilistic': drafts of another vocabulary are the "
            "likeliest shared tokens; expected draft_sample_method='greedy'"
        )
    vocabulary = draft_vocabulary(
        verifier, draft, parallel=parallel, heterogeneous=heterogeneous, max_length=max_length
    )
    kind = ParallelDraftModelProposer if parallel else DraftModelProposer
    return kind(draft, num_tokens, num_slots, vocabulary=vocabulary, probabilistic=probabilistic, max_length=max_length)


def draft_vocabulary(
    verifier: LanguageModel,
    draft: LanguageModel,
    *,
    parallel: bool = False,
    heterogeneous: bool = False,
    max_length: int | None = None,
) -> VocabMapping:
    """Which tokens a draft model may propose to a verifier, by what the files of both say.

    EngineError where the vocabularies do not fit, where the draft has layers with a running state that no cache keeps,
    fewer positions than `max_length`, or, for drafting in parallel, no mask token.
    """
    _require_known_layers(draft)
    _context(draft, max_length)
    if parallel:
        mask_token_of(draft)
    return shared_tokens(verifier, draft) if heterogeneous else same_vocabulary(verifier, draft)


def mask_token_of(draft: LanguageModel) -> int:
    """The token that a draft model reads where one is to be drafted; EngineError where its config does not say."""
    for key in MASK_TOKEN_KEYS:
        found = getattr(draft.config, key, None)
        if found is None:
            continue
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < draft.vocab_size:
            raise EngineError(
                f"draft model {draft.name_or_path!r}: {key} is {found!r} in its config; expected a token id in "
                f"0..{draft.vocab_size - 1}"
            )
        return found
    raise EngineError(
        f"parallel_drafting: {draft.name_or_path!r} has none of {', '.join(MASK_TOKEN_KEYS)} in its config, "
        "so it was not trained to draft in parallel; leave parallel_drafting out, or choose a model that was"
    )


def _known(new: NewTokens) -> list[int]:
    """How many tokens of each request are verified: those computed and the one after them."""
    return [start + length + 1 for start, length in zip(new.starts, new.lengths, strict=True)]


def _require_known_layers(draft: LanguageModel) -> None:
    known = _FORGETFUL_LAYERS | kept_states(draft.config)
    others = sorted(set(getattr(draft.config, "layer_types", None) or ()) - known)
    if others:
        raise EngineError(
            f"draft model {draft.name_or_path!r} has {', '.join(others)} layers, whose running state cannot be taken "
            "back when a draft is rejected; choose one with attention everywhere"
        )


def _context(draft: LanguageModel, asked: int | None) -> int:
    """Tokens of the longest request that is drafted for."""
    longest = draft.max_length
    if asked is not None and longest is not None and asked > longest:
        raise EngineError(
            f"speculative_config: max_model_len={asked} is more than the {longest} positions of draft model "
            f"{draft.name_or_path!r}"
        )
    return asked or longest or 1 << 31
