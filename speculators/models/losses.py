"""Token losses on hidden states and heads: of a draft against its verifier, and of a draft against the data's tokens.

A loss takes hidden states and heads, not logits: the logits of a few rows exist at a time, a tokens x vocabulary tensor
never does. Shape suffixes: N draft rows, M verifier rows, R and S those of one chunk, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite

import torch
from torch import Tensor

from speculators.errors import UsageError
from speculators.models.chunked_loss import Comparison, LogitRows, RowLosses, Rows, chunked_loss, even_bounds
from speculators.models.fused_rows import FusedLabelRows, FusedVerifier
from speculators.models.heads import Head, VerifierHead, argmax
from speculators.models.loss_choice import LossChoice
from speculators.models.loss_terms import TERMS, Distributions

__all__ = ["TERMS", "Head", "TokenLoss", "TokenLosses", "VerifierHead", "argmax", "data_cross_entropy"]

# Draft rows that are compared with the same verifier rows share their logits, but at most so many chunks of them.
_DRAFT_CHUNKS_PER_VERIFIER_CHUNK = 4


@dataclass(frozen=True)
class TokenLosses:
    """Per draft row [N]: `loss`, which is differentiable, and both sides' likeliest draft id, int64.

    Without gradient, where the `TokenLoss` was asked for them: `total_variation`, 1/2 sum |p - q| (a token drawn from q
    is accepted with probability 1 - total_variation), and `cross_entropy`, -log q of the verifier's likeliest token.
    """

    loss: Tensor
    draft_argmax: Tensor
    verifier_argmax: Tensor
    total_variation: Tensor | None = None
    cross_entropy: Tensor | None = None


class TokenLoss:
    """A weighted sum of `TERMS`, evaluated `chunk_rows` verifier rows at a time.

    Where the draft's head is frozen, the gradient by the hidden states is all that the backward pass needs: it is made
    together with the loss, while a chunk's logits exist. Where the head's weight requires a gradient, the backward pass
    makes each chunk's logits again. `choice`, one for all losses of a run, says what makes them (None: torch): Triton
    has kernels for `kl_div` alone, and for `ce` alone where no total variation is asked for; torch's operations make
    all others. UsageError for an unknown term, a weight that is not positive, or kernels asked for that do not exist.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        chunk_rows: int = 128,
        *,
        with_total_variation: bool = False,
        with_cross_entropy: bool = False,
        choice: LossChoice | None = None,
    ) -> None:
        unknown = sorted(set(weights) - set(TERMS))
        if unknown or not weights:
            raise UsageError(f"unknown loss {', '.join(unknown) or '(none)'}; expected weights for {', '.join(TERMS)}")
        for name, weight in weights.items():
            if not (isfinite(weight) and weight > 0):
                raise UsageError(f"loss {name} has weight {weight}; expected a positive number, or no {name} at all")
        self.weights = dict(weights)
        self.chunk_rows = chunk_rows
        self.with_total_variation = with_total_variation
        self.with_cross_entropy = with_cross_entropy
        self.choice = LossChoice("torch") if choice is None else choice
        # What a loss is called that has code of its own, both here and in Triton.
        alone = next(iter(weights)) if list(weights.values()) == [1.0] else None
        self.fused = alone if alone == "kl_div" or (alone == "ce" and not with_total_variation) else None
        if self.fused is None:
            self.choice.require_unfused(" + ".join(f"{weight} {name}" for name, weight in weights.items()))

    def __call__(
        self, draft_hidden_NH: Tensor, draft_head: Head, verifier_hidden_MH: Tensor, verifier_head: Head, rows_N: Tensor
    ) -> TokenLosses:
        """Compare draft row n with verifier row `rows_N[n]`, int64 in any order.

        Both heads are over the draft vocabulary. `verifier_hidden_MH` is after the final norm; no gradient
        flows to the verifier's side. Under autocast, products run in its dtype, all else in float32. UsageError where
        the heads' vocabularies or the rows do not fit.
        """
        sizes = draft_head.weight.shape[0], verifier_head.weight.shape[0]
        if sizes[0] != sizes[1]:
            raise UsageError(f"draft head over {sizes[0]} tokens, verifier head over {sizes[1]}: restrict the latter")
        teacher = _Teacher(self, verifier_hidden_MH.detach(), verifier_head, rows_N)
        loss_N, found = chunked_loss(draft_hidden_NH, draft_head, teacher, self.choice)
        return TokenLosses(loss_N, **found)

    def sum_of_terms(self, pair: Distributions) -> Tensor:
        """The losses [R]."""
        terms = [TERMS[name].loss(pair) * weight for name, weight in self.weights.items()]
        return torch.stack(terms).sum(0)

    def sum_of_gradients(self, pair: Distributions) -> Tensor:
        """The losses' gradients by the draft's logits [R, D]."""
        (first, weight), *others = self.weights.items()
        gradient = TERMS[first].gradient(pair).mul_(weight)
        for name, other in others:
            gradient.add_(TERMS[name].gradient(pair), alpha=other)
        return gradient


