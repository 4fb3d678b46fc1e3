"""The slot cache and its attention against attention spelled out row by row."""

import math

import pytest
import torch

from speculators.models.cache import SlotCache, SlotWrite, attend

HEADS, KV_HEADS, SIZE = 4, 2, 8


def spelled_out(
    q_QTD: torch.Tensor,
    k_NED: torch.Tensor,
    v_NED: torch.Tensor,
    start: int,
    window: int | None,
    *,
    causal: bool = True,
) -> torch.Tensor:
    """One row: each query sees the keys at or before it, at most `window` of them; if not causal, later ones too."""
    out = torch.zeros_like(q_QTD)
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        for place in range(q_QTD.shape[1]):
            position = start + place
            first = 0 if window is None else max(0, position - window + 1)
            last = position + 1 if causal else k_NED.shape[1]
            keys, values = k_NED[kv, first:last], v_NED[kv, first:last]
            weights = (q_QTD[head, place] @ keys.T / math.sqrt(SIZE)).softmax(-1)
            out[head, place] = weights @ values
    return out


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_rows_of_different_lengths_attend_to_themselves_alone(rows: int, width: int, window: int | None) -> None:
    """Twenty rows are long and short ones mixed, so they are attended in groups."""
    generator = torch.Generator().manual_seed(rows)
    cache = SlotCache(1, rows, dtype=torch.float32, device=torch.device("cpu"))
    starts = [300 if row == 2 else 3 + row for row in range(rows)]
    stored = []
    for row, start in enumerate(starts):
        keys, values = (torch.randn(1, KV_HEADS, start, SIZE, generator=generator) for _ in range(2))
        cache.write(0, SlotWrite.at(slice(row, row + 1), [0], start, torch.device("cpu")), keys, values)
        stored.append((keys[0], values[0]))
    write = SlotWrite.at(slice(0, rows), starts, width, torch.device("cpu"))
    assert (len(write.groups()) > 1) is (rows == 20)
    new_k, new_v = (torch.randn(rows, KV_HEADS, width, SIZE, generator=generator) for _ in range(2))
    queries = torch.randn(rows, HEADS, width, SIZE, generator=generator)
    out = attend(write, queries, *cache.write(0, write, new_k, new_v), 1 / math.sqrt(SIZE), window)
    for row, start in enumerate(starts):
        keys, values = (torch.cat([old, new[row]], 1) for old, new in zip(stored[row], (new_k, new_v), strict=True))
        torch.testing.assert_close(out[row], spelled_out(queries[row], keys, values, start, window))


@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_what_is_written_together_may_see_itself_but_nothing_stale_behind_it(rows: int, window: int | None) -> None:
    """Blocks of 4 after rows of different lengths, over what longer writes left there; short windows, grouped rows."""
    generator = torch.Generator().manual_seed(rows)
    device, width = torch.device("cpu"), 4
    cache = SlotCache(1, rows, dtype=torch.float32, device=device)
    starts = [300 if row == 2 else 3 + row for row in range(rows)]
    stored = []
    for row, start in enumerate(starts):
        keys, values = (torch.randn(1, KV_HEADS, start + 9, SIZE, generator=generator) for _ in range(2))
        cache.write(0, SlotWrite.at(slice(row, row + 1), [0], start + 9, device), keys, values)
        stored.append((keys[0, :, :start], values[0, :, :start]))
    write = SlotWrite.at(slice(0, rows), starts, width, device)
    new_k, new_v = (torch.randn(rows, KV_HEADS, width, SIZE, generator=generator) for _ in range(2))
    queries = torch.randn(rows, HEADS, width, SIZE, generator=generator)
    seen = cache.write(0, write, new_k, new_v)
    out = attend(write, queries, *seen, 1 / math.sqrt(SIZE), window, causal=False)
    for row, start in enumerate(starts):
        keys, values = (torch.cat([old, new[row]], 1) for old, new in zip(stored[row], (new_k, new_v), strict=True))
        torch.testing.assert_close(out[row], spelled_out(queries[row], keys, values, start, window, causal=False))
    assert (write.mask(causal=False) is None) is (rows == 1)
    causal = attend(write, queries, *seen, 1 / math.sqrt(SIZE), window)
    torch.testing.assert_close(causal[:, :, -1], out[:, :, -1])
    assert not torch.allclose(causal[:, :, 0], out[:, :, 0])


