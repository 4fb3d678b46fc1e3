"""What the families' training objectives share. Suffixes as in `losses`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, TypeVar
from weakref import ReferenceType, ref

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict
from torch import Tensor, nn

from speculators.models.decoder_draft import DecoderDraftModel
from speculators.models.draft_model import DraftModel, Objective
from speculators.models.losses import Head, TokenLoss, VerifierHead


def _known_terms(weights: dict[str, float]) -> dict[str, float]:
    TokenLoss(weights)
    return weights


# Weights of the terms of `losses.TERMS`, which a `TokenLoss` is made of.
LossTerms = Annotated[dict[str, float], AfterValidator(_known_terms)]


class TrainingObjective(BaseModel, Objective):
    """An objective whose fields are its knobs: strict, known by name, and fixed once they are made."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


Model = TypeVar("Model", bound=DraftModel)


def unwrapped(draft: nn.Module, kind: type[Model]) -> Model:
    """The family's model inside whatever the training loop put around it."""
    model = getattr(draft, "module", draft)
    assert isinstance(model, kind)
    return model


class TeacherHead:
    """The verifier's head over the draft vocabulary, cut out once for as long as there is a verifier's head.

    What is known so far makes no difference: two of them are equal, so that objectives of the same knobs are.
    """

    def __init__(self) -> None:
        # Not kept alive from here: a head whose weight is gathered for one pass must not outlive it.
        self._known: tuple[ReferenceType[VerifierHead], Tensor, Head] | None = None
        self._shared: tuple[Head, bool] | None = None

    def __reduce__(self) -> tuple[type[TeacherHead], tuple[()]]:
        return TeacherHead, ()

    def _forget(self, _: ReferenceType[VerifierHead]) -> None:
        self._known = self._shared = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TeacherHead)

    def over_draft_vocabulary(self, draft: DecoderDraftModel, verifier_head: VerifierHead) -> Head:
        """The head to compare with; the draft's own frozen weight where it is the same, to keep one copy."""
        own = draft.lm_head.weight
        if self._known is not None and self._known[0]() is verifier_head and self._known[1] is own:
            return self._known[2]
        ids_D = draft.verifier_ids_D
        head = verifier_head.head if ids_D is None else verifier_head.restricted(ids_D).head
        # In the verifier's dtype the copy spares a cast a step, and takes less memory than that does.
        if head.weight.dtype is own.dtype and _frozen_and_equal(own, head):
            head = replace(head, weight=own.detach())
        self._known = ref(verifier_head, self._forget), own, head
        return head

    def draft_weight(self, draft: DecoderDraftModel, verifier_head: VerifierHead) -> Tensor:
        """The weight of the draft's head: the verifier's copy of it, in its dtype, where the draft's is frozen."""
        own = draft.lm_head.weight
        if own.requires_grad:
            return own
        head = self.over_draft_vocabulary(draft, verifier_head)
        if self._shared is None or self._shared[0] is not head:
            self._shared = head, _frozen_and_equal(own, head)
        return head.weight if self._shared[1] else own


def _frozen_and_equal(own: Tensor, head: Head) -> bool:
    return not own.requires_grad and torch.equal(head.weight.to(own.dtype), own)
