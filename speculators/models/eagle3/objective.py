"""Training-time test: an EAGLE-3 draft is trained on the states it will see in serving, its own.

Position c of a document carries the features of token c and the id of token c+1. At step k it takes token c+1+k beside
its own state of step k-1, and its prediction is compared with the verifier's distribution over token c+2+k. It counts
where that token is one the verifier wrote, in the same document. Shape suffixes as in `model`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator
from torch import Tensor, nn

from speculators.models.draft_model import Objective, PackedBatch, SampleSource, StepOutput
from speculators.models.eagle3.closed_form import closed_form_start
from speculators.models.eagle3.model import Eagle3Model
from speculators.models.eagle3.network import FusedDraftModel
from speculators.models.eagle3.unroll import Unroll
from speculators.models.family import Count
from speculators.models.losses import Head, TokenLoss, TokenLosses, VerifierHead
from speculators.models.position_weights import step_decay


@dataclass
class AlignedBatch:
    """A batch without padding, shifted for step 0: index c of every field belongs to the prediction of token c+2.

    Documents lie one after another, `document_lengths` positions each. `features_CX`; `token_ids_C` int64, the token
    after the features'; `positions_C` int64, the rotary position; `last_hidden_states_CH`, the verifier's state (before
    its final norm) at that token; `supervised_C` bool. Step k at c takes token, state and mask at c + k.
    """

    features_CX: Tensor
    token_ids_C: Tensor
    positions_C: Tensor
    last_hidden_states_CH: Tensor
    supervised_C: Tensor
    document_lengths: list[int]


def align(batch: PackedBatch) -> AlignedBatch:
    """Shift a raw batch, and leave out padding, documents without supervision and what follows the last of it."""
    document_N = _runs(batch.document_ids)
    mask_N = batch.loss_mask.flatten()
    supervised_N = torch.zeros_like(mask_N)
    supervised_N[:-2] = mask_N[2:] & (document_N[:-2] == document_N[2:]) & (document_N[:-2] >= 0)
    index_N = torch.arange(len(mask_N), device=mask_N.device)
    last_D = torch.full((int(document_N.max().clamp(min=0)) + 1,), -1, device=mask_N.device)
    last_D = last_D.scatter_reduce(0, document_N[supervised_N], index_N[supervised_N], "amax")
    kept_C = torch.nonzero((document_N >= 0) & (index_N <= last_D[document_N.clamp(min=0)])).squeeze(1)
    counts = torch.bincount(document_N[kept_C], minlength=len(last_D))

    def rows(tensor: Tensor, shift: int) -> Tensor:
        return tensor.flatten(0, 1).index_select(0, kept_C + shift)

    return AlignedBatch(
        features_CX=rows(batch.aux_hidden_states, 0),
        token_ids_C=rows(batch.input_ids, 1),
        positions_C=rows(batch.position_ids, 0),
        last_hidden_states_CH=rows(batch.last_hidden_states, 1),
        supervised_C=supervised_N[kept_C],
        document_lengths=[count for count in counts.tolist() if count],
    )


def _runs(document_ids: Tensor) -> Tensor:
    """Number the runs of equal ids from 0 over all rows, int64 [N]; padding keeps -1."""
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    padding = (document_ids < 0).flatten()
    runs = (starts.flatten() & ~padding).cumsum(0) - 1
    return runs.masked_fill(padding, -1)


def counted_positions(supervised_C: Tensor, document_lengths: list[int], steps: int) -> list[Tensor]:
    """Per step k: the positions that count at it, bool [C]: where position c + k of its document is supervised."""
    lengths = torch.tensor(document_lengths, dtype=torch.int64, device=supervised_C.device)
    end_C = lengths.cumsum(0).repeat_interleave(lengths)
    index_C = torch.arange(len(supervised_C), device=supervised_C.device)
    counted = []
    for step in range(steps):
        reached = index_C + step < end_C
        counted.append(reached & supervised_C[torch.where(reached, index_C + step, 0)])
    return counted


def schedule(supervised_C: Tensor, document_lengths: list[int], ttt_steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Per step k: the positions unrolled to it, int64 [R] ascending, and the positions that count at it, bool [C].

    A position is unrolled as far as the last step at which it counts.
    """
    counted = counted_positions(supervised_C, document_lengths, ttt_steps)
    slots, active = [], torch.zeros_like(supervised_C)
    for mask in reversed(counted):
        active = active | mask
        slots.append(torch.nonzero(active).squeeze(1))
    return slots[::-1], counted


