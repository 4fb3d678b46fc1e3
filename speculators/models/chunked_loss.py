"""A loss over a vocabulary, chunk by chunk, as one differentiable function of hidden states and of a head's weight.

Shape suffixes: N draft rows, R those of one chunk, H hidden, D vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from speculators.errors import UsageError
from speculators.models.hardware import with_padded_rows
from speculators.models.heads import CHUNK_MULTIPLE, Head, argmax
from speculators.models.loss_choice import LossChoice, LossKind


@dataclass
class RowLosses:
    """Of one chunk: losses [R], their gradients [R, D] where wanted, and what else is reported, [R]."""

    loss_R: Tensor
    gradient_RD: Tensor | None
    found: Mapping[str, Tensor]


class Rows(ABC):
    """Draft rows whose logits exist at one time, `index_R` int64 their places, and what they are compared with."""

    index_R: Tensor

    @abstractmethod
    def losses(self, head: Head, hidden_RH: Tensor, differentiable: bool) -> RowLosses:
        """Compare the head's logits; gradients are those by scale * (hidden @ weightᵀ), in the dtype of hidden.

        What is reported has `draft_argmax`, the index of the largest logit.
        """

    @abstractmethod
    def gradient(self, head: Head, hidden_RH: Tensor) -> Tensor:
        """Those gradients alone."""


class LogitRows(Rows):
    """Rows that torch's operations compare, as logits in at least float32."""

    def losses(self, head: Head, hidden_RH: Tensor, differentiable: bool) -> RowLosses:
        logits_RD = head.logits(hidden_RH)
        best_R = argmax(logits_RD)
        made = self.compare(logits_RD, best_R, differentiable)
        gradient = None if made.gradient_RD is None else head.product_gradient(made.gradient_RD, hidden_RH)
        return replace(made, gradient_RD=gradient, found={"draft_argmax": best_R, **made.found})

    def gradient(self, head: Head, hidden_RH: Tensor) -> Tensor:
        return head.product_gradient(self.logit_gradient(head.logits(hidden_RH)), hidden_RH)

    @abstractmethod
    def compare(self, logits_RD: Tensor, best_R: Tensor, differentiable: bool) -> RowLosses:
        """Losses of logits, which may be overwritten, and gradients by them; `best_R` is the index of the largest."""

    @abstractmethod
    def logit_gradient(self, logits_RD: Tensor) -> Tensor:
        """The losses' gradient by the logits alone; these may be overwritten."""


class Comparison(ABC):
    """What draft rows are compared with; `columns` names what it reports besides the losses, with (least) dtypes.

    `fused` is the name of the loss where there are Triton kernels for it, else None.
    """

    columns: Mapping[str, torch.dtype]
    fused: str | None

    @abstractmethod
    def __len__(self) -> int:
        """The number of draft rows."""

    @abstractmethod
    def chunks(self, dtype: torch.dtype, fused: bool) -> Iterator[Rows]:
        """Every draft row once, in any order; products run in `dtype`, and Triton compares where `fused`."""


