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