def acceptance_counts(hits: list[Tensor], counted: list[Tensor]) -> Tensor:
    """Per step k: right at 0..k, counted at 0..k, and counted at k after being right at 0..k-1; int64 [K, 3].

    `hits[k]` bool says of the positions counted at k, in order, whether the draft's likeliest token was the verifier's.
    """
    right, known, rows = torch.ones_like(counted[0]), torch.ones_like(counted[0]), []
    for hit, mask in zip(hits, counted, strict=True):
        reached = right & known & mask
        right_here = torch.zeros_like(mask)
        right_here[mask] = hit
        right, known = right & right_here, known & mask
        rows.append(torch.stack(((right & known).sum(), known.sum(), reached.sum())))
    return torch.stack(rows)


class Distillation:
    """Compares draft states with the verifier's distributions; keeps its head over the draft vocabulary."""

    def __init__(self) -> None:
        self._known: tuple[VerifierHead, Tensor, Head] | None = None

    def compare(
        self,
        loss: TokenLoss,
        draft: FusedDraftModel,
        batch: AlignedBatch,
        verifier_head: VerifierHead,
        hidden_NH: Tensor,
        places_N: Tensor,
    ) -> TokenLosses:
        """Losses of draft states, which `lm_head` reads, against the verifier's at supervised context positions [N]."""
        rank_C = batch.supervised_C.cumsum(0) - 1
        teacher_MH = verifier_head.norm(batch.last_hidden_states_CH[batch.supervised_C].to(hidden_NH.dtype))
        own = draft.lm_head.weight
        head = self._over_draft_vocabulary(draft, own, verifier_head)
        return loss(hidden_NH, Head(own), teacher_MH, head, rank_C[places_N])

    def _over_draft_vocabulary(self, draft: FusedDraftModel, own: Tensor, verifier_head: VerifierHead) -> Head:
        """The verifier's head over the draft vocabulary; the draft's own frozen rows where they are the same."""
        if self._known is not None and self._known[0] is verifier_head and self._known[1] is own:
            return self._known[2]
        ids_D = draft.verifier_ids_D
        head = verifier_head.head if ids_D is None else verifier_head.restricted(ids_D).head
        if not own.requires_grad and torch.equal(head.weight.to(own.dtype), own):
            head = replace(head, weight=own.detach())
        self._known = verifier_head, own, head
        return head


def nothing_to_learn(draft: FusedDraftModel, steps: int) -> StepOutput:
    """A zero that can be differentiated, and empty counts."""
    zero = torch.stack([parameter.sum() for parameter in draft.trained_parameters()]).sum() * 0.0
    return StepOutput(zero, named_counts([0.0] * (steps + 1), [[0, 0, 0]] * steps))


