"""Losses of rows of logits by Triton: one program a row, and no tensor of rows by vocabulary but the logits' own.

A program goes through its row twice. The first pass finds the softmax's sum as it goes, the second makes the loss and
puts its gradient where the logits were. What is read are products, hidden @ weightᵀ, in the dtype of the matrix
product; logits are scale * product, softcapped where a softcap is set, and everything is computed in float32. Shape
suffixes: R rows, S verifier rows, D vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl

from speculators.models.heads import Head

# Columns that a program handles at a time.
MOST_COLUMNS = 4096
WARPS = 16
# Stands for the logits beyond the vocabulary: finite, since the difference of two infinities is no number.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _logits(products, columns, size, scale, softcap, CAPPED: tl.constexpr):
    """The logits of some columns of a row."""
    inside = columns < size
    logits = tl.load(products + columns, mask=inside, other=0.0).to(tl.float32) * scale
    if CAPPED:
        # The hyperbolic tangent, of which Triton has only the sigmoid.
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return tl.where(inside, logits, LOWEST)


@triton.jit
def _softmax(products, size, scale, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of a row, its column, and the sum of exp(logit - largest)."""
    # Each lane has a softmax of its own columns; they are joined once, at the end.
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = _logits(products, columns, size, scale, softcap, CAPPED)
        place = tl.where(logits > largest, columns, place)
        higher = tl.maximum(largest, logits)
        total = total * tl.exp(largest - higher) + tl.exp(logits - higher)
        largest = higher
    top = tl.max(largest, 0)
    first = tl.min(tl.where(largest == top, place, size), 0)
    # Where a logit is no number, none equals the largest; the index stays one of the vocabulary.
    return top, tl.minimum(first, size - 1), tl.sum(total * tl.exp(largest - top), 0)


@triton.jit
def _put(products, columns, size, gradient, logits, softcap, CAPPED: tl.constexpr):
    """Overwrite products with a gradient by the logits, made one by scale * product."""
    if CAPPED:
        # Logits are above -softcap, but for those that stand beyond the vocabulary.
        ratio = tl.maximum(logits / softcap, -1.0)
        gradient = gradient * (1.0 - ratio * ratio)
    tl.store(products + columns, gradient.to(products.dtype.element_ty), mask=columns < size)


