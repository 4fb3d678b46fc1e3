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

    @classmethod
    def after(
        cls,
        ending: tuple[Tensor, Tensor],
        token_ids_BT: Tensor,
        states_BTH: Tensor,
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> Turn:
        """Positions behind others whose `ending` counts again: `lengths[b]` new ones from `starts[b]` on."""
        again, device = ending[0].shape[1], token_ids_BT.device
        before = [min(again, start) for start in starts]
        tokens_BW, states_BWH = torch.cat((ending[0], token_ids_BT), 1), torch.cat((ending[1], states_BTH), 1)
        if min(before) < again:
            # Rows that have fewer positions before begin with the first of them.
            skipped_B1 = torch.tensor([again - count for count in before], device=device)[:, None]
            places_BW = (skipped_B1 + torch.arange(tokens_BW.shape[1], device=device)).clamp(max=tokens_BW.shape[1] - 1)
            rows_B1 = torch.arange(len(before), device=device)[:, None]
            tokens_BW, states_BWH = tokens_BW[rows_B1, places_BW], states_BWH[rows_B1, places_BW]
        return cls(
            tokens_BW,
            states_BWH,
            [start - count for start, count in zip(starts, before, strict=True)],
            [length + count for length, count in zip(lengths, before, strict=True)],
        )

    def then(self, token_ids_BT: Tensor, states_BTH: Tensor) -> Turn:
        """The next T positions of every row, of T blocks: the last T - 1 before them count again."""
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        count = token_ids_BT.shape[1]
        return Turn.after(self.ending(count - 1), token_ids_BT, states_BTH, ends, [count] * len(ends))

    def ending(self, count: int) -> tuple[Tensor, Tensor]:
        """Tokens and states of each row's last `count` positions; in front of fewer, something."""
        first_B1 = torch.tensor(self.lengths, device=self.token_ids_BW.device)[:, None] - count
        places_BR = (first_B1 + torch.arange(count, device=first_B1.device)).clamp(min=0)
        rows_B1 = torch.arange(len(self.lengths), device=first_B1.device)[:, None]
        return self.token_ids_BW[rows_B1, places_BR], self.states_BWH[rows_B1, places_BR]

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
        return Turn.after((self._tokens[rows], self._states[rows]), token_ids_BT, states_BTH, starts, lengths)

    def remember(self, rows: slice, turn: Turn) -> None:
        """Keep a turn's last positions for the next one."""
        self._tokens[rows], self._states[rows] = turn.ending(self.again)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` entries of one slot over another, and its last inputs."""
        super().move(source, target, length)
        self._tokens[target], self._states[target] = self._tokens[source], self._states[source]