def test_a_rejected_entry_is_overwritten() -> None:
    """Moving the length back and writing again leaves what a fresh cache would hold."""
    device = torch.device("cpu")
    cache, fresh = (SlotCache(1, 1, dtype=torch.float32, device=device) for _ in range(2))
    entries = torch.randn(4, 1, KV_HEADS, 2, SIZE)
    cache.write(0, SlotWrite.at(slice(0, 1), [0], 2, device), entries[0], entries[1])
    cache.write(0, SlotWrite.at(slice(0, 1), [1], 2, device), entries[2], entries[3])
    fresh.write(0, SlotWrite.at(slice(0, 1), [0], 2, device), entries[0], entries[1])
    fresh.write(0, SlotWrite.at(slice(0, 1), [1], 2, device), entries[2], entries[3])
    assert cache.keys[0] is not None
    assert fresh.keys[0] is not None
    assert torch.equal(cache.keys[0], fresh.keys[0])
    assert torch.equal(cache.keys[0][0, :, 0], entries[0][0, :, 0])
    assert torch.equal(cache.keys[0][0, :, 1:3], entries[2][0])


def test_moving_a_slot_keeps_its_entries_through_growth() -> None:
    device = torch.device("cpu")
    cache = SlotCache(2, 3, dtype=torch.float32, device=device)
    keys, values = torch.randn(2, 1, KV_HEADS, 10, SIZE)
    for layer in range(2):
        cache.write(layer, SlotWrite.at(slice(2, 3), [0], 10, device), keys, values)
    cache.move(2, 0, 10)
    more = torch.randn(1, KV_HEADS, 600, SIZE)
    seen, _ = cache.write(1, SlotWrite.at(slice(0, 1), [10], 600, device), more, more)
    torch.testing.assert_close(seen[0], torch.cat([keys[0], more[0]], 1))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [[5, 1, 2, 5], [1, 1, 5, 1], [5, 5, 5, 4], [5, 5, 5, 5]])
def test_packed_rows_attend_as_each_by_itself(lengths: list[int], window: int | None) -> None:
    """What is written and attended to lies in one row without padding, but for what fills it up to a multiple of 8."""
    generator, device = torch.Generator().manual_seed(sum(lengths)), torch.device("cpu")
    starts, rows = [2, 9, 4, 7], slice(1, 5)
    cache = SlotCache(1, 6, dtype=torch.float32, device=device)
    old = torch.randn(2, 4, KV_HEADS, max(starts), SIZE, generator=generator)
    cache.write(0, SlotWrite.at(rows, [0] * 4, max(starts), device), old[0], old[1])
    padded = SlotWrite.at(rows, starts, 5, device, lengths=lengths)
    write = padded.without_padding()
    entries = 20 if write.packed is None else len(write.packed)
    assert entries == min(20, 8 * math.ceil(sum(lengths) / 8))
    assert (write is padded) is (entries == 20)
    new = torch.randn(2, 4, 5, KV_HEADS, SIZE, generator=generator)
    q_BTQD = torch.randn(4, 5, HEADS, SIZE, generator=generator)
    assert write.pack(q_BTQD).shape[:2] == ((1, entries) if entries < 20 else (4, 5))
    keys, values = cache.write(0, write, write.pack(new[0]).transpose(1, 2), write.pack(new[1]).transpose(1, 2))
    queries = write.unpack(write.pack(q_BTQD)).transpose(1, 2)
    out_BQTD = attend(write, queries, keys, values, 1 / math.sqrt(SIZE), window)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        k_NED, v_NED = (
            torch.cat([old[part, row, :, :start], new[part, row, :length].transpose(0, 1)], 1) for part in (0, 1)
        )
        expected = spelled_out(q_BTQD[row, :length].transpose(0, 1), k_NED, v_NED, start, window)
        torch.testing.assert_close(out_BQTD[row, :, :length], expected)
