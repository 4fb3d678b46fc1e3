"""Training of a DFlash 2 draft: the block drafter's loss on the logits, and one on the selector's choice.

Shape suffixes as in `dflash.supervision`; K candidates of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from speculators.models.dflash.objective import DFlashObjective
from speculators.models.dflash.supervision import Supervision, greedy_metrics
from speculators.models.dflash2.model import DFlash2Model
from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.family import Count
from speculators.models.losses import Head, VerifierHead
from speculators.models.objective import unwrapped


@dataclass
class SelectorLosses:
    """Per slot that counts [N]: the cross entropy, and bool what became of the verifier's likeliest token.

    Whether it was a candidate (`recalled_N`), whether it was chosen after the data's token (`chosen_N`), and whether it
    was chosen after the verifier's likeliest one of the slot before (`followed_N`), which is what the draft itself has
    chosen there as long as all before were right.
    """

    loss_N: Tensor
    recalled_N: Tensor
    chosen_N: Tensor
    followed_N: Tensor


def selector_losses(
    model: DFlash2Model, supervision: Supervision, states_NH: Tensor, labels_N: Tensor, chunk_rows: int
) -> SelectorLosses:
    """-log softmax of the candidates' scores at the label, the verifier's likeliest token (int64 [N]).

    Candidates are the likeliest tokens of the draft's own logits, scored after the data's token before; where the label
    is not among them, it takes the place of the last. Gradients flow to the states and the selector; `chunk_rows` rows
    have logits and candidates' weights at a time, in the backward pass too.
    """
    counted_AJ = supervision.counted_AJ
    before_AJ = supervision.previous_ids_AJ
    chosen_AJ = torch.cat((before_AJ[:, :1], supervision.spread(labels_N)[:, :-1]), 1)
    parts = states_NH, before_AJ[counted_AJ], chosen_AJ[counted_AJ], labels_N
    rows = []
    for states, data, own, labels in zip(*(part.split(chunk_rows) for part in parts), strict=True):
        with torch.no_grad():
            served = Head(model.lm_head.weight).logits(states).topk(model.config.selector_top_k).indices
            known = (served == labels[:, None]).any(-1)
            candidates = served.clone()
            candidates[~known, -1] = labels[~known]
            place = (candidates == labels[:, None]).int().argmax(-1)
            follows = known & (_scores(model, states, own, served).argmax(-1) == place)
        scores = cast(Tensor, checkpoint(_scores, model, states, data, candidates, use_reentrant=False))
        loss = F.cross_entropy(scores.float(), place, reduction="none")
        rows.append((loss, known, known & (scores.detach().argmax(-1) == place), follows))
    return SelectorLosses(*(torch.cat(column) for column in zip(*rows, strict=True)))


def _scores(model: DFlash2Model, states: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
    weights = F.embedding(candidates, model.lm_head.weight).to(states.dtype)
    unary = torch.linalg.vecdot(weights, states[:, None])
    scores: Tensor = unary + model.candidate_selector(states, previous, candidates)
    return scores


class DFlash2Objective(DFlashObjective):
    """The knobs of training a DFlash 2 draft, and its training step: `DFlashObjective`, and `selector_weight`."""

    selector_weight: float = Field(default=1.0, ge=0)

    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """Loss and counts of one raw, unshifted batch.

        The loss is the block drafter's plus `selector_weight` times the selector's, weighed by the same rule and with
        the same divisor. Counts are the block drafter's, of the logits without the selector, but for `greedy_metrics`,
        which are of what the selector chooses after its own choices; `unary_eal` is of the logits. Besides,
        `unary_loss` and `selector_loss`; `candidate_recall`, slots among whose candidates is the verifier's likeliest
        token; and `selector_acc`, those of them where it is chosen after the data's token.
        """
        model = unwrapped(draft, DFlash2Model)
        supervision = self.supervise(model, batch)
        states_AJH = draft(supervision.inputs)[:, model.config.first_slot :]
        states_NH = states_AJH[supervision.counted_AJ]
        tokens = self.token_means(model, supervision, states_NH, Head(model.lm_head.weight), verifier_head)
        selector = selector_losses(model, supervision, states_NH, tokens.losses.verifier_argmax, self.chunk_rows)
        selector_loss = self.weighted_mean(supervision, selector.loss_N)
        loss = tokens.loss + self.selector_weight * selector_loss
        counts = self.counts(model, supervision, tokens, loss)
        counts |= {"unary_eal": counts["eal"]} | selector_counts(supervision, selector, tokens.loss, selector_loss)
        return StepOutput(loss, counts)


def selector_counts(
    supervision: Supervision, selector: SelectorLosses, unary_loss: Tensor, selector_loss: Tensor
) -> dict[str, Count]:
    """The counts of a step that only this family has."""
    sums = [unary_loss.detach(), selector_loss.detach(), selector.recalled_N.sum(), selector.chosen_N.sum()]
    unary, selected, recalled, chosen = torch.stack(sums).tolist()
    size = len(selector.loss_N)
    return {
        "unary_loss": Count(unary * size, size),
        "selector_loss": Count(selected * size, size),
        "candidate_recall": Count(recalled, size),
        "selector_acc": Count(chosen, recalled),
        **greedy_metrics(supervision, selector.followed_N),
    }
