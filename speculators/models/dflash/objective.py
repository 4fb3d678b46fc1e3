"""Training of a block drafter: blocks at anchors drawn from the verifier's own answers, all slots in one pass.

Shape suffixes as in `supervision`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor, nn

from speculators.models.dflash.anchors import Positions, require_an_anchor
from speculators.models.dflash.model import DFlashModel
from speculators.models.dflash.supervision import Supervision, block_metrics, compare
from speculators.models.draft_model import PackedBatch, SampleSource, StepOutput
from speculators.models.execution import Execution
from speculators.models.family import Count
from speculators.models.loss_choice import LossChoice
from speculators.models.losses import Head, TokenLoss, TokenLosses, VerifierHead
from speculators.models.objective import LossTerms, TeacherHead, TrainingObjective, unwrapped
from speculators.models.position_weights import dpace, exponential_decay


@dataclass
class TokenMeans:
    """The token loss of one batch: `loss`, a scalar to differentiate, and `losses` of the slots that count.

    Of a mixture, `terms` has what each of its terms comes to by itself, as far as that is known.
    """

    loss: Tensor
    losses: TokenLosses
    terms: dict[str, Tensor]


class DFlashObjective(TrainingObjective):
    """The knobs of training a block drafter, and its training step.

    `max_anchors` blocks a document at most and `max_blocks` a pass, see `Positions.anchors`; the latter bounds a pass's
    memory, whatever documents it packs. `anchors_before_answers` allows anchors at the token before an answer too,
    though in serving every anchor is a token that the verifier wrote. `loss` weighs the terms of `losses.TERMS`. Slots
    of a block weigh exp(-j / `decay_gamma`), j counting those that predict from 0, or, with `position_weights` "dpace",
    what they add to the expected accepted length (`dpace_alpha` as in `position_weights.dpace`, by each term's own
    values, which are its paper's for `ce`). `chunk_rows` bounds how many slots have logits at a time.
    """

    max_anchors: int = Field(default=512, ge=1)
    max_blocks: int | None = Field(default=None, ge=1)
    anchors_before_answers: bool = False
    loss: LossTerms = Field(default={"kl_div": 1.0})
    position_weights: Literal["exponential", "dpace"] = "exponential"
    decay_gamma: float = Field(default=4.0, gt=0)
    dpace_alpha: float = Field(default=0.5, ge=0, le=1)
    chunk_rows: int = Field(default=512, ge=1)

    _teacher: TeacherHead = PrivateAttr(default_factory=TeacherHead)

    def begin(self, draft: nn.Module, samples: SampleSource, verifier_head: VerifierHead) -> None:
        """Refuse samples none of which has room for a block; see `anchors.require_an_anchor`."""
        block_size = unwrapped(draft, DFlashModel).config.block_size
        require_an_anchor(samples, block_size, before_answers=self.anchors_before_answers)

    def require_possible(self, execution: Execution) -> None:
        """Raise UsageError where Triton is asked for `loss` and has no kernel for it."""
        apart = [{name: 1.0} for name in self.loss]
        for terms in apart if self.position_weights == "dpace" else [self.loss]:
            self._token_loss(terms, self.chunk_rows, LossChoice(execution.losses))

    def _token_loss(self, terms: dict[str, float], chunk_rows: int, choice: LossChoice) -> TokenLoss:
        return TokenLoss(terms, chunk_rows, with_total_variation=True, with_cross_entropy="ce" in terms, choice=choice)

    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """Loss and counts of one raw, unshifted batch.

        The loss is the weighted sum of the token losses of all slots that count, divided by their number; `loss` counts
        that sum and number, `ce_loss` and `tv_loss` those of a mixture's terms. See `block_metrics` for other counts.
        """
        model = unwrapped(draft, DFlashModel)
        supervision = self.supervise(model, batch)
        states_AJH = draft(supervision.inputs)[:, model.config.first_slot :]
        states_NH = states_AJH[supervision.counted_AJ]
        draft_head = Head(self._teacher.draft_weight(model, verifier_head))
        tokens = self.token_means(model, supervision, states_NH, draft_head, verifier_head)
        return StepOutput(tokens.loss, self.counts(model, supervision, tokens, tokens.loss))

    def supervise(self, model: DFlashModel, batch: PackedBatch) -> Supervision:
        """Draw the anchors of this step; documents too short for one are left out."""
        positions = Positions.of(batch, model.config.block_size + 1)
        anchors_A = positions.anchors(
            model.config.block_size,
            self.max_anchors,
            before_answers=self.anchors_before_answers,
            max_blocks=self.max_blocks,
        )
        return Supervision.of(positions, anchors_A, model.config)

    def token_means(
        self,
        model: DFlashModel,
        supervision: Supervision,
        states_NH: Tensor,
        draft_head: Head,
        verifier_head: VerifierHead,
    ) -> TokenMeans:
        """Compare the slots that count, in order, with the verifier; `draft_head` makes logits of `states_NH`."""
        # Up to one slot of each number is compared with the same verifier state.
        chunk_rows = max(1, self.chunk_rows // model.config.max_speculative_tokens)
        teacher = verifier_head, self._teacher.over_draft_vocabulary(model, verifier_head)

        def compared(terms: dict[str, float]) -> TokenLosses:
            loss = self._token_loss(terms, chunk_rows, model.loss_choice)
            return compare(loss, supervision, states_NH, draft_head, teacher)

        if self.position_weights == "dpace":
            # Weights differ by term, and so each term is a loss of its own.
            by_term = {name: compared({name: 1.0}) for name in self.loss}
            terms = {name: self.weighted_mean(supervision, losses.loss) for name, losses in by_term.items()}
            loss = torch.stack([weight * terms[name] for name, weight in self.loss.items()]).sum()
            losses = next(iter(by_term.values()))
        else:
            losses = compared(self.loss)
            loss = self.weighted_mean(supervision, losses.loss)
            known = {"ce": losses.cross_entropy, "tv": losses.total_variation}
            terms = {
                name: self.weighted_mean(supervision, term_N)
                for name, term_N in known.items()
                if name in self.loss and term_N is not None
            }
        return TokenMeans(loss, losses, terms if len(self.loss) > 1 else {})

    def weighted_mean(self, supervision: Supervision, losses_N: Tensor) -> Tensor:
        """The sum of one loss over the slots that count, weighed as `position_weights` says, by their number."""
        values_AJ = supervision.spread(losses_N)
        if self.position_weights == "dpace":
            return supervision.mean(values_AJ, dpace(values_AJ, supervision.counted_AJ, self.dpace_alpha))
        return supervision.mean(values_AJ, exponential_decay(values_AJ.shape[1], self.decay_gamma).to(values_AJ.device))

    def counts(
        self, model: DFlashModel, supervision: Supervision, tokens: TokenMeans, loss: Tensor
    ) -> dict[str, Count]:
        """`block_metrics`, the whole `loss` of the step, and the terms of a mixture."""
        found = block_metrics(supervision, tokens.losses, model.config.first_slot)
        size = found["position_acc"].count
        means = {"loss": loss} | {f"{name}_loss": mean for name, mean in tokens.terms.items()}
        return {name: Count(mean.item() * size, size) for name, mean in means.items()} | found
