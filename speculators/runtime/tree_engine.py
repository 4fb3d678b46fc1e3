"""The engine of a proposer that drafts trees: each verification looks at all paths at once and keeps one of them.

Shape suffixes: B rows, T tokens of a window (the last verified token and the drafts of a tree), S tokens that are kept,
V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speculators.models.draft_model import Proposal
from speculators.models.draft_tree import WindowTrees, depths_of, paths_of
from speculators.runtime.engine import Engine
from speculators.runtime.logits_processors import process
from speculators.runtime.request import Request
from speculators.runtime.sampling import exponential, probabilities, uniform
from speculators.runtime.tree_rejection import TreeVerification, verify_tree, verify_tree_greedy
from speculators.runtime.verifier import VerifierOutput


@dataclass(frozen=True)
class _Window:
    """What one verification looks at, for some of its rows: logits, tokens and trees."""

    logits_BTV: Tensor
    ids_BT: Tensor
    parents_BT: Tensor
    requests: list[Request]

    def of_rows(self, rows: list[int]) -> "_Window":
        """Some of the rows."""
        if len(rows) == len(self.requests):
            return self
        index = torch.tensor(rows, device=self.ids_BT.device)
        requests = [self.requests[row] for row in rows]
        return _Window(self.logits_BTV[index], self.ids_BT[index], self.parents_BT[index], requests)

    @property
    def levels(self) -> int:
        """Drafts on the longest path."""
        return max(request.draft_depth for request in self.requests)


class TreeEngine(Engine):
    """An engine whose requests have trees of drafts; what is generated is what plain decoding would generate.

    Requests without drafts, such as new ones, are a tree of their last token alone.
    """

    def _verified(self, moved: list[Request]) -> tuple[VerifierOutput, list[list[int]]]:
        ids_BT, starts = self._window(moved), [request.num_computed for request in moved]
        rows, trees = slice(0, len(moved)), WindowTrees.of([r.draft_parents for r in moved], ids_BT.device)
        out = self.verifier.forward(ids_BT, self._cache, trees.write(rows, starts))
        assert out.logits_BTV is not None
        paths = [[[], *paths_of(r.drafts, r.draft_parents)] if r.constraints is not None else [] for r in moved]
        logits_BTV = process(out.logits_BTV, moved, paths)
        kept, emitted = _kept(_Window(logits_BTV, ids_BT, trees.parents_BT, moved))
        self._cache.keep(rows, starts, kept)
        return _at(out, kept), emitted

    def _take_drafts(self, proposal: Proposal, requests: Sequence[Request]) -> None:
        assert proposal.parents_BK is not None
        lengths = self.depth.verification_lengths(proposal, requests)
        ids, parents = proposal.token_ids_BK.tolist(), proposal.parents_BK.tolist()
        for row, request in enumerate(requests):
            # Levels stand one after another, so that what there is room for comes first.
            count = sum(depth <= request.room for depth in depths_of(parents[row][: lengths[row]]))
            request.drafts, request.draft_parents = ids[row][:count], parents[row][:count]


def _kept(window: _Window) -> tuple[list[list[int]], list[list[int]]]:
    """For each row the places in the window of what is kept, its last token first, and the tokens that it gains."""
    kept: list[list[int]] = [[] for _ in window.requests]
    emitted: list[list[int]] = [[] for _ in window.requests]
    ids = window.ids_BT.tolist()
    for greedy in (True, False):
        rows = [row for row, request in enumerate(window.requests) if request.params.greedy is greedy]
        if not rows:
            continue
        result = (_verify_greedy if greedy else _verify_sampled)(window.of_rows(rows))
        counts, places, last = result.num_accepted_B.tolist(), result.places_BS.tolist(), result.last_B.tolist()
        for place, row in enumerate(rows):
            kept[row] = places[place][: counts[place] + 1]
            emitted[row] = [*(ids[row][at] for at in kept[row][1:]), last[place]]
    return kept, emitted


def _verify_greedy(window: _Window) -> TreeVerification:
    return verify_tree_greedy(window.logits_BTV.argmax(-1), window.ids_BT, window.parents_BT, window.levels)


def _verify_sampled(window: _Window) -> TreeVerification:
    """A request's noise comes from its own streams, a coin a draft, so that its tokens do not depend on the batch."""
    params, logits_BTV = [request.params for request in window.requests], window.logits_BTV
    rows_B = torch.arange(len(params), device=logits_BTV.device)
    coins_BT = torch.zeros(window.ids_BT.shape, dtype=torch.float64, device=logits_BTV.device)
    noise = []
    for row, request in enumerate(window.requests):
        assert request.noise is not None
        coins_BT[row, 1 : 1 + len(request.drafts)] = uniform(len(request.drafts), request.noise.accept)
        noise.append(exponential(logits_BTV.shape[-1], request.noise.sample))
    return verify_tree(
        lambda at_B: probabilities(logits_BTV[rows_B, at_B], params),
        window.ids_BT,
        window.parents_BT,
        window.levels,
        coins_BT,
        torch.stack(noise),
    )


def _at(out: VerifierOutput, kept: Sequence[Sequence[int]]) -> VerifierOutput:
    """The output at the places that each row keeps, side by side as after a verification of chains."""
    width, device = max(map(len, kept)), out.normed_BTH.device
    index_BS = torch.tensor([[*row, *[0] * (width - len(row))] for row in kept], device=device)
    rows_B1 = torch.arange(len(kept), device=device)[:, None]
    parts = (out.logits_BTV, out.aux_BTX, out.normed_BTH)
    logits, aux, normed = (None if part is None else part[rows_B1, index_BS] for part in parts)
    assert normed is not None
    return replace(out, logits_BTV=logits, aux_BTX=aux, normed_BTH=normed)
