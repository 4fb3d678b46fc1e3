"""Drafting by prompt lookup: what followed the last n tokens where they occurred before (n-gram speculation)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from speculators.errors import EngineError
from speculators.models.draft_model import Proposal
from speculators.runtime.proposers.proposer import NewTokens
from speculators.runtime.proposers.ragged import LookupProposer
from speculators.runtime.proposers.token_rows import TokenRows
from speculators.runtime.request import Request


def _check(num_tokens: int, shortest: int, longest: int) -> None:
    if not 1 <= shortest <= longest:
        raise EngineError(
            f"n-gram lookup: prompt_lookup_min={shortest}, prompt_lookup_max={longest}: expected whole numbers with "
            "1 <= prompt_lookup_min <= prompt_lookup_max"
        )
    if num_tokens < 1:
        raise EngineError(f"n-gram lookup: num_speculative_tokens={num_tokens}, expected a whole number above 0")


class _Index:
    """Where each n-gram of a growing list ends for the first time, but for those that end the list."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(shortest, longest + 1)]
        self._shortest, self._read = shortest, 0

    def continuation(self, tokens: Sequence[int]) -> int | None:
        """Where to go on from: behind the first occurrence of the longest n-gram that ends the list."""
        length = len(tokens)
        for size, ends in enumerate(self._ends, self._shortest):
            for end in range(max(self._read, size), length):
                ends.setdefault(tuple(tokens[end - size : end]), end)
        self._read = max(self._read, length)
        for size in range(self._shortest + len(self._ends) - 1, self._shortest - 1, -1):
            found = self._ends[size - self._shortest].get(tuple(tokens[length - size :])) if size < length else None
            if found is not None:
                return found
        return None


class NgramProposer(LookupProposer):
    """Proposes the tokens after the first occurrence of the longest n-gram that the request ends with.

    n goes from `prompt_lookup_max` down to `prompt_lookup_min`; prompt and output are searched, and a match may overlap
    the end. A row drafts at most `num_tokens`, no more than follow there or fit below `max_model_len`, and nothing
    where no n-gram occurred before. Each step reads the new tokens alone (an index a request), whatever the length.
    EngineError where the bounds are not 1 <= min <= max.
    """

    def __init__(self, num_tokens: int, *, prompt_lookup_min: int, prompt_lookup_max: int, max_model_len: int) -> None:
        _check(num_tokens, prompt_lookup_min, prompt_lookup_max)
        super().__init__(num_tokens)
        self._bounds, self._max_model_len = (prompt_lookup_min, prompt_lookup_max), max_model_len
        self._indices: dict[str, _Index] = {}

    def forget(self, request: Request) -> None:
        """Drop the index of a request that has ended."""
        self._indices.pop(request.request_id, None)

    def draft(self, request: Request, num_tokens: int) -> list[int]:
        """Look up what followed before."""
        index = self._indices.setdefault(request.request_id, _Index(*self._bounds))
        start = index.continuation(request.tokens)
        count = max(0, min(num_tokens, self._max_model_len - len(request.tokens)))
        return [] if start is None else request.tokens[start : start + count]


class VectorisedNgramProposer:
    """`NgramProposer` for all rows at once on the verifier's device, with the same answers (method `ngram_gpu`).

    A step compares every position of every row with the last `prompt_lookup_max` tokens of the row.
    """

    def __init__(self, num_tokens: int, *, prompt_lookup_min: int, prompt_lookup_max: int, max_model_len: int) -> None:
        _check(num_tokens, prompt_lookup_min, prompt_lookup_max)
        self.num_tokens = num_tokens
        self.aux_layer_ids: Sequence[int] = ()
        self.verifier_ids_D: Tensor | None = None
        self._bounds, self._max_model_len = (prompt_lookup_min, prompt_lookup_max), max_model_len
        self._rows: TokenRows | None = None

    def observe(self, new: NewTokens) -> None:
        """Nothing to do: a prompt is copied whole when its request first drafts."""

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        """Look up at most `num_tokens` a row."""
        if self._rows is None:
            self._rows = TokenRows(self._max_model_len, new.next_ids_BT.device, dtype=torch.int32)
        lengths_B = self._rows.update(new.rows, new.requests)
        longest = max(len(request.tokens) for request in new.requests)
        ids_BT = self._rows.ids_RT[new.rows, :longest].long()
        starts_B, found_B = earlier_occurrence_of_end(ids_BT, lengths_B, *self._bounds)
        steps_K = torch.arange(num_tokens, device=ids_BT.device)
        places_BK = (starts_B[:, None] + steps_K).clamp(max=longest - 1)
        room_B = torch.minimum(lengths_B - starts_B, self._max_model_len - lengths_B).clamp(0, num_tokens)
        return Proposal(ids_BT.gather(1, places_BK), torch.where(found_B, room_B, 0))

    def move(self, source: int, target: int, length: int) -> None:
        """Let the ids follow a request to another row."""
        if self._rows is not None:
            self._rows.move(source, target, length)

    def require_prefix_reuse(self, num_slots: int) -> None:
        """Nothing to do: what is drafted follows from a request's tokens."""

    def copy_prefix(self, source: int, target: int, length: int, request: Request | None) -> None:
        """Nothing to do: a row is read from its request."""

    def forget(self, request: Request) -> None:
        """The row of a request that has ended is free."""
        if self._rows is not None:
            self._rows.forget(request)


def earlier_occurrence_of_end(ids_BT: Tensor, lengths_B: Tensor, shortest: int, longest: int) -> tuple[Tensor, Tensor]:
    """Where each row goes on after the first occurrence of the longest n-gram that ends it, and whether one occurs.

    `ids_BT` holds `lengths_B` ids a row; shortest <= n <= longest. Returns positions [B] int64 and found [B] bool.
    """
    width = ids_BT.shape[1]
    ends_T = torch.arange(width, device=ids_BT.device)
    matching_BT = ends_T < lengths_B[:, None] - 1
    run_BT = torch.zeros_like(ids_BT)
    for back in range(min(longest, width)):
        # The token `back` before each position, against the one `back` before the end.
        last_B1 = ids_BT.gather(1, (lengths_B - 1 - back).clamp(min=0)[:, None])
        earlier_BT = ids_BT.roll(back, 1)
        matching_BT = matching_BT & (earlier_BT == last_B1) & (ends_T >= back)
        run_BT += matching_BT
    # One number to order by length, then by how early it is.
    best_BT = run_BT * (width + 1) + (width - ends_T)
    end_B = best_BT.argmax(1)
    found_B = run_BT.gather(1, end_B[:, None])[:, 0] >= shortest
    return end_B + 1, found_B
