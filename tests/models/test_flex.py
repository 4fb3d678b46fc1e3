"""The fused kernel's masks and tiles against the dense twins, and its forward against attention block by block.

Its backward exists on a GPU alone; `benchmarks/gpu_check.py` compares that one.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.models.attention import packed_attention, plan_blocks
from speculators.models.dflash.blocks import BlockKeys, BlockMask, BlockPlan, block_attention, flex_block_attention
from speculators.models.flex import TILE, PackedKeys, flex_packed_attention, tiles, up_to_tile
from speculators.models.masks import PackedMask
from tests.models.dflash.dense import sees

LENGTHS = [300, 1, 210]
SLOTS = torch.cat((torch.arange(5, 300, 2), torch.tensor([300]), torch.arange(301, 511)))
ANCHORS = torch.cat((torch.arange(0, 290, 9), torch.arange(310, 500, 1)))
NUM_SLOTS, SCALE = 5, 0.3
DOCUMENTS = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))


def grid(mask: PackedKeys | BlockKeys) -> Tensor:
    """What the kernel's predicate says of every query and key, bool [R, K]."""
    return mask.visible(torch.arange(mask.num_queries)[:, None], torch.arange(mask.num_keys)[None])


def packed_twin(window: int | None, num_own: int) -> Tensor:
    """The dense mask over the context, and the diagonal of each step's own keys, with padding that nobody sees."""
    size, rows = len(DOCUMENTS), len(SLOTS)
    parts = [PackedMask(window).dense(DOCUMENTS[None])[0][SLOTS], torch.zeros(rows, up_to_tile(size) - size).bool()]
    for _ in range(num_own):
        parts += [torch.eye(rows).bool(), torch.zeros(rows, up_to_tile(rows) - rows).bool()]
    return torch.cat(parts, 1)


def blocks_twin(causal: bool, window: int | None) -> Tensor:
    """Slot by slot and key by key, from the rule that the dense twin of DFlash reads."""
    starts = [sum(LENGTHS[:document]) for document in range(3)]
    context, queries = up_to_tile(len(DOCUMENTS)), len(ANCHORS) * NUM_SLOTS
    seen = torch.zeros(queries, context + queries, dtype=torch.bool)
    for block, anchor in enumerate(ANCHORS.tolist()):
        document = int(DOCUMENTS[anchor])
        start, first = starts[document], context + block * NUM_SLOTS
        rule: dict[str, Any] = {"anchor": anchor, "causal": causal, "window": window}
        for slot in range(NUM_SLOTS):
            row = seen[block * NUM_SLOTS + slot]
            for key in range(start, anchor):
                row[key] = sees(anchor + slot, key, in_block=False, **rule)
            for other in range(NUM_SLOTS):
                row[first + other] = sees(anchor + slot, anchor + other, in_block=True, **rule)
    return seen


PACKED = [(window, own) for window in (None, 150, 3, 0) for own in (0, 2) if own or window != 0]
BLOCKS = [(causal, window) for causal in (False, True) for window in (None, 100, 3)]


def packed_keys(window: int | None, num_own: int) -> PackedKeys:
    return PackedKeys(SLOTS, LENGTHS, PackedMask(window), num_own)


def block_plan(causal: bool, window: int | None) -> BlockPlan:
    return BlockPlan.make(ANCHORS, NUM_SLOTS, LENGTHS, BlockMask(causal, window))


MASKS = [(lambda c=case: packed_keys(*c), lambda c=case: packed_twin(*c)) for case in PACKED]
MASKS += [(lambda c=case: BlockKeys(block_plan(*c), LENGTHS), lambda c=case: blocks_twin(*c)) for case in BLOCKS]
every_mask = pytest.mark.parametrize(("make", "twin"), MASKS, ids=[str(case) for case in (*PACKED, *BLOCKS)])


@every_mask
def test_the_kernels_predicate_is_the_dense_mask(make: Callable[[], Any], twin: Callable[[], Tensor]) -> None:
    assert torch.equal(grid(make()), twin())


@every_mask
def test_tiles_leave_out_nothing_and_mask_all_that_is_not_wholly_seen(
    make: Callable[[], Any], twin: Callable[[], Tensor]
) -> None:
    mask, seen = make(), twin()
    rows, columns = up_to_tile(seen.shape[0]) // TILE, up_to_tile(seen.shape[1]) // TILE
    built = tiles(mask, seen.device)
    listed = torch.zeros(2, rows, columns, dtype=torch.bool)
    lists = ((built.kv_num_blocks, built.kv_indices), (built.full_kv_num_blocks, built.full_kv_indices))
    for kind, (counts, indices) in enumerate(lists):
        for row in range(rows):
            listed[kind, row, indices[0, 0, row, : counts[0, 0, row]].long()] = True
    part, whole = listed
    padded = torch.zeros(rows * TILE, columns * TILE, dtype=torch.bool)
    padded[: seen.shape[0], : seen.shape[1]] = seen
    by_tile = padded.view(rows, TILE, columns, TILE)
    assert not (part & whole).any()
    assert torch.equal(by_tile.any(3).any(1) & ~(part | whole), torch.zeros(rows, columns).bool())
    # Queries behind the last are none, so that a last tile of theirs may be wholly seen.
    real = (torch.arange(rows * TILE) < seen.shape[0]).view(rows, TILE, 1, 1)
    assert (by_tile | ~real).all(3).all(1)[whole].all()
    assert not (part | whole).all()


def random_tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


@pytest.mark.full
@torch.no_grad()
def test_the_fused_forward_is_that_of_blocks() -> None:
    size = 16
    for window, num_own in ((None, 2), (150, 0), (3, 2)):
        rows, context = (len(SLOTS), 4, size), (len(DOCUMENTS), 2, size)
        q, k, v, *rest = random_tensors(rows, context, context, *[(len(SLOTS), 2, size)] * (2 * num_own))
        own = list(zip(rest[::2], rest[1::2], strict=True))
        expected = packed_attention(q, k, v, own, plan_blocks(SLOTS, LENGTHS, window), SCALE)
        found = flex_packed_attention(q, k, v, own, packed_keys(window, num_own), SCALE)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for causal, window in ((False, None), (True, 100), (False, 3)):
        plan, slots, context = block_plan(causal, window), (len(ANCHORS), NUM_SLOTS), (len(DOCUMENTS), 2, size)
        q, *pairs = random_tensors((*slots, 4, size), *[(*slots, 2, size)] * 2, context, context)
        expected = block_attention(q, (pairs[0], pairs[1]), (pairs[2], pairs[3]), plan, SCALE)
        keys = BlockKeys(plan, LENGTHS)
        found = flex_block_attention(q, (pairs[0], pairs[1]), (pairs[2], pairs[3]), keys, SCALE)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
