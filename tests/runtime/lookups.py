"""Requests by hand, for proposers that look at tokens alone."""

from collections.abc import Sequence

import torch

from speculators.runtime.proposers.proposer import NewTokens, Proposer
from speculators.runtime.request import Request
from speculators.runtime.sampling import SamplingParams


def request_of(name: str, prompt: Sequence[int], output: Sequence[int] = (), *, max_length: int = 4096) -> Request:
    """A running request that has generated `output`."""
    request = Request(
        name,
        list(prompt),
        SamplingParams(max_tokens=None),
        eos_token_ids=frozenset(),
        max_length=max_length,
        stats=None,
    )
    request.tokens += output
    return request


def proposed(proposer: Proposer, requests: Sequence[Request], gained: Sequence[int] | None = None) -> list[list[int]]:
    """Drafts of requests in rows 0, 1, .., which have just gained some tokens each (one by default)."""
    lengths = list(gained or [1] * len(requests))
    width = max(lengths)
    ends = [request.tokens[-n:] for request, n in zip(requests, lengths, strict=True)]
    ids_BT = torch.tensor([[*end, *[0] * (width - len(end))] for end in ends])
    starts = [len(request.tokens) - 1 - n for request, n in zip(requests, lengths, strict=True)]
    new = NewTokens(
        slice(0, len(requests)), requests, starts, lengths, ids_BT, None, torch.zeros(len(requests), width, 1)
    )
    proposal = proposer.propose(new, proposer.num_tokens)
    assert proposal.token_ids_BK.shape == (len(requests), proposer.num_tokens)
    assert proposal.token_ids_BK.dtype == proposal.lengths_B.dtype == torch.int64
    rows = zip(proposal.token_ids_BK.tolist(), proposal.lengths_B.tolist(), strict=True)
    return [ids[:length] for ids, length in rows]