@triton.jit
def _softmax_kernel(
    products, stride, size, scale, softcap, CAPPED: tl.constexpr, largest, totals, best, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    top, place, total = _softmax(products + row * stride, size, scale, softcap, CAPPED, BLOCK)
    tl.store(largest + row, top)
    tl.store(totals + row, total)
    tl.store(best + row, place.to(tl.int64))


@triton.jit
def _label_kernel(
    products,
    stride,
    size,
    scale,
    softcap,
    CAPPED: tl.constexpr,
    labels,
    losses,
    best,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    label = tl.load(labels + row)
    chosen = _logits(products, label, size, scale, softcap, CAPPED)
    top, place, total = _softmax(products, size, scale, softcap, CAPPED, BLOCK)
    tl.store(losses + row, top - chosen + tl.log(total))
    tl.store(best + row, place.to(tl.int64))
    if GRADIENT:
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            logits = _logits(products, columns, size, scale, softcap, CAPPED)
            gradient = tl.exp(logits - top) / total - tl.where(columns == label, 1.0, 0.0)
            _put(products, columns, size, gradient, logits, softcap, CAPPED)


@triton.jit
def _divergence_kernel(
    products,
    stride,
    size,
    scale,
    softcap,
    CAPPED: tl.constexpr,
    verifier,
    verifier_stride,
    verifier_scale,
    verifier_softcap,
    VERIFIER_CAPPED: tl.constexpr,
    verifier_largest,
    verifier_totals,
    verifier_best,
    rows,
    losses,
    variations,
    cross_entropies,
    best,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    other = tl.load(rows + row)
    products += row * stride
    verifier += other * verifier_stride
    verifier_top, verifier_total = tl.load(verifier_largest + other), tl.load(verifier_totals + other)
    chosen = _logits(products, tl.load(verifier_best + other), size, scale, softcap, CAPPED)
    top, place, total = _softmax(products, size, scale, softcap, CAPPED, BLOCK)
    log_total, verifier_log_total = tl.log(total), tl.log(verifier_total)
    divergence = tl.zeros([BLOCK], tl.float32)
    distance = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = _logits(products, columns, size, scale, softcap, CAPPED)
        behind = logits - top
        verifier_behind = (
            _logits(verifier, columns, size, verifier_scale, verifier_softcap, VERIFIER_CAPPED) - verifier_top
        )
        p = tl.exp(verifier_behind) / verifier_total
        difference = tl.exp(behind) / total - p
        divergence += p * ((verifier_behind - verifier_log_total) - (behind - log_total))
        distance += tl.abs(difference)
        if GRADIENT:
            _put(products, columns, size, difference, logits, softcap, CAPPED)
    tl.store(losses + row, tl.sum(divergence, 0))
    tl.store(variations + row, tl.sum(distance, 0) / 2.0)
    tl.store(cross_entropies + row, top - chosen + log_total)
    tl.store(best + row, place.to(tl.int64))


@dataclass
class RowSoftmax:
    """Of rows of logits: the largest of each, the sum of exp(logit - largest), float32 [R], and its index, int64."""

    largest_R: Tensor
    total_R: Tensor
    best_R: Tensor


@dataclass
class RowDivergences:
    """`kl_div`, total variation and -log q of the verifier's likeliest token, float32 [R]; the draft's own, int64."""

    loss_R: Tensor
    total_variation_R: Tensor
    cross_entropy_R: Tensor
    best_R: Tensor


def softmax_of(product_RD: Tensor, head: Head) -> RowSoftmax:
    """What the softmax over a head's logits is made of, given its products; these stay."""
    found = RowSoftmax(_floats(product_RD), _floats(product_RD), _indices(product_RD))
    with torch.cuda.device_of(product_RD):
        _softmax_kernel[(len(product_RD),)](
            *_row_arguments(product_RD, head), found.largest_R, found.total_R, found.best_R, **_launch(product_RD)
        )
    return found


def label_losses(product_RD: Tensor, head: Head, label_R: Tensor, differentiable: bool) -> tuple[Tensor, Tensor]:
    """-log q of a label a row (int64), and the index of the largest logit, int64 [R].

    Where `differentiable`, the gradient by scale * product takes the products' place.
    """
    loss_R, best_R = _floats(product_RD), _indices(product_RD)
    with torch.cuda.device_of(product_RD):
        _label_kernel[(len(product_RD),)](
            *_row_arguments(product_RD, head),
            # Kernels know no stride of what has one value a row.
            *(label_R.contiguous(), loss_R, best_R, differentiable),
            **_launch(product_RD),
        )
    return loss_R, best_R


def divergence_losses(
    product_RD: Tensor,
    head: Head,
    verifier_SD: Tensor,
    verifier_head: Head,
    softmax: RowSoftmax,
    rows_R: Tensor,
    differentiable: bool,
) -> RowDivergences:
    """Compare draft row r with row `rows_R[r]` (int64) of the verifier's products, whose softmax is known.

    Where `differentiable`, the gradient by scale * product takes the draft's products' place.
    """
    loss_R, variation_R, cross_entropy_R = (_floats(product_RD) for _ in range(3))
    found = RowDivergences(loss_R, variation_R, cross_entropy_R, _indices(product_RD))
    verifier, verifier_stride, _, *verifier_logits = _row_arguments(verifier_SD, verifier_head)
    with torch.cuda.device_of(product_RD):
        _divergence_kernel[(len(product_RD),)](
            *_row_arguments(product_RD, head),
            *(verifier, verifier_stride, *verifier_logits),
            *(softmax.largest_R, softmax.total_R, softmax.best_R, rows_R),
            *(found.loss_R, found.total_variation_R, found.cross_entropy_R, found.best_R),
            differentiable,
            **_launch(product_RD),
        )
    return found


def _floats(product_RD: Tensor) -> Tensor:
    return product_RD.new_empty(len(product_RD), dtype=torch.float32)


def _indices(product_RD: Tensor) -> Tensor:
    return product_RD.new_empty(len(product_RD), dtype=torch.int64)


def _row_arguments(product_RD: Tensor, head: Head) -> tuple[Tensor, int, int, float, float, bool]:
    """What every kernel takes of rows and of the head that made them: the columns of a row lie side by side."""
    assert product_RD.stride(1) == 1 or product_RD.shape[1] == 1
    size = product_RD.shape[1]
    return product_RD, product_RD.stride(0), size, head.scale, head.softcap or 1.0, head.softcap is not None


def _launch(product_RD: Tensor) -> dict[str, int]:
    return {
        "BLOCK": min(MOST_COLUMNS, triton.next_power_of_2(product_RD.shape[1])),
        "num_warps": WARPS,
        "enable_fp_fusion": True,
    }
