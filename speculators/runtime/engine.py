"""Continuous batching with speculation: propose, verify, commit, trim.

Running requests own cache rows 0..B-1. One step admits waiting requests, verifies every running request's drafts in one
forward pass, commits what was accepted, and drafts again. A rejection only moves a length, by which layers with a
running state know what to read on from.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.errors import EngineError, RequestError
from speculators.models.cache import SlotWrite
from speculators.models.draft_model import Proposal
from speculators.runtime.depth import DepthPolicy, depth_of
from speculators.runtime.logits_processors import ConstraintBuilder, as_its_grammar_leaves, process
from speculators.runtime.logprobs import token_logprobs
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.prefixes import PrefixCache, require_prefix_caching
from speculators.runtime.proposers.proposer import NewTokens, Proposer
from speculators.runtime.recorder import HiddenStatesRecorder, check_extraction
from speculators.runtime.request import Request
from speculators.runtime.rules import Rule, StandardRule
from speculators.runtime.sampling import NoiseStreams, SamplingParams
from speculators.runtime.stats import SpecDecodeStats
from speculators.runtime.verifier import Verifier, VerifierOutput
from speculators.runtime.verifying import BatchVerifier


@dataclass(frozen=True)
class EngineLimits:
    """How much the engine takes at once: requests, tokens a request (prompt and output), prompt tokens a pass.

    With `enable_prefix_caching` it keeps what as many finished requests had, for others that begin so.
    """

    max_num_seqs: int = 16
    max_model_len: int = 2048
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = False

    @property
    def num_slots(self) -> int:
        """Cache rows of running and of finished requests."""
        return self.max_num_seqs * (2 if self.enable_prefix_caching else 1)


class Engine:
    """Schedules requests over one verifier and, optionally, one proposer, or a recorder of hidden states.

    `depth` says how many tokens are drafted and verified, by default all that the proposer makes. `step` runs one round
    and returns the requests that moved. Not thread-safe: one thread steps it.
    """

    def __init__(
        self,
        verifier: Verifier,
        proposer: Proposer | None = None,
        *,
        limits: EngineLimits | None = None,
        seed: int = 0,
        metrics_level: str = "none",
        recorder: HiddenStatesRecorder | None = None,
        depth: DepthPolicy | None = None,
        rule: Rule | None = None,
    ) -> None:
        self.verifier, self.proposer, self.recorder = verifier, proposer, recorder
        self.depth = depth_of(proposer, depth)
        self.limits = limits or EngineLimits()
        self.seed, self.metrics_level = seed, metrics_level
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._ids: set[str] = set()
        self.stats = self._new_stats()
        self.num_generated_tokens = 0
        self._cache = verifier.make_cache(self.limits.num_slots)
        self.prefixes = self._prefix_cache() if self.limits.enable_prefix_caching else None
        self._constraints = ConstraintBuilder(verifier.tokenizer, verifier.vocab_size, verifier.eos_token_ids)
        self._num_requests = 0
        reader = recorder.layer_ids if recorder is not None else proposer.aux_layer_ids if proposer is not None else ()
        self._aux_layer_ids = tuple(reader)
        self._verify = BatchVerifier(rule or StandardRule(), None if proposer is None else proposer.verifier_ids_D)

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts a verification at most, K; 0 without speculation."""
        return 0 if self.proposer is None else self.proposer.num_tokens

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or the file of one is being written."""
        return bool(self.waiting or self.running or (self.recorder is not None and self.recorder.busy))

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        decode_text: bool = True,
    ) -> None:
        """Queue a request; RequestError when its prompt is empty, too long or holds ids outside the vocabulary."""
        self._check_prompt(request_id, prompt_token_ids)
        check_extraction(params, extracting=self.recorder is not None, completions=1)
        constraints = self._constraints.build(params, prompt_token_ids)
        if self.recorder is not None:
            self.recorder.expect(request_id, params)
        request = Request(
            request_id,
            list(prompt_token_ids),
            params,
            eos_token_ids=self.verifier.eos_token_ids,
            max_length=self.limits.max_model_len,
            stats=self._new_stats(),
            prompt=prompt,
            tokenizer=self.verifier.tokenizer if decode_text else None,
        )
        request.constraints = constraints
        request.seed = params.seed if params.seed is not None else self.seed * 1_000_003 + self._num_requests
        self._num_requests += 1
        self._ids.add(request_id)
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored, since it may have just finished."""
        for request in (*self.waiting, *self.running):
            if request.request_id == request_id:
                request.abort()
        if self.recorder is not None:
            self.recorder.abort(request_id)
        self._ids.difference_update(r.request_id for r in self.waiting if r.finished)
        self.waiting = deque(r for r in self.waiting if not r.finished)
        self._drop_finished()

    def abort_all(self) -> None:
        """End every request."""
        for request in (*self.waiting, *self.running):
            request.abort()
            self._ids.discard(request.request_id)
        self.waiting.clear()
        if self.recorder is not None:
            self.recorder.abort_all()
        self._drop_finished()

    @torch.no_grad()
    def step(self) -> list[RequestOutput]:
        """Run one round; returns every request that got tokens, finished ones included."""
        if self.verifier.aux_layer_ids != self._aux_layer_ids:
            self.verifier.set_aux_layers(self._aux_layer_ids)
        self._admit()
        if not self.running:
            return self._delivered(block=True)
        moved = list(self.running)
        out, emitted = self._verified(moved)
        assert out.logits_BTV is not None
        starts = [r.num_computed for r in moved]
        if self.recorder is not None and out.aux_BTX is not None:
            self.recorder.record(moved, starts, [1] * len(moved), out.aux_BTX)
        for row, (request, tokens) in enumerate(zip(moved, emitted, strict=True)):
            self._commit(request, tokens, out.logits_BTV[row])
            if self.recorder is not None and request.finished:
                self.recorder.finish(request)
        order = self._drop_finished()
        if self.proposer is not None and order:
            index = torch.tensor(order, device=self.verifier.device)
            kept = [emitted[i] for i in order]
            width = max(len(tokens) for tokens in kept)
            self._draft(
                NewTokens(
                    slice(0, len(order)),
                    self.running,
                    [starts[i] for i in order],
                    [len(tokens) for tokens in kept],
                    _padded(kept, width, self.verifier.device),
                    None if out.aux_BTX is None else out.aux_BTX[index, :width],
                    out.normed_BTH[index, :width],
                    self._cache,
                )
            )
        for request in self.running:
            request.num_observed = request.num_computed
        outputs = [self._output(r) for r in moved if self.recorder is None or not r.finished]
        return outputs + self._delivered(block=not self.running and not self.waiting)

    def _window(self, moved: list[Request]) -> Tensor:
        """Each request's last token and its drafts, int64 [B, T]."""
        width = 1 + max(len(r.drafts) for r in moved)
        return _padded([[r.tokens[-1], *r.drafts] for r in moved], width, self.verifier.device)

    def _verified(self, moved: list[Request]) -> tuple[VerifierOutput, list[list[int]]]:
        """Let the verifier score all drafts; returns its output from each row's last token on, and what each gains."""
        ids_BT = self._window(moved)
        write = SlotWrite.at(
            slice(0, len(moved)),
            [r.num_computed for r in moved],
            ids_BT.shape[1],
            self.verifier.device,
            lengths=[1 + len(r.drafts) for r in moved],
            settled=[len(r.tokens) for r in moved],
        )
        out = self.verifier.forward(ids_BT, self._cache, write)
        assert out.logits_BTV is not None
        return out, self._verify(process(out.logits_BTV, moved), ids_BT[:, 1:], moved)

    def _delivered(self, *, block: bool) -> list[RequestOutput]:
        """Outputs of extracting requests that have ended and whose files are there."""
        if self.recorder is None:
            return []
        return [self._output(request) for request in self.recorder.delivered(block=block)]

    def _new_stats(self) -> SpecDecodeStats | None:
        return None if self.proposer is None else SpecDecodeStats(self.proposer.num_tokens)

    def _prefix_cache(self) -> PrefixCache:
        if self.recorder is not None:
            raise EngineError(
                "enable_prefix_caching: hidden states are extracted of what is computed, so every prompt is computed "
                "whole; leave it out"
            )
        require_prefix_caching(self.verifier)
        seqs = self.limits.max_num_seqs
        return PrefixCache(self._cache, self.proposer, seqs, seqs)

    def _output(self, request: Request) -> RequestOutput:
        level = self.metrics_level
        return request.output(detailed=level == "detailed", with_spec_metrics=level != "none")

    def _check_prompt(self, request_id: str, prompt_token_ids: Sequence[int]) -> None:
        limit = self.limits.max_model_len
        if not prompt_token_ids:
            raise RequestError(f"request {request_id}: the prompt is empty; give at least one token")
        if len(prompt_token_ids) >= limit:
            raise RequestError(
                f"request {request_id}: the prompt has {len(prompt_token_ids)} tokens, which leaves no room below "
                f"max_model_len={limit}; shorten it or raise max_model_len"
            )
        bad = [token for token in prompt_token_ids if not 0 <= token < self.verifier.vocab_size]
        if bad:
            raise RequestError(f"request {request_id}: token id {bad[0]} is outside 0..{self.verifier.vocab_size - 1}")
        if request_id in self._ids or (self.recorder is not None and self.recorder.knows(request_id)):
            raise RequestError(f"request {request_id}: this id is already being served; choose another")

    def _admit(self) -> None:
        new: list[Request] = []
        while self.waiting and len(self.running) + len(new) < self.limits.max_num_seqs:
            request = self.waiting.popleft()
            if self.recorder is not None and not self.recorder.admit(request):
                self._ids.discard(request.request_id)
                continue
            if not request.params.greedy:
                # Not before: the generators of thousands that wait would fill the memory.
                request.noise = NoiseStreams.from_seed(request.seed, self.verifier.device)
            request.metrics.first_scheduled_time = time.monotonic()
            new.append(request)
        while new:
            new = self._start(new)

    def _start(self, requests: list[Request]) -> list[Request]:
        """Compute the prompts of new requests; returns those that wait for these, whose beginning they share."""
        first, later = len(self.running), []
        if self.prefixes is None:
            self.running += sorted(requests, key=lambda r: -len(r.tokens))
        else:
            later = self.prefixes.start(requests, self.running)
        new = self.running[first:]
        while True:
            remaining = [len(r.tokens) - 1 - r.num_computed for r in new]
            active = sum(count > 0 for count in remaining)
            if active == 0:
                return later
            width = min(remaining[0], max(1, self.limits.max_num_batched_tokens // active))
            self._prefill(slice(first, first + active), new[:active], [min(c, width) for c in remaining[:active]])

    def _prefill(self, rows: slice, requests: list[Request], lengths: list[int]) -> None:
        width, device = max(lengths), self.verifier.device
        starts = [r.num_computed for r in requests]
        chunks = [r.tokens[s : s + n] for r, s, n in zip(requests, starts, lengths, strict=True)]
        nexts = [r.tokens[s + 1 : s + 1 + n] for r, s, n in zip(requests, starts, lengths, strict=True)]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        write = SlotWrite.at(rows, starts, width, device, lengths=lengths, settled=ends)
        told = any(r.prompt_logprobs is not None for r in requests)
        out = self.verifier.forward(_padded(chunks, width, device), self._cache, write, need_logits=told)
        if self.recorder is not None and out.aux_BTX is not None:
            self.recorder.record(requests, starts, lengths, out.aux_BTX)
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            request.num_computed += length
            if request.prompt_logprobs is not None and out.logits_BTV is not None:
                count, tokenizer = request.params.prompt_logprobs or 0, self.verifier.tokenizer
                request.prompt_logprobs += token_logprobs(out.logits_BTV[row], nexts[row], count, tokenizer)
        if self.proposer is not None:
            self.proposer.observe(
                NewTokens(
                    rows,
                    requests,
                    starts,
                    lengths,
                    _padded(nexts, width, device),
                    out.aux_BTX,
                    out.normed_BTH,
                    self._cache,
                )
            )
        for request in requests:
            request.num_observed = request.num_computed

    def _commit(self, request: Request, tokens: list[int], logits_TV: Tensor) -> None:
        drafted = request.draft_depth
        self.depth.learn(request, len(tokens) - 1)
        request.num_computed += len(tokens)
        for stats in (self.stats, request.stats):
            if stats is not None:
                detailed = self.metrics_level == "detailed" and stats is request.stats
                stats.add_step(drafted, len(tokens) - 1, keep_steps=detailed)
        logprobs = None
        if request.logprobs is not None:
            told_TV = as_its_grammar_leaves(logits_TV, request, tokens)
            logprobs = token_logprobs(told_TV, tokens, request.params.logprobs or 0, self.verifier.tokenizer)
        before = len(request.tokens)
        request.append(tokens, logprobs)
        self.num_generated_tokens += len(request.tokens) - before
        request.drafts, request.draft_parents, request.draft_probs_KD = [], [], None

    def _drop_finished(self) -> list[int]:
        """Close the holes that finished requests leave; returns, for each row now, which row it was before."""
        order = list(range(len(self.running)))
        row = 0
        while row < len(self.running):
            if not self.running[row].finished:
                row += 1
                continue
            self._ids.discard(self.running[row].request_id)
            if self.prefixes is not None:
                self.prefixes.keep(self.running[row], row)
            if self.proposer is not None:
                self.proposer.forget(self.running[row])
            last, origin = self.running.pop(), order.pop()
            if row < len(self.running):
                self._cache.move(len(self.running), row, last.num_computed)
                if self.proposer is not None:
                    self.proposer.move(len(self.running), row, last.num_computed)
                self.running[row], order[row] = last, origin
        return order

    def _draft(self, new: NewTokens) -> None:
        assert self.proposer is not None
        num_tokens = self.depth.tokens_to_draft(len(new.requests))
        if num_tokens == 0:
            self.proposer.observe(new)
            return
        self._take_drafts(self.proposer.propose(new, num_tokens), new.requests)

    def _take_drafts(self, proposal: Proposal, requests: Sequence[Request]) -> None:
        """Give each request the drafts that are to be verified."""
        ids, lengths = proposal.token_ids_BK.tolist(), self.depth.verification_lengths(proposal, requests)
        for row, request in enumerate(requests):
            count = min(lengths[row], request.room)
            request.drafts = ids[row][:count]
            if proposal.probs_BKD is not None and not request.params.greedy:
                request.draft_probs_KD = proposal.probs_BKD[row, :count]


def _padded(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """Ids as an int64 tensor [len(rows), width], padded with 0 on the right."""
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int64, device=device).view(
        len(rows), width
    )
