"""What one round of drafting and verifying costs, measured before requests are served."""

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import median

import torch
from torch import Tensor

from speculators.errors import EngineError
from speculators.models.cache import SlotWrite
from speculators.runtime.proposers.proposer import NewTokens, Proposer
from speculators.runtime.request import Request
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier

CONTEXT_VARIABLE = "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"
_DEFAULT_CONTEXT = 8192
_REPLAYS = 5
_LEAST_MS = 1e-6


class CostTable:
    """Milliseconds by size, from measured points {size: ms}.

    Linear between points and, by the last two, behind them; as the first point before it. A larger size never costs
    less than a smaller one, and nothing less than 1e-6 ms.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        if not points:
            raise EngineError("a cost table needs at least one measured size")
        sizes = sorted(points)
        self._sizes = torch.tensor(sizes, dtype=torch.float64)
        costs = accumulate((points[size] for size in sizes), max)
        self._ms = torch.tensor([max(cost, _LEAST_MS) for cost in costs], dtype=torch.float64)

    def at(self, sizes: Tensor) -> Tensor:
        """Costs of sizes of any shape, float64."""
        sizes = sizes.double()
        if len(self._sizes) == 1:
            return self._ms.expand(sizes.shape)
        right = torch.searchsorted(self._sizes, sizes).clamp(1, len(self._sizes) - 1)
        x0, x1, y0, y1 = self._sizes[right - 1], self._sizes[right], self._ms[right - 1], self._ms[right]
        return y0 + (y1 - y0) * ((sizes - x0) / (x1 - x0)).clamp(min=0.0)


@dataclass(frozen=True)
class StepCosts:
    """Cost tables of a verifier and a draft, by number of requests.

    `verify[n]` is by the tokens of a pass over n requests, drafts included; `draft[n]` by the drafts made for each.
    Between two numbers of requests costs are linear at equal tokens a request, below the first and above the last they
    are in proportion. `padded` says that a pass computes every row as long as the longest; without it a pass costs what
    its tokens cost, however they are spread over the rows.
    """

    verify: Mapping[int, CostTable]
    draft: Mapping[int, CostTable]
    padded: bool = True

    def verify_ms(self, num_requests: int, tokens: Tensor) -> Tensor:
        """Milliseconds of passes with so many tokens each."""
        return _between(self.verify, num_requests, lambda table, count: table.at(tokens * (count / num_requests)))

    def draft_ms(self, num_requests: int, num_drafts: Tensor) -> Tensor:
        """Milliseconds of proposals of so many drafts a request."""
        return _between(self.draft, num_requests, lambda table, _: table.at(num_drafts))


def _between(tables: Mapping[int, CostTable], num_requests: int, cost: Callable[[CostTable, int], Tensor]) -> Tensor:
    counts = sorted(tables)
    place = bisect_left(counts, num_requests)
    if place in (0, len(counts)):
        nearest = counts[min(place, len(counts) - 1)]
        scale = max(1.0, num_requests / nearest)
        return cost(tables[nearest], nearest) * scale
    low, high = counts[place - 1], counts[place]
    share = (num_requests - low) / (high - low)
    return (1 - share) * cost(tables[low], low) + share * cost(tables[high], high)


def profile_context_length(most: int) -> int:
    """Tokens each request has while costs are measured: VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN, at most `most`.

    8192 where it is not set. EngineError where it is no whole number of at least 0.
    """
    given = os.environ.get(CONTEXT_VARIABLE, str(_DEFAULT_CONTEXT))
    if not given.strip().isdecimal():
        raise EngineError(f"{CONTEXT_VARIABLE}={given!r}: expected a whole number of tokens, 0 or more")
    return max(0, min(int(given), most))


def measure_costs(verifier: Verifier, proposer: Proposer, *, max_num_seqs: int, max_model_len: int) -> StepCosts:
    """Time passes of the verifier and proposals of a draft, at several sizes; medians of five, in milliseconds.

    The rows of `proposer` must hold no request: its state is written over. Requests have as many tokens as
    `profile_context_length` says.
    """
    most = proposer.num_tokens
    context = profile_context_length(max_model_len - most - 1)
    verifier.set_aux_layers(proposer.aux_layer_ids)
    cache = verifier.make_cache(max_num_seqs)
    verify: dict[int, CostTable] = {}
    draft: dict[int, CostTable] = {}
    for count in _doubling(max_num_seqs):
        rows, starts = slice(0, count), [context] * count
        cache.running.assume(rows, starts)
        points = {}
        for width in sorted({*_doubling(most + 1), most + 1}):
            write = SlotWrite.at(rows, starts, width, verifier.device)
            ids_BT = torch.zeros(count, width, dtype=torch.int64, device=verifier.device)
            points[count * width] = _time(partial(verifier.forward, ids_BT, cache, write), verifier.device)
        verify[count] = CostTable(points)
        new = replace(_one_token_each(verifier, rows, starts, max_model_len), cache=cache)
        points = {0: _time(partial(proposer.observe, new), verifier.device)}
        for depth in {1, most}:
            points[depth] = _time(partial(proposer.propose, new, depth), verifier.device)
        draft[count] = CostTable(points)
    return StepCosts(verify, draft, padded=not verifier.packs)


def _doubling(most: int) -> Sequence[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes


def _one_token_each(verifier: Verifier, rows: slice, starts: list[int], max_model_len: int) -> NewTokens:
    count, device = len(starts), verifier.device
    params = SamplingParams(temperature=0)
    requests = [
        Request(
            f"costs-{row}",
            [0] * (start + 2),
            params,
            eos_token_ids=frozenset(),
            max_length=max_model_len,
            stats=None,
        )
        for row, start in enumerate(starts)
    ]
    aux = len(verifier.aux_layer_ids)
    return NewTokens(
        rows,
        requests,
        starts,
        [1] * count,
        torch.zeros(count, 1, dtype=torch.int64, device=device),
        torch.zeros(count, 1, aux * verifier.hidden_size, dtype=verifier.dtype, device=device) if aux else None,
        torch.zeros(count, 1, verifier.hidden_size, dtype=verifier.dtype, device=device),
    )


def _time(work: Callable[[], object], device: torch.device) -> float:
    spent = []
    for _ in range(1 + _REPLAYS):
        started = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        spent.append(1000 * (time.perf_counter() - started))
    # The first one also makes room.
    return median(spent[1:])
