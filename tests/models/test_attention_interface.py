"""Attention under transformers' interface, against the softmax written out over a dense mask."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speculators.models.attention_interface import SlotKeyValues, attention, writing
from speculators.models.cache import SlotCache, SlotWrite

MODULE = nn.Identity()
EXTRAS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 3},
    {"softcap": 2.0},
    {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"sliding_window": 2, "softcap": 1.5},
]


def tensors(batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 4 heads, keys and values of 2; values are wider than keys."""
    generator = torch.Generator().manual_seed(length)
    sizes = ((4, 6), (2, 6), (2, 7))
    return tuple(torch.randn(batch, heads, length, size, generator=generator) for heads, size in sizes)


def written_out(q_QTD: Tensor, k_NED: Tensor, v_NED: Tensor, mask_TE: Tensor, extra: dict[str, Any]) -> Tensor:
    """[T, Q, D] of one row, head by head."""
    out = []
    for head in range(4):
        scores = q_QTD[head] @ k_NED[head // 2].T * 0.7
        if "softcap" in extra:
            scores = extra["softcap"] * torch.tanh(scores / extra["softcap"])
        weights = scores.exp() * mask_TE
        sink = extra["s_aux"][head].exp() if "s_aux" in extra else 0.0
        out.append(weights / (weights.sum(-1, keepdim=True) + sink) @ v_NED[head // 2])
    return torch.stack(out, 1)


def causal(queries: Tensor, keys: Tensor, extra: dict[str, Any]) -> Tensor:
    seen = keys[None] <= queries[:, None]
    return seen & (keys[None] > queries[:, None] - extra.get("sliding_window", 1000))


@pytest.mark.parametrize("extra", EXTRAS)
def test_documents_packed_into_a_row_attend_each_to_itself(extra: dict[str, Any]) -> None:
    query, key, value = tensors(1, 11)
    out, _ = attention(MODULE, query, key, value, None, scaling=0.7, documents=[5, 1, 5], dropout=0.9, **extra)
    for start, end in ((0, 5), (5, 6), (6, 11)):
        index = torch.arange(end - start)
        part = (tensor[0, :, start:end] for tensor in (query, key, value))
        expected = written_out(*part, causal(index, index, extra), extra)
        torch.testing.assert_close(out[0, start:end], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("extra", EXTRAS)
def test_rows_of_a_slot_cache_attend_to_all_they_hold(extra: dict[str, Any], around: bool) -> None:
    """Rows at different positions; the write is said by the layer's caller, or around the whole model."""
    cache = SlotCache(1, 3, dtype=torch.float32, device=torch.device("cpu"))
    query, key, value = tensors(2, 9)
    first, second = (
        SlotWrite.at(slice(1, 3), [0, 0], 6, cache.device),
        SlotWrite.at(slice(1, 3), [6, 2], 3, cache.device),
    )
    SlotKeyValues(cache, first).update(key[:, :, :6], value[:, :, :6], 0)
    keys_values = SlotKeyValues(cache, second)
    assert keys_values.get_seq_length() == 6
    keys, values = keys_values.update(key[:, :, 6:], value[:, :, 6:], 0)
    options = {"scaling": 0.7, **extra}
    if around:
        with writing(second):
            out, _ = attention(MODULE, query[:, :, 6:], keys, values, None, **options)
    else:
        out, _ = attention(MODULE, query[:, :, 6:], keys, values, None, slot_write=second, **options)
    for row, start in enumerate((6, 2)):
        held = [torch.cat((tensor[row, :, :start], tensor[row, :, 6:]), 1) for tensor in (key, value)]
        mask = causal(torch.arange(start, start + 3), torch.arange(start + 3), extra)
        torch.testing.assert_close(out[row], written_out(query[row, :, 6:], *held, mask, extra), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("extra", [EXTRAS[0], EXTRAS[2]])
def test_without_either_the_mask_of_transformers_decides(extra: dict[str, Any]) -> None:
    query, key, value = tensors(1, 5)
    index = torch.arange(5)
    for mask_TE in (causal(index, index, {}), torch.eye(5, dtype=torch.bool)):
        out, _ = attention(MODULE, query, key, value, mask_TE[None, None], scaling=0.7, **extra)
        expected = written_out(query[0], key[0], value[0], mask_TE, extra)
        torch.testing.assert_close(out[0], expected, atol=1e-5, rtol=1e-5)
    out, _ = attention(MODULE, query[:, :, 3:], key, value, None, scaling=0.7, **extra)
    expected = written_out(query[0, :, 3:], key[0], value[0], causal(index[3:], index, {}), extra)
    torch.testing.assert_close(out[0], expected, atol=1e-5, rtol=1e-5)
