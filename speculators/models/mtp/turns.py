"""What several MTP blocks have to see again: the cache of their keys, and the last inputs before it goes on.

Block i reads, at position p, the token at p + 1 + i and the output of block i - 1 there (block 0: the verifier's
state), as in DeepSeek-V3 (arXiv 2412.19437, 2.2) and vLLM 0.32: all at the rotary position p. The tokens of its last i
positions are drafts when they are computed, so that the next round runs over them again. Shape suffixes: B rows, T new
positions, R positions that are run over again, W = R + T, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators.models.cache import SlotCache


@dataclass
class Turn:
    """Positions that all blocks run over, one after another: row b has `lengths[b]` of W, from `starts[b]` on.

    `token_ids_BW` are the tokens after each, `states_BWH` what stands for the verifier's states there.
    """

    token_ids_BW: Tensor
    states_BWH: Tensor
    starts: list[int]
    lengths: list[int]

    @property
    def last_B(self) -> Tensor:
        """Index of each row's last position; 0 where it has none."""
        last = [max(length, 1) - 1 for length in self.lengths]
        return torch.tensor(last, device=self.token_ids_BW.device)

    def at_last(self, rows_BWX: Tensor) -> Tensor:
        """Of [B, W, ...], what each row has at its last position."""
        return rows_BWX[torch.arange(len(rows_BWX), device=rows_BWX.device), self.last_B]

    def shifted(self, token_ids_BW: Tensor, token_ids_B: Tensor) -> Tensor:
        """Tokens of all positions moved on by one, with a new one at each row's last position."""
        moved_BW = token_ids_BW.roll(-1, 1)
        moved_BW[torch.arange(len(moved_BW), device=moved_BW.device), self.last_B] = token_ids_B
        return moved_BW


class TurnCache(SlotCache):
    """Keys and values of each block, and each slot's last `again` tokens and states, the newest at the end."""

    def __init__(
        self, num_blocks: int, num_slots: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(num_blocks, num_slots, dtype=dtype, device=device)
        self.again = num_blocks - 1
        self._tokens = torch.zeros(num_slots, self.again, dtype=torch.int64, device=device)
        self._states = torch.zeros(num_slots, self.again, hidden_size, dtype=dtype, device=device)

    @property
    def goes_on_anywhere(self) -> bool:
        """Whether no inputs are read again, which are kept for the end of each slot alone."""
        return not self.again

    def turn(
        self, rows: slice, token_ids_BT: Tensor, states_BTH: Tensor, starts: Sequence[int], lengths: Sequence[int]
    ) -> Turn:
        """The positions of a turn: `lengths[b]` new ones from `starts[b]` on, and those before it that count again."""
        before = [min(self.again, start) for start in starts]
        tokens_BW = torch.cat((self._tokens[rows], token_ids_BT), 1)
        states_BWH = torch.cat((self._states[rows], states_BTH), 1)
        if min(before) < self.again:
            # Rows that have fewer positions before begin with the first of them.
            skipped_B1 = torch.tensor([self.again - count for count in before], device=self.device)[:, None]
            places_BW = (skipped_B1 + torch.arange(tokens_BW.shape[1], device=self.device)).clamp(
                max=tokens_BW.shape[1] - 1
            )
            rows_B1 = torch.arange(len(before), device=self.device)[:, None]
            tokens_BW, states_BWH = tokens_BW[rows_B1, places_BW], states_BWH[rows_B1, places_BW]
        return Turn(
            tokens_BW,
            states_BWH,
            [start - count for start, count in zip(starts, before, strict=True)],
            [length + count for length, count in zip(lengths, before, strict=True)],
        )

    def remember(self, rows: slice, turn: Turn) -> None:
        """Keep a turn's last positions for the next one."""
        if not self.again:
            return
        first_B1 = torch.tensor(turn.lengths, device=self.device)[:, None] - self.again
        places_BR = (first_B1 + torch.arange(self.again, device=self.device)).clamp(min=0)
        rows_B1 = torch.arange(len(turn.lengths), device=self.device)[:, None]
        self._tokens[rows] = turn.token_ids_BW[rows_B1, places_BR]
        self._states[rows] = turn.states_BWH[rows_B1, places_BR]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` entries of one slot over another, and its last inputs."""
        super().move(source, target, length)
        self._tokens[target], self._states[target] = self._tokens[source], self._states[source]