def data_cross_entropy(
    hidden_NH: Tensor, head: Head, labels_N: Tensor, chunk_rows: int = 128, choice: LossChoice | None = None
) -> tuple[Tensor, Tensor]:
    """-log q of the data's tokens, and the head's likeliest token: float [N], differentiable, and int64 [N].

    `labels_N` int64 are ids of the head's vocabulary; leave out rows without one. `chunk_rows` rows have logits at a
    time, and `choice` says what makes the losses of them, torch (None) or Triton. Gradients flow to the hidden states
    and to the head's weight. UsageError for a label outside the vocabulary.
    """
    labels = _Labels(labels_N, head.weight.shape[0], chunk_rows)
    loss_N, found = chunked_loss(hidden_NH, head, labels, LossChoice("torch") if choice is None else choice)
    return loss_N, found["draft_argmax"]


class _Labels(Comparison):
    """Rows compared with one token each."""

    columns: Mapping[str, torch.dtype] = {}
    fused = "cross entropy of data"

    def __init__(self, labels_N: Tensor, vocabulary: int, chunk_rows: int) -> None:
        if labels_N.numel() and not 0 <= int(labels_N.min()) <= int(labels_N.max()) < vocabulary:
            got = f"{int(labels_N.min())}..{int(labels_N.max())}"
            raise UsageError(f"labels {got} for a head over {vocabulary} tokens; leave out rows without a label")
        self.labels_N, self.chunk_rows = labels_N, chunk_rows

    def __len__(self) -> int:
        return len(self.labels_N)

    def chunks(self, dtype: torch.dtype, fused: bool) -> Iterator[Rows]:
        kind = FusedLabelRows if fused else _LabelRows
        for start, end in pairwise(even_bounds(len(self), self.chunk_rows)):
            index_R = torch.arange(start, end, device=self.labels_N.device)
            yield kind(index_R, self.labels_N[start:end])


