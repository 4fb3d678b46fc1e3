"""Which positions of packed rows are trained to predict which later token, and how often they were right.

Shape suffixes: B rows, T tokens, N positions (of all rows one after another, or of all steps that count), C positions
without padding, R those of them that are active at a step, K draft steps, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculators.models.draft_model import DraftModel, PackedBatch, StepOutput
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


def up_to_last(marked_N: Tensor, runs_N: Tensor) -> tuple[Tensor, list[int]]:
    """The positions of each document up to the last that is marked (bool), int64 [C], and how many each has.

    `runs_N` are those of `document_runs`. A document without a mark is left out.
    """
    index_N = torch.arange(len(runs_N), device=runs_N.device)
    last_D = torch.full((int(runs_N.max().clamp(min=0)) + 1,), -1, device=runs_N.device)
    last_D = last_D.scatter_reduce(0, runs_N[marked_N], index_N[marked_N], "amax")
    kept_C = torch.nonzero((runs_N >= 0) & (index_N <= last_D[runs_N.clamp(min=0)])).squeeze(1)
    counts = torch.bincount(runs_N[kept_C], minlength=len(last_D)).tolist()
    return kept_C, [count for count in counts if count]


def counted_positions(supervised_C: Tensor, document_lengths: Sequence[int], num_steps: int) -> Tensor:
    """Which positions count at step k, bool [K, C]: those where position c + k of their document is supervised."""
    lengths = torch.tensor(document_lengths, dtype=torch.int64, device=supervised_C.device)
    end_C = lengths.cumsum(0).repeat_interleave(lengths)
    steps_K1 = torch.arange(num_steps, device=supervised_C.device)[:, None]
    place_KC = torch.arange(len(supervised_C), device=supervised_C.device) + steps_K1
    reached_KC = place_KC < end_C
    return reached_KC & supervised_C[torch.where(reached_KC, place_KC, 0)]


def schedule(supervised_C: Tensor, document_lengths: Sequence[int], num_steps: int) -> tuple[list[Tensor], Tensor]:
    """Per step k: the positions unrolled to it, int64 [R] ascending, and which positions count at it, bool [K, C].

    A position is unrolled as far as the last step at which it counts (see `counted_positions`).
    """
    counted_KC = counted_positions(supervised_C, document_lengths, num_steps)
    active_KC = counted_KC.long().flip(0).cumsum(0).flip(0) > 0
    return [torch.nonzero(active_C).squeeze(1) for active_C in active_KC], counted_KC


def counted_states(states: Sequence[Tensor], slots: Sequence[Tensor], counted_KC: Tensor) -> tuple[Tensor, Tensor]:
    """Of every step's states [R, H] at its `slots`, those that count, and where their targets stand: c + k.

    States [N, H] and places int64 [N], step after step.
    """
    chosen = [counted_C[slots_R] for counted_C, slots_R in zip(counted_KC, slots, strict=True)]
    kept = [states_RH[rows_R] for states_RH, rows_R in zip(states, chosen, strict=True)]
    places = [slots_R[rows_R] + step for step, (slots_R, rows_R) in enumerate(zip(slots, chosen, strict=True))]
    return torch.cat(kept), torch.cat(places)


def sums_by_step(losses_N: Tensor, counted_KC: Tensor) -> tuple[Tensor, list[int]]:
    """The sum of each step's losses [K], of losses step after step, and how many positions count at each step."""
    sizes: list[int] = counted_KC.sum(1).tolist()
    return torch.stack([part.sum() for part in losses_N.split(sizes)]), sizes


def acceptance_counts(hits_N: Tensor, counted_KC: Tensor) -> list[list[int]]:
    """Per step k: right at 0..k, counted at 0..k, and counted at k after being right at 0..k-1.

    `counted_KC` bool says which positions count at which step, `hits_N` bool whether each of them was right, step after
    step. A position that does not count at a step is no mismatch there: from that step on it is left out.
    """
    right_KC = torch.zeros_like(counted_KC).masked_scatter(counted_KC, hits_N).long().cumprod(0)
    known_KC = counted_KC.long().cumprod(0)
    reached_KC = torch.cat((torch.ones_like(right_KC[:1]), right_KC[:-1])) * counted_KC
    counts: list[list[int]] = torch.stack([part.sum(1) for part in (right_KC, known_KC, reached_KC)], 1).tolist()
    return counts


def acceptance_metrics(counts: Sequence[Sequence[int]]) -> dict[str, Count]:
    """Per step k `full_acc_k` and `cond_acc_k` from `acceptance_counts`."""
    named = {}
    for step, (right, known, reached) in enumerate(counts):
        named[f"full_acc_{step}"] = Count(right, known)
        named[f"cond_acc_{step}"] = Count(right, reached)
    return named


def step_metrics(
    loss: Count, totals: Sequence[float], sizes: Sequence[int], counts: Sequence[Sequence[int]]
) -> dict[str, Count]:
    """`loss`; per step k `loss_k`, the sum and number of its losses, and the `acceptance_metrics` of `counts`."""
    by_step = {f"loss_{step}": Count(*pair) for step, pair in enumerate(zip(totals, sizes, strict=True))}
    return {"loss": loss} | by_step | acceptance_metrics(counts)


def zero_loss(draft: DraftModel) -> Tensor:
    """A zero whose gradient by every trained parameter is there, and zero."""
    return torch.stack([parameter.sum() for parameter in draft.trained_parameters()]).sum() * 0.0


def nothing_to_learn(draft: DraftModel, num_steps: int) -> StepOutput:
    """A zero that can be differentiated, and empty counts: of a batch in which no position counts."""
    return StepOutput(
        zero_loss(draft), step_metrics(Count(0, 0), [0] * num_steps, [0] * num_steps, [[0, 0, 0]] * num_steps)
    )
