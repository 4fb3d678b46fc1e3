"""Rows whose losses and gradients Triton's kernels make where their logits lie. Suffixes as in `losses`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

from torch import Tensor

from speculators.models.chunked_loss import RowLosses, Rows
from speculators.models.heads import Head


def _kernels() -> ModuleType:
    """Triton's, which need not be installed."""
    from speculators.models.kernels import row_losses

    return row_losses


class FusedRows(Rows):
    """Rows that compare products, [R, D] in the dtype of the hidden states; the gradient takes their place."""

    def gradient(self, head: Head, hidden_RH: Tensor) -> Tensor:
        found = self.losses(head, hidden_RH, True).gradient_RD
        assert found is not None
        return found


@dataclass
class FusedLabelRows(FusedRows):
    """-log q of a label a row; `found` is reported besides, and the loss once more where it is asked for."""

    index_R: Tensor
    label_R: Tensor
    found: Mapping[str, Tensor] = field(default_factory=dict)
    with_cross_entropy: bool = False

    def losses(self, head: Head, hidden_RH: Tensor, differentiable: bool) -> RowLosses:
        product_RD = head.product(hidden_RH)
        loss_R, best_R = _kernels().label_losses(product_RD, head, self.label_R, differentiable)
        found = {"draft_argmax": best_R, **self.found}
        if self.with_cross_entropy:
            found["cross_entropy"] = loss_R
        return RowLosses(loss_R, product_RD if differentiable else None, found)


class FusedVerifier:
    """A chunk of the verifier's products and what their softmax is made of, once for all draft rows compared with it.

    With `by_label` draft rows learn its likeliest token (`ce`), else its distribution (`kl_div`).
    """

    def __init__(
        self, head: Head, hidden_SH: Tensor, *, by_label: bool, with_total_variation: bool, with_cross_entropy: bool
    ) -> None:
        self.head, self.by_label = head, by_label
        self.with_total_variation, self.with_cross_entropy = with_total_variation, with_cross_entropy
        product_SD = head.product(hidden_SH)
        self.softmax = _kernels().softmax_of(product_SD, head)
        # Of a likeliest token no more is needed.
        self.product_SD = None if by_label else product_SD

    def rows(self, index_R: Tensor, rows_R: Tensor) -> Rows:
        """The draft rows `index_R`, of which r is compared with row `rows_R[r]` of this chunk."""
        label_R = self.softmax.best_R.index_select(0, rows_R)
        if self.by_label:
            return FusedLabelRows(index_R, label_R, {"verifier_argmax": label_R}, self.with_cross_entropy)
        return FusedDivergenceRows(index_R, rows_R, label_R, self)


@dataclass
class FusedDivergenceRows(FusedRows):
    """`kl_div` of draft row r and the verifier's row rows_R[r]."""

    index_R: Tensor
    rows_R: Tensor
    label_R: Tensor
    verifier: FusedVerifier

    def losses(self, head: Head, hidden_RH: Tensor, differentiable: bool) -> RowLosses:
        verifier, product_RD = self.verifier, head.product(hidden_RH)
        assert verifier.product_SD is not None
        made = _kernels().divergence_losses(
            product_RD, head, verifier.product_SD, verifier.head, verifier.softmax, self.rows_R, differentiable
        )
        found = {"draft_argmax": made.best_R, "verifier_argmax": self.label_R}
        if verifier.with_total_variation:
            found["total_variation"] = made.total_variation_R
        if verifier.with_cross_entropy:
            found["cross_entropy"] = made.cross_entropy_R
        return RowLosses(made.loss_R, product_RD if differentiable else None, found)
