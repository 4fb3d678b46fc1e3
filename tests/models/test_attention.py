import pytest
import torch
from torch import Tensor

from speculators.models import attention
from speculators.models.attention import packed_attention, plan_blocks
from speculators.models.masks import PackedMask

LENGTHS = [7, 1, 12]
SLOTS = torch.tensor([1, 2, 5, 6, 7, 9, 10, 11, 13, 14, 15, 19])
SCALE = 0.3


def inputs(num_own: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    rows, context = len(SLOTS), sum(LENGTHS)
    shapes = [(rows, 6, 4), (context, 2, 4), (context, 2, 4)] + [(rows, 2, 4)] * (2 * num_own)
    return tuple(torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)


def dense(q: Tensor, k: Tensor, v: Tensor, *own: Tensor, window: int | None) -> Tensor:
    """The definition: one softmax over all visible context keys and the query's own keys, heads repeated."""
    repeat = q.shape[1] // k.shape[1]
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    visible = PackedMask(window).dense(documents[None])[0][SLOTS]
    scores = torch.einsum("rhd,chd->hrc", q, k.repeat_interleave(repeat, 1)) * SCALE
    columns = [scores.masked_fill(~visible, float("-inf"))]
    own_keys, own_values = own[::2], [value.repeat_interleave(repeat, 1) for value in own[1::2]]
    columns += [(q * key.repeat_interleave(repeat, 1)).sum(-1).T[..., None] * SCALE for key in own_keys]
    weights = torch.cat(columns, -1).softmax(-1)
    out = torch.einsum("hrc,chd->rhd", weights[..., : len(k)], v.repeat_interleave(repeat, 1))
    for index, value in enumerate(own_values):
        out = out + weights[..., len(k) + index].T[..., None] * value
    return out


def blockwise(q: Tensor, k: Tensor, v: Tensor, *own: Tensor, window: int | None) -> Tensor:
    pairs = list(zip(own[::2], own[1::2], strict=True))
    return packed_attention(q, k, v, pairs, plan_blocks(SLOTS, LENGTHS, window), SCALE)


@pytest.mark.parametrize("window", [None, 3, 1])
@pytest.mark.parametrize("num_own", [0, 1, 2])
@pytest.mark.parametrize("block_rows", [2, 512])
def test_blocks_equal_the_dense_twin(monkeypatch, window: int | None, num_own: int, block_rows: int) -> None:
    """Gradients and modes of training are what they seem (pitfall 27)."""
    monkeypatch.setattr(attention, "BLOCK_ROWS", block_rows)
    tensors = inputs(num_own)
    found, expected = blockwise(*tensors, window=window), dense(*tensors, window=window)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    pairs = zip(
        torch.autograd.grad(found, tensors, upstream), torch.autograd.grad(expected, tensors, upstream), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other)


def test_row_27_gradients_by_finite_differences() -> None:
    """Gradients and modes of training are what they seem (pitfall 27)."""
    assert torch.autograd.gradcheck(lambda *tensors: blockwise(*tensors, window=4), inputs(2))


def test_queries_that_see_none_but_their_own_keys() -> None:
    q, k, v, *own = inputs(2)
    found = blockwise(q, k, v, *own, window=0)
    repeated = [tensor.repeat_interleave(3, 1) for tensor in own]
    scores = torch.stack([(q * key).sum(-1) * SCALE for key in repeated[::2]], -1).softmax(-1)
    expected = scores[..., :1] * repeated[1] + scores[..., 1:] * repeated[3]
    torch.testing.assert_close(found, expected)


def test_bfloat16_stays_near_float32() -> None:
    tensors = inputs(1, torch.float32)
    half = blockwise(*(tensor.to(torch.bfloat16) for tensor in tensors), window=None)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), dense(*tensors, window=None), atol=0.03, rtol=0.03)


def test_blocks_stop_at_the_last_query_and_at_the_window() -> None:
    blocks = plan_blocks(torch.tensor([2, 3, 12]), [5, 10], 3)
    assert [(block.rows, block.keys) for block in blocks] == [
        (slice(0, 2), slice(0, 4)),
        (slice(2, 3), slice(10, 13)),
    ]
    assert all(block.hidden.all() for block in plan_blocks(torch.tensor([2, 3, 12]), [5, 10], 0))
    assert blocks[0].hidden.tolist() == [[False, False, False, True], [True, False, False, False]]
