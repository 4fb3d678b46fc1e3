"""Attention of transformers' own layers over a slot cache, or over documents packed into one row.

A layer whose config says `_attn_implementation = ATTENTION_NAME` calls `attention` below. Where its keys lie is said by
`slot_write` (or by `writing` around a whole model), where its documents lie by `documents` (or, for whole sequences
that share their beginning, by `branching` around a whole model); with none of these, the mask that transformers made
decides. Dropout is never applied. Shape suffixes as in `cache`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from speculators.models.attention import BLOCK_ROWS
from speculators.models.branches import (
    BlockForm,
    Branches,
    attend_branches,
    attend_fused,
    attend_in_products,
    form_of_products,
)
from speculators.models.cache import SlotCache, SlotWrite, attend, slot_attention
from speculators.models.masks import PackedMask
from speculators.models.running_state import StatePlan

ATTENTION_NAME = "speculators_slots"
_WRITE: contextvars.ContextVar[SlotWrite | None] = contextvars.ContextVar("slot_write", default=None)
_BRANCHES: contextvars.ContextVar[Branches | None] = contextvars.ContextVar("branches", default=None)


@contextmanager
def _during(variable: contextvars.ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def branching(branches: Branches) -> AbstractContextManager[None]:
    """Let every attention layer that runs inside, without a cache, keep to the sequences of one row."""
    return _during(_BRANCHES, branches)


def current_branches() -> Branches | None:
    """The sequences that `branching` was last entered with, here."""
    return _BRANCHES.get()


def writing(write: SlotWrite) -> AbstractContextManager[None]:
    """Let every attention layer that runs inside look at the keys of one slot write."""
    return _during(_WRITE, write)


class SlotKeyValues:
    """What transformers' layers see as their cache during one forward pass."""

    is_compileable = False

    def __init__(self, cache: SlotCache, write: SlotWrite) -> None:
        self._cache, self._write = cache, write
        self.running = cache.running

    @cached_property
    def state_plan(self) -> StatePlan:
        """How this pass moves the states of layers that have one."""
        write = self._write
        return self.running.plan(write.rows, write.starts, write.width, write.lengths, write.settled)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store what a layer computed and return all that its rows may attend to."""
        return self._cache.write(layer_idx, self._write, keys, values)

    def get_seq_length(self, *_: Any) -> int:
        """Positions held before this pass."""
        return self._write.end - self._write.width


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend under transformers' interface: query [B, Q, T, D], key and value [B, N, E, D] -> [B, T, Q, D]."""
    scale = options.get("scaling")
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    window, softcap, sinks = options.get("sliding_window"), options.get("softcap"), options.get("s_aux")
    plain = softcap is None and sinks is None
    branches = _BRANCHES.get()
    if branches is not None:
        attend_block = partial(_attention_of_a_block, scale=scale, softcap=softcap, sinks=sinks)
        form = BlockForm()
        if plain and query.device.type == "cpu":
            attend_block = partial(attend_in_products, scale=scale)
            form = form_of_products(query.shape[1] // key.shape[1])
        elif plain:
            attend_block = partial(attend_fused, scale=scale)
        return attend_branches(query[0], key[0], value[0], branches, window, attend_block, form)[None], None
    documents: Sequence[int] | None = options.get("documents")
    write: SlotWrite | None = options.get("slot_write") or _WRITE.get()
    if documents is not None:
        out = _attend_documents(query, key, value, documents, window, scale=scale, softcap=softcap, sinks=sinks)
        return out.transpose(1, 2), None
    if write is not None:
        q_BQTD = write.unpack(query.transpose(1, 2)).transpose(1, 2)
        if plain:
            out = attend(write, q_BQTD, key, value, scale, window)
        else:
            out = _attention_spelled_out(q_BQTD, key, value, write.mask(window), scale, softcap, sinks)
        return write.pack(out.transpose(1, 2)).contiguous(), None
    if attention_mask is not None:
        mask = attention_mask
    else:
        width, end = query.shape[2], key.shape[2]
        mask = torch.ones(width, end, dtype=torch.bool, device=query.device).tril(end - width)[None, None]
    if plain:
        out = slot_attention(query, key, value, mask, scale)
    else:
        out = _attention_spelled_out(query, key, value, mask, scale, softcap, sinks)
    return out.transpose(1, 2).contiguous(), None


def _attend_documents(
    q_BQTD: Tensor,
    k_BNTD: Tensor,
    v_BNTD: Tensor,
    documents: Sequence[int],
    window: int | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention inside each document, [B, Q, T, D].

    Where torch's own causal form does not do, a few queries at a time: a mask over a whole row, or a whole document,
    would hold the square of its length.
    """
    mask, parts = PackedMask(window), []
    groups = q_BQTD.shape[1] // k_BNTD.shape[1]
    plain = softcap is None and sinks is None
    for q, k, v in zip(*(tensor.split(list(documents), 2) for tensor in (q_BQTD, k_BNTD, v_BNTD)), strict=True):
        keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if plain and window is None:
            parts.append(F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale))
            continue
        index = torch.arange(q.shape[2], device=q.device)
        for start in range(0, len(index), BLOCK_ROWS):
            end = min(start + BLOCK_ROWS, len(index))
            first = 0 if window is None else max(start - window + 1, 0)
            seen = mask.in_document(index[start:end, None], index[first:end])
            part = q[:, :, start:end], keys[:, :, first:end], values[:, :, first:end]
            if plain:
                parts.append(F.scaled_dot_product_attention(*part, attn_mask=seen, scale=scale))
            else:
                parts.append(_attention_spelled_out(*part, seen, scale, softcap, sinks))
    return torch.cat(parts, 2)


def _attention_of_a_block(
    q_QTD: Tensor, k_NED: Tensor, v_NED: Tensor, mask_TE: Tensor, *, scale: float, softcap: Any, sinks: Any
) -> Tensor:
    return _attention_spelled_out(q_QTD[None], k_NED[None], v_NED[None], mask_TE == 0, scale, softcap, sinks)[0]


def _attention_spelled_out(
    q_BQTD: Tensor, k_BNED: Tensor, v_BNED: Tensor, mask: Tensor | None, scale: float, softcap: Any, sinks: Any
) -> Tensor:
    groups = q_BQTD.shape[1] // k_BNED.shape[1]
    keys, values = k_BNED.repeat_interleave(groups, 1), v_BNED.repeat_interleave(groups, 1)
    scores = q_BQTD @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
    sink = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1).to(scores.dtype)
    weights = torch.cat([scores, sink], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return weights.to(values.dtype) @ values


AttentionInterface.register(ATTENTION_NAME, attention)
