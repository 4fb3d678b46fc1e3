"""Classes that a user might name as `custom_class`, and some that he should not have."""

from collections.abc import Sequence

import numpy as np
import torch

from speculators.models.draft_model import Proposal
from speculators.runtime.proposers.custom import CustomConfig
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.request import Request

A_FUNCTION = len


class Repeating:
    """Goes on as after the last time that the last token occurred; [] where it did not."""

    def __init__(self, vllm_config: CustomConfig) -> None:
        self.depth = vllm_config.speculative_config.num_speculative_tokens
        self.config = vllm_config
        self.target: torch.nn.Module | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        self.target = target_model

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: None = None,
    ) -> list[list[int]]:
        drafts = []
        for row, sampled in enumerate(sampled_token_ids):
            known = token_ids_cpu[row, : num_tokens_no_spec[row]]
            assert known[len(known) - len(sampled) :].tolist() == sampled
            places = np.nonzero(known[:-1] == known[-1])[0]
            drafts.append(known[places[-1] + 1 :][: self.depth].tolist() if len(places) else [])
        return drafts


class Counting:
    """A proposer of this runtime: the next numbers, as many as the row's number; it keeps the names it sees."""

    def __init__(self, config: CustomConfig) -> None:
        self.num_tokens = config.speculative_config.num_speculative_tokens
        self.size = config.model_config.vocab_size
        self.aux_layer_ids: Sequence[int] = (1,)
        self.verifier_ids_D = None
        self.seen: list[str] = []

    def observe(self, new: NewTokens) -> None:
        self.seen += [f"observe {request.request_id}" for request in new.requests]

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        assert new.aux_BTX is not None
        last = torch.tensor([[request.tokens[-1]] for request in new.requests])
        lengths = torch.arange(len(new.requests)).clamp(max=num_tokens)
        return Proposal((last + 1 + torch.arange(num_tokens)) % self.size, lengths)

    def move(self, source: int, target: int, length: int) -> None:
        self.seen.append(f"move {source} {target}")

    def forget(self, request: Request) -> None:
        self.seen.append(f"forget {request.request_id}")


class WithoutPropose:
    def __init__(self, config: CustomConfig) -> None:
        pass


class WithoutConfig:
    def propose(self) -> list[list[int]]:
        return []


class HalfProposer(WithoutPropose):
    def observe(self, new: NewTokens) -> None:
        pass

    def propose(self, new: NewTokens, num_tokens: int) -> None:
        pass


class Answering(WithoutPropose):
    """Gives whatever it was told to."""

    answer: object = None

    def propose(self, *_: object, slot_mappings: None = None) -> object:
        return self.answer


class AnsweringProposer(Counting):
    answer: object = None

    def propose(self, new: NewTokens, num_tokens: int) -> object:
        return self.answer
