"""Which positions of packed rows are trained to predict which later token, and how often they were right.

Shape suffixes: B rows, T tokens, N = B*T positions of all rows one after another, C some of them, K draft steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculators.models.draft_model import PackedBatch
from speculators.models.family import Count


def document_runs(document_ids_BT: Tensor) -> Tensor:
    """Number the runs of equal ids from 0 over all rows, int64 [N]; padding keeps -1."""
    starts_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    padding_N = (document_ids_BT < 0).flatten()
    runs_N = (starts_BT.flatten() & ~padding_N).cumsum(0) - 1
    return runs_N.masked_fill(padding_N, -1)


def supervised(batch: PackedBatch, shift: int) -> Tensor:
    """Bool [N]: the token `shift` (1 or more) positions later is one the verifier wrote, in the same document."""
    runs_N, mask_N = document_runs(batch.document_ids), batch.loss_mask.flatten()
    found_N = torch.zeros_like(mask_N)
    found_N[:-shift] = mask_N[shift:] & (runs_N[:-shift] == runs_N[shift:]) & (runs_N[:-shift] >= 0)
    return found_N


def schedule(supervised_C: Tensor, document_lengths: Sequence[int], steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Per step k: the positions unrolled to it, int64 [R] ascending, and the positions that count at it, bool [C].

    A position counts at k where position c + k of its document is supervised, and is unrolled as far as the last step
    at which it counts.
    """
    lengths = torch.tensor(document_lengths, dtype=torch.int64, device=supervised_C.device)
    end_C = lengths.cumsum(0).repeat_interleave(lengths)
    index_C = torch.arange(len(supervised_C), device=supervised_C.device)
    counted = []
    for step in range(steps):
        reached_C = index_C + step < end_C
        counted.append(reached_C & supervised_C[torch.where(reached_C, index_C + step, 0)])
    slots, active_C = [], torch.zeros_like(supervised_C)
    for mask_C in reversed(counted):
        active_C = active_C | mask_C
        slots.append(torch.nonzero(active_C).squeeze(1))
    return slots[::-1], counted


def acceptance_counts(hits: Sequence[Tensor], counted: Sequence[Tensor]) -> list[list[int]]:
    """Per step k: right at 0..k, counted at 0..k, and counted at k after being right at 0..k-1.

    `counted[k]` bool [C] says which positions count at step k, `hits[k]` bool whether each of them was right, in order.
    """
    right_C, known_C, rows = torch.ones_like(counted[0]), torch.ones_like(counted[0]), []
    for hit, mask_C in zip(hits, counted, strict=True):
        reached_C = right_C & known_C & mask_C
        right_here_C = torch.zeros_like(mask_C)
        right_here_C[mask_C] = hit
        right_C, known_C = right_C & right_here_C, known_C & mask_C
        rows.append(torch.stack(((right_C & known_C).sum(), known_C.sum(), reached_C.sum())))
    found: list[list[int]] = torch.stack(rows).tolist()
    return found


def step_metrics(loss: Count, losses: Sequence[Count], counts: Sequence[Sequence[int]]) -> dict[str, Count]:
    """`loss`, and per step k `loss_k`, `full_acc_k` and `cond_acc_k` from `acceptance_counts`."""
    named = {"loss": loss}
    for step, (of_step, (right, known, reached)) in enumerate(zip(losses, counts, strict=True)):
        named[f"loss_{step}"] = of_step
        named[f"full_acc_{step}"] = Count(right, known)
        named[f"cond_acc_{step}"] = Count(right, reached)
    return named


def predicted_length(metrics: dict[str, Count], num_steps: int) -> float:
    """1 + the shares of positions that were right at steps 0..k, summed over k: tokens a verification would emit."""
    return 1.0 + sum(metrics[f"full_acc_{step}"].rate for step in range(num_steps))
