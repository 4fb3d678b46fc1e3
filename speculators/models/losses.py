"""Token losses between a draft's distribution q and its verifier's p, and the heads that make both.

A loss takes hidden states and heads, not logits: the logits of a few rows exist at a time, a tokens x vocabulary tensor
never does. Shape suffixes: N draft rows, M verifier rows, R and S those of one chunk, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.errors import UsageError
from speculators.formats.verifier_weights import VerifierWeights


@dataclass(frozen=True)
class Head:
    """Logits from a hidden state: scale * (hidden @ weightᵀ), then softcap * tanh(logits / softcap) where one is set.

    `weight` is [vocabulary, H].
    """

    weight: Tensor
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., vocabulary], in at least float32."""
        logits = F.linear(hidden, self.weight.to(hidden.dtype))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def hidden_gradient(self, gradient: Tensor, hidden: Tensor) -> Tensor:
        """The gradient by `hidden` [R, H], given that by the logits [R, vocabulary] (overwritten)."""
        if self.softcap is not None:
            gradient *= 1 - (self.logits(hidden) / self.softcap) ** 2
        out = gradient.to(hidden.dtype) @ self.weight.to(hidden.dtype)
        return out if self.scale == 1.0 else out * self.scale

    def to(self, dtype: torch.dtype) -> Head:
        """The same head with its weight in another dtype."""
        return replace(self, weight=self.weight.to(dtype))


@dataclass(frozen=True)
class VerifierHead:
    """The end of a verifier: final norm and head, which turn a stored state into the teacher's logits.

    `norm_weight` [H] is the gain itself, also for families that store it less one.
    """

    norm_weight: Tensor
    norm_eps: float
    head: Head

    @classmethod
    def from_weights(cls, weights: VerifierWeights) -> VerifierHead:
        """Take norm and head out of a verifier's weights."""
        gain = weights.final_norm.float()
        head = Head(weights.lm_head, weights.scale, weights.softcap)
        return cls(gain + 1 if weights.plus_one else gain, weights.norm_eps, head)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> VerifierHead:
        """Move to a device; `dtype` is applied to the head's weight, the gain stays float32."""
        head = replace(self.head, weight=self.head.weight.to(device, dtype))
        return replace(self, norm_weight=self.norm_weight.to(device), head=head)

    def restricted(self, verifier_ids_D: Tensor) -> VerifierHead:
        """The same end over a part of the vocabulary, in the order of `verifier_ids_D` (copies those rows)."""
        weight = self.head.weight.index_select(0, verifier_ids_D.to(self.head.weight.device))
        return replace(self, head=replace(self.head, weight=weight))

    def norm(self, last_hidden_states: Tensor) -> Tensor:
        """The final norm of states [..., H] stored before it; dtype kept."""
        normed = F.rms_norm(last_hidden_states.float(), self.norm_weight.shape, self.norm_weight, self.norm_eps)
        return normed.to(last_hidden_states.dtype)

    def logits(self, last_hidden_states: Tensor) -> Tensor:
        """Teacher logits, float32 [..., vocabulary], of states [..., H] stored before the final norm."""
        return self.head.logits(self.norm(last_hidden_states))


