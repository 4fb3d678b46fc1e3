"""A way of drafting whose success is known beforehand, so that tests can say which tokens were accepted."""

from collections.abc import Mapping, Sequence

import torch

from speculators.models.draft_model import Proposal
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.request import Request
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier


class ReplayProposer:
    """Drafts the continuation it was given for a prompt, but every third token of it wrong."""

    def __init__(self, continuations: Mapping[tuple[int, ...], list[int]], num_tokens: int) -> None:
        self._continuations, self.num_tokens = continuations, num_tokens
        self.aux_layer_ids: Sequence[int] = ()
        self.verifier_ids_D: torch.Tensor | None = None

    def observe(self, new: NewTokens) -> None:
        """Nothing to keep."""

    def forget(self, request: Request) -> None:
        """Nothing is kept."""

    def move(self, source: int, target: int, length: int) -> None:
        """Nothing to move."""

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        """The next tokens of each continuation; token i is off by one where i % 3 == 2."""
        rows = []
        for request in new.requests:
            known = self._continuations[tuple(request.prompt_token_ids)]
            start = len(request.output_token_ids)
            drafts = [
                token ^ 1 if (start + i) % 3 == 2 else token for i, token in enumerate(known[start:][:num_tokens])
            ]
            rows.append(drafts)
        lengths = torch.tensor([len(row) for row in rows])
        padded = [[*row, *[0] * (num_tokens - len(row))] for row in rows]
        return Proposal(torch.tensor(padded), lengths)


class ReplayTrees(ReplayProposer):
    """Drafts trees in which the continuation it was given runs through changing siblings, but lacks every fourth token.

    Each level has three children of what the level before continues, the true token among them, and the true token as a
    child of a wrong one; where a level lacks it, another is continued in its place.
    """

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        """A tree a row of as many levels as are known; level i lacks the true token where (start + i) % 4 == 3."""
        trees = [self._tree(request, num_tokens) for request in new.requests]
        width = max(len(ids) for ids, _ in trees)
        ids, parents = ([[*one, *[0] * (width - len(one))] for one in part] for part in zip(*trees, strict=True))
        lengths = torch.tensor([len(ids) for ids, _ in trees])
        return Proposal(torch.tensor(ids), lengths, parents_BK=torch.tensor(parents))

    def _tree(self, request: Request, num_tokens: int) -> tuple[list[int], list[int]]:
        known, start = self._continuations[tuple(request.prompt_token_ids)], len(request.output_token_ids)
        ids: list[int] = []
        parents: list[int] = []
        followed, wrong = -1, -1
        for level, token in enumerate(known[start:][:num_tokens], start):
            siblings = [token ^ 1, token ^ 2, token]
            place = level % 3
            siblings[place], siblings[2] = siblings[2], siblings[place]
            if level % 4 == 3:
                siblings[place] = token ^ 3
            first = len(ids)
            ids += [*siblings, *[token] * (wrong >= 0)]
            parents += [followed] * 3 + [wrong] * (wrong >= 0)
            followed, wrong = first + place, first + (place + 1) % 3
        return ids, parents


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    """Parameters of a greedy completion of exactly `max_tokens`, unless a stop string ends it."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def replaying_llm(verifier: Verifier, prompts: Sequence[str], num_tokens: int, *, max_tokens: int = 40) -> LLM:
    """An LLM that drafts its own greedy continuations of these prompts, with every third token wrong."""
    plain = LLM.from_parts(verifier).generate(list(prompts), greedy(max_tokens), use_tqdm=False)
    known = {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in plain}
    llm = LLM.from_parts(verifier)
    llm.engine = Engine(
        verifier, ReplayProposer(known, num_tokens), limits=EngineLimits(4, 200), metrics_level="summary"
    )  # fmt: skip
    return llm
