"""Which position may look at which in packed rows: one predicate, evaluated by blocks, by kernels, or densely."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedMask:
    """A query sees the keys at or before it in its own document, at most `window` of them (itself included) where set.

    Padding has a negative document id and sees nothing.
    """

    window: int | None = None

    def visible(self, query: Tensor, key: Tensor, query_document: Tensor, key_document: Tensor) -> Tensor:
        """Bool, broadcast over int64 positions and document ids: the definition that every other form repeats."""
        return self.in_document(query, key) & (query_document == key_document) & (query_document >= 0)

    def in_document(self, query: Tensor, key: Tensor) -> Tensor:
        """The predicate where both sides are known to lie in one document."""
        seen = key <= query
        return seen if self.window is None else seen & (key > query - self.window)

    def interval(self, query: Tensor, document_start: Tensor) -> tuple[Tensor, Tensor]:
        """First key that a query sees, and the end of those it sees, int64; the first is the end where it sees none."""
        end = query + 1
        if self.window is None:
            return document_start.expand_as(end), end
        return torch.minimum(torch.maximum(document_start, end - self.window), end), end

    def dense(self, document_ids_BT: Tensor) -> Tensor:
        """Bool [B, T, T], query by key, over whole rows: the twin for tests and small inputs."""
        index = torch.arange(document_ids_BT.shape[-1], device=document_ids_BT.device)
        query_document, key_document = document_ids_BT[..., :, None], document_ids_BT[..., None, :]
        return self.visible(index[:, None], index[None, :], query_document, key_document)