class _Teacher(Comparison):
    """Draft rows compared with the verifier's distributions, sorted by the verifier row they are compared with."""

    def __init__(self, loss: TokenLoss, hidden_MH: Tensor, head: Head, rows_N: Tensor) -> None:
        self.loss, self.head, self.fused = loss, head, loss.fused
        self.order_N = rows_N.argsort(stable=True)
        used_U, self.rows_N = rows_N.index_select(0, self.order_N).unique_consecutive(return_inverse=True)
        if len(used_U) and not 0 <= int(used_U[0]) <= int(used_U[-1]) < len(hidden_MH):
            raise UsageError(f"verifier rows {int(used_U[0])}..{int(used_U[-1])} asked for; there are {len(hidden_MH)}")
        self.hidden_UH = hidden_MH if len(used_U) == len(hidden_MH) else hidden_MH.index_select(0, used_U)
        self.columns: dict[str, torch.dtype] = {"verifier_argmax": torch.int64}
        if loss.with_total_variation:
            self.columns["total_variation"] = torch.float32
        if loss.with_cross_entropy:
            self.columns["cross_entropy"] = torch.float32

    def __len__(self) -> int:
        return len(self.rows_N)

    def chunks(self, dtype: torch.dtype, fused: bool) -> Iterator[Rows]:
        head = self.head.to(dtype)
        starts = even_bounds(len(self.hidden_UH), self.loss.chunk_rows)
        bounds = torch.searchsorted(self.rows_N, torch.tensor(starts, device=self.rows_N.device)).tolist()
        for (start, end), (first, last) in zip(pairwise(starts), pairwise(bounds), strict=True):
            verifier = self._verifier(head, self.hidden_UH[start:end].to(dtype), fused)
            parts = even_bounds(last - first, _DRAFT_CHUNKS_PER_VERIFIER_CHUNK * self.loss.chunk_rows)
            for low, high in pairwise(parts):
                part = slice(first + low, first + high)
                yield verifier.rows(self.order_N[part], self.rows_N[part] - start)

    def _verifier(self, head: Head, hidden_SH: Tensor, fused: bool) -> _Verifier | FusedVerifier:
        if not fused:
            logits_SD = head.logits(hidden_SH)
            return _Verifier(logits_SD, argmax(logits_SD), self.loss)
        return FusedVerifier(
            head,
            hidden_SH,
            by_label=self.fused == "ce",
            with_total_variation=self.loss.with_total_variation,
            with_cross_entropy=self.loss.with_cross_entropy,
        )


class _Verifier:
    """A chunk of the verifier's distributions, made once for all the draft rows that are compared with it."""

    def __init__(self, logits_SD: Tensor, best_S: Tensor, loss: TokenLoss) -> None:
        self.loss, self.best_S = loss, best_S
        self.by_label, self.by_divergence = loss.weights == {"ce": 1.0}, loss.weights == {"kl_div": 1.0}
        self.reported_p_SD: Tensor | None = None
        if self.by_divergence:
            # With b the likeliest token, log softmax(x) is x - x[b] + log softmax(x)[b]: no logarithm is taken a token.
            best_S1 = best_S[:, None]
            self.p_SD = logits_SD.softmax(-1)
            self.p_best_S1, max_S1 = self.p_SD.gather(1, best_S1), logits_SD.gather(1, best_S1)
            # The negative entropy, but for the logarithm of p_best.
            self.below_best_S1 = logits_SD.mul_(self.p_SD).sum(-1, keepdim=True) - max_S1
        elif not self.by_label:
            self.log_p_SD = logits_SD.log_softmax(-1)
        elif loss.with_total_variation:
            self.reported_p_SD = torch.softmax(logits_SD, -1, out=logits_SD)

    def rows(self, index_R: Tensor, rows_R: Tensor) -> Rows:
        """The draft rows `index_R`, of which r is compared with row `rows_R[r]` of this chunk."""
        label_R = self.best_S.index_select(0, rows_R)
        if self.by_divergence:
            return _DivergenceRows(index_R, rows_R, label_R, self)
        found = {"verifier_argmax": label_R}
        if self.by_label:
            return _LabelRows(index_R, label_R, found, self.loss.with_cross_entropy, self.reported_p_SD, rows_R)
        return _TermRows(index_R, self.log_p_SD.index_select(0, rows_R), label_R, self.loss)