def even_bounds(size: int, most: int) -> list[int]:
    """0, ..., size: the bounds of the fewest parts of at most `most` that differ by at most one."""
    if most < 1:
        raise UsageError(f"chunks of {most} rows asked for; expected chunk_rows of 1 or more")
    # Matrix products over a small rest are slow.
    parts = -(-size // most)
    return [part * size // parts for part in range(parts)] + [size]


def chunked_loss(
    hidden_NH: Tensor, head: Head, comparison: Comparison, choice: LossChoice
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses [N], differentiable by hidden states and head; and `draft_argmax` beside the comparison's columns."""
    if hidden_NH.shape != (len(comparison), head.width):
        expected = f"[{len(comparison)}, {head.width}]"
        raise UsageError(f"hidden states {list(hidden_NH.shape)}; expected {expected}, rows and head's width")
    kind = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_NH.dtype
    call = _Call(head.detached(), comparison, dtype)
    if comparison.fused is not None and len(comparison):
        what = LossKind(comparison.fused, hidden_NH.device, dtype, len(head.weight))
        call.fused = choice.is_fused(what, lambda fused: _first_chunk(replace(call, fused=fused), hidden_NH))
    for name, column in {"draft_argmax": torch.int64, **comparison.columns}.items():
        column = torch.promote_types(column, call.loss_dtype) if column.is_floating_point else column
        call.found[name] = hidden_NH.new_empty(len(hidden_NH), dtype=column)
    arguments = (hidden_NH, head.weight, head.low_rank, call, torch.is_grad_enabled())
    loss_N: Tensor = _ChunkedLoss.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's apply is untyped
    return loss_N, call.found


@dataclass
class _Call:
    """The arguments of one call that no gradient flows to; `found` is filled."""

    head: Head
    comparison: Comparison
    dtype: torch.dtype
    fused: bool = False
    found: dict[str, Tensor] = field(default_factory=dict)

    @property
    def loss_dtype(self) -> torch.dtype:
        """Of losses and of what is reported with them."""
        return torch.promote_types(self.dtype, torch.float32)

    def chunks(self, hidden_NH: Tensor) -> Iterator[tuple[Rows, Tensor]]:
        """Rows with their hidden states [R, H]."""
        for rows in self.comparison.chunks(self.dtype, self.fused):
            yield rows, hidden_NH.index_select(0, rows.index_R).to(self.dtype)


@torch.no_grad()
def _first_chunk(call: _Call, hidden_NH: Tensor) -> RowLosses:
    """What the first chunk alone comes to, with gradients: a sample of the work."""
    head = call.head.to(call.dtype)
    with torch.autocast(hidden_NH.device.type, enabled=False):
        rows, hidden_RH = next(call.chunks(hidden_NH))
        return rows.losses(head, hidden_RH, True)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_DH: Tensor, low_rank_DL: Tensor | None, call: _Call, differentiable: bool
    ) -> Tensor:
        of_hidden, *of_weights = (differentiable and needed for needed in ctx.needs_input_grad[:3])
        at_once = of_hidden and not any(of_weights)
        head = call.head.to(call.dtype)
        loss_N = hidden_NH.new_empty(len(hidden_NH), dtype=call.loss_dtype)
        gradient_NH = torch.empty_like(hidden_NH) if at_once else None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for rows, hidden_RH in call.chunks(hidden_NH):
                losses = rows.losses(head, hidden_RH, at_once)
                loss_N[rows.index_R] = losses.loss_R
                for name, value_R in losses.found.items():
                    call.found[name][rows.index_R] = value_R
                if gradient_NH is not None and losses.gradient_RD is not None:
                    gradient_NH[rows.index_R] = head.hidden_gradient(losses.gradient_RD).to(gradient_NH.dtype)
                # Its gradient would stand beside the logits of the next.
                del losses
        ctx.call = None if gradient_NH is not None else call
        ctx.save_for_backward(*((hidden_NH, weight_DH, low_rank_DL) if gradient_NH is None else (gradient_NH,)))
        return loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call is not None:
            hidden_NH, weight_DH, low_rank_DL = ctx.saved_tensors
            ctx.call.head = ctx.call.head.with_weights(weight_DH, low_rank_DL)
            return *_gradients(ctx.call, hidden_NH, upstream_N, ctx.needs_input_grad[:3]), None, None
        (gradient_NH,) = ctx.saved_tensors
        return gradient_NH * upstream_N[:, None].to(gradient_NH.dtype), None, None, None, None


def _gradients(
    call: _Call, hidden_NH: Tensor, upstream_N: Tensor, needed: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """By hidden states, weight and low-rank weight, where needed; every chunk's logits are made a second time."""
    head, size = call.head.to(call.dtype), call.head.weight.shape[1]
    gradient_NH = torch.empty_like(hidden_NH) if needed[0] else None
    parts = (call.head.weight, slice(0, size)), (call.head.low_rank, slice(size, None))
    sums = [
        _WeightGradient(weight, columns) if asked and weight is not None else None
        for (weight, columns), asked in zip(parts, needed[1:], strict=True)
    ]
    with torch.autocast(hidden_NH.device.type, enabled=False):
        for rows, hidden_RH in call.chunks(hidden_NH):
            product_RD = rows.gradient(head, hidden_RH)
            upstream_R1 = upstream_N[rows.index_R][:, None].to(call.dtype)
            if gradient_NH is not None:
                gradient_RH = head.hidden_gradient(product_RD) * upstream_R1
                gradient_NH[rows.index_R] = gradient_RH.to(gradient_NH.dtype)
            weighted_RH = hidden_RH * (upstream_R1 * head.scale)
            for part in sums:
                if part is not None:
                    part.add(product_RD, weighted_RH)
            del product_RD
    weight, low_rank = (None if part is None else part.total() for part in sums)
    return gradient_NH, weight, low_rank


class _WeightGradient:
    """The gradient by a weight that takes some columns of the hidden states, summed over chunks.

    In float32 at least: in half precision, a chunk's part would be lost beside the sum so far.
    """

    def __init__(self, weight_DH: Tensor, columns: slice) -> None:
        self.dtype, self.columns = weight_DH.dtype, columns
        self.sum_DH = torch.zeros_like(weight_DH, dtype=torch.promote_types(self.dtype, torch.float32))

    def add(self, product_RD: Tensor, hidden_RH: Tensor) -> None:
        """Add the part of some rows."""
        if product_RD.dtype == self.sum_DH.dtype:
            self.sum_DH.addmm_(product_RD.T, hidden_RH[:, self.columns])
        else:
            product_RD, part_RH = (
                with_padded_rows(rows, CHUNK_MULTIPLE) for rows in (product_RD, hidden_RH[:, self.columns])
            )
            self.sum_DH += product_RD.T @ part_RH

    def total(self) -> Tensor:
        """The gradient, in the weight's dtype."""
        return self.sum_DH.to(self.dtype)