class Eagle3Objective(BaseModel, Objective):
    """The knobs of training an EAGLE-3 draft, and its training step.

    `ttt_steps` steps are unrolled; step k weighs `step_decay ** k`. `loss` weighs the terms of `losses.TERMS`.
    `chunk_rows` bounds how many verifier rows have logits at a time. `windows_from_start` is for drafts with attention
    windows (see `Unroll`): servers count windows from the query, so leave it false to train what is served.
    `closed_form_rows` positions are regressed on before the first step (see `closed_form`; 0: start at random). With
    `mean_per_step`, a step's losses are averaged over the positions that count at it, not over those of step 0.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    ttt_steps: int = Field(default=3, ge=1, le=64)
    step_decay: float = Field(default=0.8, gt=0, le=1)
    loss: dict[str, float] = Field(default={"kl_div": 1.0})
    chunk_rows: int = Field(default=128, ge=1)
    closed_form_rows: int = Field(default=32_768, ge=0)
    windows_from_start: bool = False
    mean_per_step: bool = False

    _distillation: Distillation = PrivateAttr(default_factory=Distillation)

    @field_validator("loss")
    @classmethod
    def _known_terms(cls, value: dict[str, float]) -> dict[str, float]:
        TokenLoss(value)
        return value

    def begin(self, draft: nn.Module, samples: SampleSource, verifier_head: VerifierHead) -> None:
        """Start from the linear regression of `closed_form`."""
        if self.closed_form_rows:
            closed_form_start(cast(Eagle3Model, draft), samples, verifier_head, self.closed_form_rows)

    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """Loss and counts of one raw, unshifted batch."""
        return self.aligned_step(draft, align(batch), verifier_head)

    def aligned_step(self, draft: nn.Module, batch: AlignedBatch, verifier_head: VerifierHead) -> StepOutput:
        """The loss is sum over steps of step_decay^k * (sum of losses) / N, N the positions that count at step 0.

        Counts: `loss` (that sum and N), `loss_k` (losses at step k, without decay), `full_acc_k` (steps 0..k all right,
        of the positions that count at all of them), `cond_acc_k` (step k right, given steps 0..k-1 were).
        """
        model = cast(Eagle3Model, getattr(draft, "module", draft))
        if not batch.document_lengths:
            return nothing_to_learn(model, self.ttt_steps)
        slots, counted = schedule(batch.supervised_C, batch.document_lengths, self.ttt_steps)
        states = draft(
            Unroll(
                batch.features_CX,
                batch.token_ids_C,
                batch.positions_C,
                batch.document_lengths,
                slots,
                self.windows_from_start,
            )
        )
        losses = self._token_losses(model, batch, verifier_head, states, slots, counted)
        sizes = [int(mask.sum()) for mask in counted]
        totals = torch.stack([part.sum() for part in torch.split(losses.loss, sizes)])
        decay = step_decay(self.ttt_steps, self.step_decay).to(totals.device)
        if self.mean_per_step:
            decay = decay * sizes[0] / torch.tensor(sizes, device=totals.device).clamp(min=1)
        loss = (decay * totals).sum()
        hits = torch.split(losses.draft_argmax == losses.verifier_argmax, sizes)
        sums = torch.cat((loss.detach()[None], totals.detach())).tolist()
        return StepOutput(loss / sizes[0], named_counts(sums, acceptance_counts(list(hits), counted).tolist(), sizes))

    def acceptance_length(self, metrics: dict[str, Count]) -> float:
        """1 + the shares of positions that were right at steps 0..k, summed over k: greedy drafting with K = steps."""
        return 1.0 + sum(metrics[f"full_acc_{step}"].rate for step in range(self.ttt_steps))

    def _token_losses(
        self,
        model: Eagle3Model,
        batch: AlignedBatch,
        verifier_head: VerifierHead,
        states: list[Tensor],
        slots: list[Tensor],
        counted: list[Tensor],
    ) -> TokenLosses:
        chosen = [mask[slot] for mask, slot in zip(counted, slots, strict=True)]
        hidden_NH = torch.cat([state[rows] for state, rows in zip(states, chosen, strict=True)])
        places_N = torch.cat([slot[rows] + k for k, (slot, rows) in enumerate(zip(slots, chosen, strict=True))])
        loss = TokenLoss(self.loss, self.chunk_rows)
        return self._distillation.compare(loss, model, batch, verifier_head, hidden_NH, places_N)


def named_counts(sums: list[float], counts: list[list[int]], sizes: list[int] | None = None) -> dict[str, Count]:
    """`loss` and, per step, `loss_k`, `full_acc_k` and `cond_acc_k`.

    `sums` are the loss and those of each step, `sizes` how many positions count at a step, `counts` those of
    `acceptance_counts`.
    """
    sizes = sizes or [0] * len(counts)
    named = {"loss": Count(sums[0], sizes[0])}
    for step, (right, known, reached) in enumerate(counts):
        named[f"loss_{step}"] = Count(sums[step + 1], sizes[step])
        named[f"full_acc_{step}"] = Count(right, known)
        named[f"cond_acc_{step}"] = Count(right, reached)
    return named