@dataclass
class _LabelRows(LogitRows):
    """-log q of a label a row, with one exponential an element; overwrites the logits.

    With `p_SD`, of whose rows `rows_R` are the draft rows' own, the total variation from those is reported, too.
    """

    index_R: Tensor
    label_R: Tensor
    found: Mapping[str, Tensor] = field(default_factory=dict)
    with_cross_entropy: bool = False
    p_SD: Tensor | None = None
    rows_R: Tensor | None = None

    def compare(self, logits_RD: Tensor, best_R: Tensor, differentiable: bool) -> RowLosses:
        label_R1, best_R1 = self.label_R[:, None], best_R[:, None]
        behind_R1 = logits_RD.gather(1, best_R1) - logits_RD.gather(1, label_R1)
        q_RD = torch.softmax(logits_RD, -1, out=logits_RD)
        loss_R = (behind_R1 - q_RD.gather(1, best_R1).log()).squeeze(1)
        found = {**self.found, **({"cross_entropy": loss_R} if self.with_cross_entropy else {})}
        if self.p_SD is not None and self.rows_R is not None:
            difference_RD = self.p_SD.index_select(0, self.rows_R).sub_(q_RD)
            found["total_variation"] = torch.linalg.vector_norm(difference_RD, ord=1, dim=-1) / 2
        return RowLosses(loss_R, self._less_label(q_RD) if differentiable else None, found)

    def logit_gradient(self, logits_RD: Tensor) -> Tensor:
        return self._less_label(torch.softmax(logits_RD, -1, out=logits_RD))

    def _less_label(self, q_RD: Tensor) -> Tensor:
        label_R1 = self.label_R[:, None]
        return q_RD.scatter_add_(1, label_R1, q_RD.new_full(label_R1.shape, -1.0))


@dataclass
class _DivergenceRows(LogitRows):
    """`kl_div` of draft row r and the verifier's row rows_R[r], with one exponential an element; overwrites logits."""

    index_R: Tensor
    rows_R: Tensor
    label_R: Tensor
    verifier: _Verifier

    def compare(self, logits_RD: Tensor, best_R: Tensor, differentiable: bool) -> RowLosses:
        loss, best_R1 = self.verifier.loss, best_R[:, None]
        p_RD = self.verifier.p_SD.index_select(0, self.rows_R)
        max_R1 = logits_RD.gather(1, best_R1)
        cross_R1 = torch.linalg.vecdot(p_RD, logits_RD)[:, None] - max_R1
        label_R1 = logits_RD.gather(1, self.label_R[:, None]) - max_R1 if loss.with_cross_entropy else None
        q_RD = torch.softmax(logits_RD, -1, out=logits_RD)
        q_best_R1 = q_RD.gather(1, best_R1)
        # The logarithm of a ratio near 1 is more exact than the difference of two logarithms.
        ratio_R1 = self.verifier.p_best_S1[self.rows_R] / q_best_R1
        loss_R1 = self.verifier.below_best_S1[self.rows_R] - cross_R1 + ratio_R1.log()
        found = {"verifier_argmax": self.label_R}
        if label_R1 is not None:
            found["cross_entropy"] = -(label_R1 + q_best_R1.log()).squeeze(1)
        difference_RD = q_RD.sub_(p_RD)
        if loss.with_total_variation:
            found["total_variation"] = torch.linalg.vector_norm(difference_RD, ord=1, dim=-1) / 2
        return RowLosses(loss_R1.squeeze(1), difference_RD if differentiable else None, found)

    def logit_gradient(self, logits_RD: Tensor) -> Tensor:
        q_RD = torch.softmax(logits_RD, -1, out=logits_RD)
        return q_RD.sub_(self.verifier.p_SD.index_select(0, self.rows_R))


@dataclass
class _TermRows(LogitRows):
    """Any weighted sum of terms."""

    index_R: Tensor
    log_p_RD: Tensor
    label_R: Tensor
    loss: TokenLoss

    def compare(self, logits_RD: Tensor, best_R: Tensor, differentiable: bool) -> RowLosses:
        pair = Distributions(logits_RD.log_softmax(-1), self.log_p_RD, self.label_R)
        found = {"verifier_argmax": self.label_R}
        if self.loss.with_total_variation:
            found["total_variation"] = pair.total_variation
        if self.loss.with_cross_entropy:
            found["cross_entropy"] = pair.cross_entropy
        loss_R = self.loss.sum_of_terms(pair)
        return RowLosses(loss_R, self.loss.sum_of_gradients(pair) if differentiable else None, found)

    def logit_gradient(self, logits_RD: Tensor) -> Tensor:
        return self.loss.sum_of_gradients(Distributions(logits_RD.log_softmax(-1), self.log_p_RD, self.label_R))