# A term takes log q and log p, both [R, D], and returns the loss [R] and its gradient by the draft's logits [R, D].
Term = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def kl_div(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """sum p (log p - log q); by the logits: q - p."""
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(-1), log_q.exp() - p


def cross_entropy(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """-log q of the verifier's likeliest token; by the logits: q - onehot."""
    label_R1 = log_p.argmax(-1, keepdim=True)
    gradient = log_q.exp()
    gradient.scatter_add_(-1, label_R1, gradient.new_full(label_R1.shape, -1.0))
    return -log_q.gather(-1, label_R1).squeeze(-1), gradient


def total_variation(log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """1/2 sum |p - q|; by the logits, with s = 1/2 sign(q - p): q (s - sum q s)."""
    q = log_q.exp()
    difference = q - log_p.exp()
    loss = difference.abs().sum(-1) / 2
    sign = difference.sign_().div_(2)
    return loss, q * (sign - (q * sign).sum(-1, keepdim=True))


TERMS: dict[str, Term] = {"kl_div": kl_div, "ce": cross_entropy, "tv": total_variation}


@dataclass(frozen=True)
class TokenLosses:
    """Per draft row [N]: `loss`, differentiable by the draft's hidden states, and both sides' likeliest draft id."""

    loss: Tensor
    draft_argmax: Tensor
    verifier_argmax: Tensor


class TokenLoss:
    """A weighted sum of `TERMS`, evaluated `chunk_rows` verifier rows at a time.

    Both heads are frozen, so the gradient by the hidden states is all that the backward pass needs: it is made together
    with the loss, while a chunk's logits exist. UsageError for an unknown term.
    """

    def __init__(self, weights: Mapping[str, float], chunk_rows: int = 128) -> None:
        unknown = sorted(set(weights) - set(TERMS))
        if unknown or not weights:
            raise UsageError(f"unknown loss {', '.join(unknown) or '(none)'}; expected weights for {', '.join(TERMS)}")
        self.weights = dict(weights)
        self.chunk_rows = chunk_rows

    def __call__(
        self, draft_hidden_NH: Tensor, draft_head: Head, verifier_hidden_MH: Tensor, verifier_head: Head, rows_N: Tensor
    ) -> TokenLosses:
        """Compare draft row n with verifier row `rows_N[n]` (int64); both heads are over the draft vocabulary.

        `verifier_hidden_MH` is after the final norm. Under autocast, products run in its dtype, all else in float32.
        """
        if draft_head.weight.requires_grad:
            raise UsageError("TokenLoss differentiates by hidden states alone; freeze the draft's head")
        work = _Work(self, draft_head, verifier_hidden_MH.detach(), verifier_head, rows_N)
        loss, draft_argmax, verifier_argmax = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            draft_hidden_NH, work, torch.is_grad_enabled()
        )
        return TokenLosses(loss, draft_argmax, verifier_argmax)

    def of_logits(self, draft_logits_RD: Tensor, verifier_logits_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Losses [R] and their gradients by the draft's logits [R, D], from float32 logits: the definition."""
        log_q, log_p = draft_logits_RD.log_softmax(-1), verifier_logits_RD.log_softmax(-1)
        loss, gradient = torch.zeros_like(log_q[:, 0]), torch.zeros_like(log_q)
        for name, weight in self.weights.items():
            term_loss, term_gradient = TERMS[name](log_q, log_p)
            loss.add_(term_loss, alpha=weight)
            gradient.add_(term_gradient, alpha=weight)
        return loss, gradient


@dataclass
class _Work:
    """The arguments of one call that no gradient flows to."""

    loss: TokenLoss
    draft_head: Head
    verifier_hidden_MH: Tensor
    verifier_head: Head
    rows_N: Tensor


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, draft_hidden_NH: Tensor, work: _Work, differentiable: bool) -> tuple[Tensor, Tensor, Tensor]:
        device = draft_hidden_NH.device
        order_N = work.rows_N.argsort(stable=True)
        chunks = _Chunks(draft_hidden_NH.index_select(0, order_N), work, order_N, differentiable)
        with torch.autocast(device.type, enabled=False):
            chunks.run()
        unsorted = torch.empty_like(order_N)
        unsorted[order_N] = torch.arange(len(order_N), device=device)
        if differentiable:
            ctx.save_for_backward(chunks.gradient_NH.index_select(0, unsorted))
        draft_argmax, verifier_argmax = chunks.draft_argmax[unsorted], chunks.verifier_argmax[work.rows_N]
        ctx.mark_non_differentiable(draft_argmax, verifier_argmax)
        return chunks.loss_N[unsorted], draft_argmax, verifier_argmax

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient_NH,) = ctx.saved_tensors
        return gradient_NH * gradients[0][:, None].to(gradient_NH.dtype), None, None


class _Chunks:
    """One pass over the vocabulary, chunk by chunk, draft rows sorted by the verifier row they are compared with."""

    def __init__(self, hidden_NH: Tensor, work: _Work, order_N: Tensor, differentiable: bool) -> None:
        device, kind = hidden_NH.device, hidden_NH.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_NH.dtype
        self.loss = work.loss
        self.hidden_NH, self.teacher_MH = hidden_NH.to(dtype), work.verifier_hidden_MH.to(dtype)
        self.draft_head, self.verifier_head = work.draft_head.to(dtype), work.verifier_head.to(dtype)
        self.rows_N = work.rows_N.index_select(0, order_N)
        self.loss_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.promote_types(dtype, torch.float32))
        self.gradient_NH = torch.empty_like(hidden_NH) if differentiable else hidden_NH.new_empty(0)
        self.draft_argmax = torch.empty(len(hidden_NH), dtype=torch.int64, device=device)
        self.verifier_argmax = torch.empty(len(self.teacher_MH), dtype=torch.int64, device=device)
        self.differentiable = differentiable

    def run(self) -> None:
        num_rows = len(self.teacher_MH)
        chunks = -(-num_rows // self.loss.chunk_rows)
        # Even chunks: matrix products over a small rest are slow.
        starts = [chunk * num_rows // chunks for chunk in range(chunks)] + [num_rows]
        bounds = torch.searchsorted(self.rows_N, torch.tensor(starts, device=self.rows_N.device)).tolist()
        for teachers, drafts in zip(pairwise(starts), pairwise(bounds), strict=True):
            self._chunk(slice(*teachers), slice(*drafts))

    def _chunk(self, teachers: slice, drafts: slice) -> None:
        teacher_SD = self.verifier_head.logits(self.teacher_MH[teachers])
        draft_RD = self.draft_head.logits(self.hidden_NH[drafts])
        self.verifier_argmax[teachers] = teacher_best = argmax(teacher_SD)
        self.draft_argmax[drafts] = draft_best = argmax(draft_RD)
        rows_R = self.rows_N[drafts] - teachers.start
        if self.loss.weights == {"kl_div": 1.0}:
            best = draft_best[:, None], teacher_best[:, None]
            self.loss_N[drafts], gradient = _kl_div_in_place(draft_RD, teacher_SD, rows_R, *best)
        else:
            self.loss_N[drafts], gradient = self.loss.of_logits(draft_RD, teacher_SD.index_select(0, rows_R))
        if self.differentiable:
            self.gradient_NH[drafts] = self.draft_head.hidden_gradient(gradient, self.hidden_NH[drafts])


def _kl_div_in_place(
    draft_RD: Tensor, teacher_SD: Tensor, rows_R: Tensor, draft_best_R1: Tensor, teacher_best_S1: Tensor
) -> tuple[Tensor, Tensor]:
    """`kl_div` of draft row r and teacher row rows_R[r], with one exponential an element; overwrites both logits.

    With b the likeliest token, log softmax(x) is x - x[b] + log softmax(x)[b]: no logarithm is taken a token.
    """
    p_SD = teacher_SD.softmax(-1)
    p_best_S1, teacher_max_S1 = p_SD.gather(1, teacher_best_S1), teacher_SD.gather(1, teacher_best_S1)
    negative_entropy_S1 = teacher_SD.mul_(p_SD).sum(-1, keepdim=True) - teacher_max_S1 + p_best_S1.log()
    p_RD = p_SD.index_select(0, rows_R)
    cross_R1 = torch.linalg.vecdot(p_RD, draft_RD)[:, None] - draft_RD.gather(1, draft_best_R1)
    q_RD = torch.softmax(draft_RD, -1, out=draft_RD)
    loss_R1 = negative_entropy_S1[rows_R] - cross_R1 - q_RD.gather(1, draft_best_R1).log()
    return loss_R1.squeeze(1), q_RD.sub_(p_RD)


def argmax(logits_RD: Tensor) -> Tensor:
    """Index of the largest value a row, int64 [R].

    On a CPU torch's argmax is slow where its amax is fast: the largest of each block is found first.
    """
    block = 64
    if logits_RD.shape[1] % block or logits_RD.device.type != "cpu":
        return logits_RD.argmax(-1)
    blocks = logits_RD.view(len(logits_RD), -1, block)
    best_R = blocks.amax(-1).argmax(-1)
    inside_R = blocks[torch.arange(len(best_R)), best_R].argmax(-1)
    return torch.add(inside_R, best_R, alpha=block)
