"""Heads: what turns hidden states into logits, a draft's and a verifier's.

Shape suffixes: R rows, H hidden, D vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.formats.verifier_weights import VerifierWeights
from speculators.models.hardware import with_padded_rows

# Chunks of rows differ in size; see `hardware.padded_training_rows`.
CHUNK_MULTIPLE = 32


@dataclass(frozen=True)
class Head:
    """Logits from a hidden state: scale * (hidden @ weightᵀ), then softcap * tanh(logits / softcap) where one is set.

    `weight` is [vocabulary, H]. With `low_rank` [vocabulary, r], hidden states are [..., H + r] and the product is that
    with both weights side by side; apart, one can be trained and the other frozen without a copy of either.
    """

    weight: Tensor
    scale: float = 1.0
    softcap: float | None = None
    low_rank: Tensor | None = None

    @property
    def width(self) -> int:
        """The size of a hidden state."""
        return self.weight.shape[1] + (0 if self.low_rank is None else self.low_rank.shape[1])

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., vocabulary], in at least float32."""
        shape = hidden.shape[:-1]
        rows = shape.numel()
        main, extra = self._parts(hidden.reshape(rows, hidden.shape[-1]))
        logits = F.linear(main, self.weight.to(hidden.dtype))[:rows]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.low_rank is not None:
            logits += F.linear(extra, self.low_rank.to(hidden.dtype))[:rows]
        logits = logits.reshape(*shape, logits.shape[-1])
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def product(self, hidden_RH: Tensor) -> Tensor:
        """hidden @ weightᵀ as it leaves the matrix product, [R, D] in hidden's dtype: neither scaled nor softcapped."""
        main, extra = self._parts(hidden_RH)
        product = F.linear(main, self.weight.to(hidden_RH.dtype))
        if self.low_rank is not None:
            product.addmm_(extra, self.low_rank.to(hidden_RH.dtype).T)
        return product[: len(hidden_RH)]

    def _parts(self, hidden_RH: Tensor) -> tuple[Tensor, Tensor]:
        """What `weight` and `low_rank` are multiplied with, rows padded."""
        size = self.weight.shape[1]
        padded = with_padded_rows(hidden_RH, CHUNK_MULTIPLE)
        return padded[:, :size], padded[:, size:]

    def product_gradient(self, gradient_RD: Tensor, hidden_RH: Tensor) -> Tensor:
        """The gradient by scale * (hidden @ weightᵀ), given that by the logits (overwritten); in hidden's dtype."""
        if self.softcap is not None:
            gradient_RD *= 1 - (self.logits(hidden_RH) / self.softcap) ** 2
        return gradient_RD.to(hidden_RH.dtype)

    def hidden_gradient(self, product_RD: Tensor) -> Tensor:
        """The gradient by the hidden states [R, H], given `product_gradient`."""
        rows, dtype = len(product_RD), product_RD.dtype
        padded = with_padded_rows(product_RD, CHUNK_MULTIPLE)
        out = (padded @ self.weight.to(dtype))[:rows]
        if self.low_rank is not None:
            out = torch.cat((out, (padded @ self.low_rank.to(dtype))[:rows]), dim=1)
        return out if self.scale == 1.0 else out * self.scale

    def to(self, dtype: torch.dtype) -> Head:
        """The same head with its weights in another dtype."""
        return self.with_weights(self.weight.to(dtype), None if self.low_rank is None else self.low_rank.to(dtype))

    def detached(self) -> Head:
        """The same head without a gradient to its weights."""
        return self.with_weights(self.weight.detach(), None if self.low_rank is None else self.low_rank.detach())

    def with_weights(self, weight: Tensor, low_rank: Tensor | None) -> Head:
        """The same head with other weights."""
        return replace(self, weight=weight, low_rank=low_rank)


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
        moved = self.with_weight(self.head.weight.to(device, dtype))
        return replace(moved, norm_weight=self.norm_weight.to(device))

    def with_weight(self, weight: Tensor) -> VerifierHead:
        """The same end with another weight of the head."""
        return replace(self, head=replace(self.head, weight=weight))

    def restricted(self, verifier_ids_D: Tensor) -> VerifierHead:
        """The same end over a part of the vocabulary, in the order of `verifier_ids_D` (copies those rows)."""
        return self.with_weight(self.head.weight.index_select(0, verifier_ids_D.to(self.head.weight.device)))

    def norm(self, last_hidden_states: Tensor) -> Tensor:
        """The final norm of states [..., H] stored before it; dtype kept."""
        normed = F.rms_norm(last_hidden_states.float(), self.norm_weight.shape, self.norm_weight, self.norm_eps)
        return normed.to(last_hidden_states.dtype)

    def logits(self, last_hidden_states: Tensor) -> Tensor:
        """Teacher logits, float32 [..., vocabulary], of states [..., H] stored before the final norm."""
        return self.head.logits(self.norm(last_hidden_states))


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
