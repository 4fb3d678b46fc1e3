"""Verification of drafts by Triton: what `rejection` does, function by function, for tensors on a GPU.

A rule runs one program a row that decides how many drafts are kept, and one program a row and chunk of the vocabulary
that races for the token after them; block verification has one before these that adds up residual masses. Nothing of
the size of rows by vocabulary is made. Probabilities may be of any floating dtype and are computed with in float64, as
the reference does. Shape suffixes: B rows, K drafts, S = K + 1 positions, V vocabulary, C chunks of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import language as tl

from speculators.runtime.rejection import Verification

# Columns of the vocabulary that a program handles.
COLUMNS = 1024
WARPS = 4
# The reference rounds each product, too.
OPTIONS = {"enable_fp_fusion": False}
# Stands below every weight of a race.
NOTHING = tl.constexpr(-1.0)


@triton.jit
def _drafted(ids, length, slots):
    """How many drafts a row has: those before its first negative id."""
    count = 0
    going = 1
    for slot in range(slots):
        going = tl.where((slot < length) & (tl.load(ids + slot) >= 0), going, 0)
        count += going
    return count


@triton.jit
def _pair(target, target_stride, draft, draft_stride, ids, slot, ONE_HOT: tl.constexpr):
    """What verifier and draft give the draft of a slot."""
    chosen = tl.maximum(tl.load(ids + slot), 0)
    p = tl.load(target + slot * target_stride + chosen).to(tl.float64)
    q = tl.full([], 1.0, tl.float64)
    if not ONE_HOT:
        q = tl.load(draft + slot * draft_stride + chosen).to(tl.float64)
    return p, q


@triton.jit
def _next_share(share, p, q):
    """The share of block verification after one draft more."""
    share = tl.where(q > 0, share * (p / tl.where(q > 0, q, 1.0)), 0.0)
    return tl.minimum(share, 1.0)


@triton.jit
def _emit(ids, output, accepted, slots):
    """The accepted drafts and -1 after them; the last token takes its place later."""
    for slot in range(slots):
        tl.store(output + slot, tl.where(slot < accepted, tl.load(ids + slot), -1))
    tl.store(output + slots, tl.full([], -1, tl.int64))


@triton.jit
def _greedy_kernel(targets, targets_stride, ids, ids_stride, lengths, slots, kept, output):
    row = tl.program_id(0).to(tl.int64)
    targets += row * targets_stride
    ids += row * ids_stride
    output += row * (slots + 1)
    drafted = _drafted(ids, tl.load(lengths + row), slots)
    accepted = 0
    for slot in range(slots):
        same = tl.load(ids + slot) == tl.load(targets + slot)
        accepted += tl.where((slot < drafted) & (accepted == slot) & same, 1, 0)
    _emit(ids, output, accepted, slots)
    tl.store(output + accepted, tl.load(targets + accepted))
    tl.store(kept + row, accepted)


@triton.jit
def _tosses_kernel(ids, ids_stride, lengths, slots, coins, coins_stride, rates, drafted_rows, kept, output):
    """Drafts kept by coin alone."""
    row = tl.program_id(0).to(tl.int64)
    ids += row * ids_stride
    coins += row * coins_stride
    drafted = _drafted(ids, tl.load(lengths + row), slots)
    accepted = 0
    for slot in range(slots):
        tossed = tl.load(coins + slot) < tl.load(rates + slot)
        accepted += tl.where((slot < drafted) & (accepted == slot) & tossed, 1, 0)
    _emit(ids, output + row * (slots + 1), accepted, slots)
    tl.store(drafted_rows + row, drafted)
    tl.store(kept + row, accepted)


@triton.jit
def _standard_kernel(
    target,
    target_row,
    target_stride,
    draft,
    draft_row,
    draft_stride,
    ids,
    ids_stride,
    lengths,
    slots,
    coins,
    coins_stride,
    drafted_rows,
    kept,
    output,
    ONE_HOT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target += row * target_row
    draft += row * draft_row
    ids += row * ids_stride
    coins += row * coins_stride
    drafted = _drafted(ids, tl.load(lengths + row), slots)
    accepted = 0
    for slot in range(slots):
        p, q = _pair(target, target_stride, draft, draft_stride, ids, slot, ONE_HOT)
        fits = (tl.load(coins + slot) * q < p) & (q > 0)
        accepted += tl.where((slot < drafted) & (accepted == slot) & fits, 1, 0)
    _emit(ids, output + row * (slots + 1), accepted, slots)
    tl.store(drafted_rows + row, drafted)
    tl.store(kept + row, accepted)


@triton.jit
def _masses_kernel(
    target,
    target_row,
    target_stride,
    draft,
    draft_row,
    draft_stride,
    ids,
    ids_stride,
    slots,
    size,
    masses,
    BLOCK: tl.constexpr,
):
    """Of a row, a slot from the second on and a chunk: the mass of max(share * p - q, 0)."""
    row, place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    target += row * target_row
    draft += row * draft_row
    ids += row * ids_stride
    share = tl.full([], 1.0, tl.float64)
    for slot in range(place + 1):
        p, q = _pair(target, target_stride, draft, draft_stride, ids, slot, False)
        share = _next_share(share, p, q)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    here = (place + 1).to(tl.int64)
    p = tl.load(target + here * target_stride + columns, mask=inside, other=0.0).to(tl.float64)
    q = tl.load(draft + here * draft_stride + columns, mask=inside, other=0.0).to(tl.float64)
    mass = tl.sum(tl.maximum(share * p - q, 0.0), 0)
    tl.store(masses + (row * (slots - 1) + place) * tl.num_programs(2) + chunk, mass)


@triton.jit
def _block_kernel(
    target,
    target_row,
    target_stride,
    draft,
    draft_row,
    draft_stride,
    ids,
    ids_stride,
    lengths,
    slots,
    coins,
    coins_stride,
    drafted_rows,
    kept,
    output,
    masses,
    shares,
    ONE_HOT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target += row * target_row
    draft += row * draft_row
    ids += row * ids_stride
    coins += row * coins_stride
    drafted = _drafted(ids, tl.load(lengths + row), slots)
    accepted = 0
    share = tl.full([], 1.0, tl.float64)
    kept_share = share
    for slot in range(slots):
        p, q = _pair(target, target_stride, draft, draft_stride, ids, slot, ONE_HOT)
        share = _next_share(share, p, q)
        after = tl.minimum(slot + 1, slots - 1)
        if ONE_HOT:
            following, _ = _pair(target, target_stride, draft, draft_stride, ids, after, ONE_HOT)
            mass = share * tl.maximum(1.0 - following, 0.0)
        else:
            mass = tl.load(masses + row * (slots - 1) + after - 1, mask=slots > 1, other=0.0)
        missing = mass + 1.0 - share
        going_on = tl.where(missing > 0, mass / tl.where(missing > 0, missing, 1.0), 1.0)
        threshold = tl.where(slot + 1 < drafted, going_on, share)
        passes = (slot < drafted) & (tl.load(coins + slot) < threshold)
        accepted = tl.where(passes, slot + 1, accepted)
        kept_share = tl.where(passes, share, kept_share)
    _emit(ids, output + row * (slots + 1), accepted, slots)
    tl.store(drafted_rows + row, drafted)
    tl.store(kept + row, accepted)
    tl.store(shares + row, kept_share)


@triton.jit
def _race(weights, noise, columns, size):
    """The largest of weight / noise among some columns, and the first column that has it."""
    times = tl.where(columns < size, weights / noise, NOTHING)
    best = tl.max(times, 0)
    return best, tl.min(tl.where(times == best, columns, size), 0)


@triton.jit
def _race_kernel(
    target,
    target_row,
    target_stride,
    draft,
    draft_row,
    draft_stride,
    ids,
    ids_stride,
    slots,
    size,
    drafted_rows,
    kept,
    shares,
    noise,
    noise_stride,
    best,
    winners,
    ONE_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a row and a chunk: who wins by the residual's weights, and who by the verifier's own."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    accepted = tl.load(kept + row)
    rejected = accepted < tl.load(drafted_rows + row)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    plain = tl.load(target + row * target_row + accepted * target_stride + columns, mask=inside, other=0.0)
    plain = plain.to(tl.float64)
    times = tl.load(noise + row * noise_stride + columns, mask=inside, other=1.0).to(tl.float64)
    times = tl.maximum(times, 1e-300)
    if ONE_HOT:
        refused = tl.load(ids + row * ids_stride + accepted, mask=rejected, other=-1)
        residual = tl.where(columns == refused, 0.0, plain)
    else:
        where = draft + row * draft_row + accepted * draft_stride + columns
        q = tl.load(where, mask=columns < tl.where(rejected, size, 0), other=0.0).to(tl.float64)
        residual = tl.maximum(tl.load(shares + row) * plain - q, 0.0)
    residual = tl.where(rejected, residual, 0.0)
    chunks = tl.num_programs(1)
    place = row * 2 * chunks + chunk
    largest, winner = _race(residual, times, columns, size)
    tl.store(best + place, largest)
    tl.store(winners + place, winner.to(tl.int64))
    largest, winner = _race(plain, times, columns, size)
    tl.store(best + place + chunks, largest)
    tl.store(winners + place + chunks, winner.to(tl.int64))


@dataclass
class _Rows:
    """Rows as kernels take them, and what they find: drafts a row, drafts kept, tokens emitted."""

    target_BSV: Tensor
    draft_BKV: Tensor | None
    ids_BK: Tensor
    lengths_B: Tensor

    def __post_init__(self) -> None:
        self.target_BSV, self.ids_BK = _dense(self.target_BSV), _dense(self.ids_BK)
        self.draft_BKV = None if self.draft_BKV is None else _dense(self.draft_BKV)
        self.lengths_B = self.lengths_B.contiguous()
        self.batch, self.slots = self.ids_BK.shape
        self.size = self.target_BSV.shape[2]
        self.drafted_B = torch.empty_like(self.lengths_B, dtype=torch.int64)
        self.found = _empty(self.ids_BK)

    @property
    def laws(self) -> tuple[Tensor, int, int, Tensor, int, int]:
        """Pointers and strides of both laws; one-hot drafts, which have none, give the verifier's twice."""
        draft_BKV = self.target_BSV if self.draft_BKV is None else self.draft_BKV
        target, draft = self.target_BSV.stride(), draft_BKV.stride()
        return self.target_BSV, target[0], target[1], draft_BKV, draft[0], draft[1]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows, and chunks of the vocabulary."""
        return self.batch, triton.cdiv(self.size, COLUMNS)

    def finish(self, noise_BV: Tensor, share_B: Tensor | None = None) -> Verification:
        """Draw the token after the drafts that were kept, and put it into its place."""
        noise_BV = _dense(noise_BV)
        if share_B is None:
            share_B = torch.ones(self.batch, dtype=torch.float64, device=noise_BV.device)
        best_B2C = torch.empty(self.batch, 2, self.grid[1], dtype=torch.float64, device=noise_BV.device)
        winner_B2C = torch.empty(best_B2C.shape, dtype=torch.int64, device=noise_BV.device)
        _race_kernel[self.grid](
            *self.laws,
            *(self.ids_BK, self.ids_BK.stride(0), self.slots, self.size),
            *(self.drafted_B, self.found.num_accepted_B, share_B, noise_BV, noise_BV.stride(0)),
            *(best_B2C, winner_B2C, self.draft_BKV is None),
            BLOCK=COLUMNS,
            num_warps=WARPS,
            **OPTIONS,
        )
        largest_B2, chunk_B2 = best_B2C.max(-1)
        token_B2 = winner_B2C.gather(2, chunk_B2[:, :, None])[:, :, 0]
        # Without a residual, because no draft was rejected or by rounding alone, the verifier's own law decides.
        token_B = torch.where(largest_B2[:, 0] > 0, token_B2[:, 0], token_B2[:, 1])
        self.found.output_ids_BS.scatter_(1, self.found.num_accepted_B[:, None], token_B[:, None])
        return self.found


def verify_greedy(target_ids_BS: Tensor, draft_ids_BK: Tensor, lengths_B: Tensor) -> Verification:
    """The kernel of `rejection.verify_greedy`."""
    targets, ids, found = _dense(target_ids_BS), _dense(draft_ids_BK), _empty(draft_ids_BK)
    with torch.cuda.device_of(ids):
        _greedy_kernel[(len(ids),)](
            *(targets, targets.stride(0), ids, ids.stride(0), lengths_B.contiguous(), ids.shape[1]),
            *(found.num_accepted_B, found.output_ids_BS),
            num_warps=1,
            **OPTIONS,
        )
    return found


def verify_standard(
    target_probs_BSV: Tensor,
    draft_ids_BK: Tensor,
    lengths_B: Tensor,
    draft_probs_BKV: Tensor | None,
    accept_uniform_BK: Tensor,
    sample_noise_BV: Tensor,
) -> Verification:
    """The kernels of `rejection.verify_standard`."""
    rows = _Rows(target_probs_BSV, draft_probs_BKV, draft_ids_BK, lengths_B)
    coins = _dense(accept_uniform_BK)
    with torch.cuda.device_of(rows.ids_BK):
        _standard_kernel[(rows.batch,)](
            *rows.laws,
            *(rows.ids_BK, rows.ids_BK.stride(0), rows.lengths_B, rows.slots, coins, coins.stride(0)),
            *(rows.drafted_B, rows.found.num_accepted_B, rows.found.output_ids_BS, draft_probs_BKV is None),
            num_warps=1,
            **OPTIONS,
        )
        return rows.finish(sample_noise_BV)


def verify_block(
    target_probs_BSV: Tensor,
    draft_ids_BK: Tensor,
    lengths_B: Tensor,
    draft_probs_BKV: Tensor | None,
    accept_uniform_BK: Tensor,
    sample_noise_BV: Tensor,
) -> Verification:
    """The kernels of `rejection.verify_block`."""
    rows = _Rows(target_probs_BSV, draft_probs_BKV, draft_ids_BK, lengths_B)
    coins, one_hot = _dense(accept_uniform_BK), draft_probs_BKV is None
    share_B = torch.empty(rows.batch, dtype=torch.float64, device=coins.device)
    with torch.cuda.device_of(rows.ids_BK):
        mass_BP = share_B
        if rows.slots > 1 and not one_hot:
            batch, chunks = rows.grid
            mass_BPC = torch.empty(batch, rows.slots - 1, chunks, dtype=torch.float64, device=coins.device)
            _masses_kernel[(batch, rows.slots - 1, chunks)](
                *rows.laws,
                *(rows.ids_BK, rows.ids_BK.stride(0), rows.slots, rows.size, mass_BPC),
                BLOCK=COLUMNS,
                num_warps=WARPS,
                **OPTIONS,
            )
            mass_BP = mass_BPC.sum(2)
        _block_kernel[(rows.batch,)](
            *rows.laws,
            *(rows.ids_BK, rows.ids_BK.stride(0), rows.lengths_B, rows.slots, coins, coins.stride(0)),
            *(rows.drafted_B, rows.found.num_accepted_B, rows.found.output_ids_BS, mass_BP, share_B, one_hot),
            num_warps=1,
            **OPTIONS,
        )
        return rows.finish(sample_noise_BV, share_B)


def verify_synthetic(
    target_probs_BSV: Tensor,
    draft_ids_BK: Tensor,
    lengths_B: Tensor,
    draft_probs_BKV: Tensor | None,
    accept_uniform_BK: Tensor,
    sample_noise_BV: Tensor,
    rates_K: Tensor,
) -> Verification:
    """The kernels of `rejection.verify_synthetic`."""
    rows = _Rows(target_probs_BSV, draft_probs_BKV, draft_ids_BK, lengths_B)
    with torch.cuda.device_of(rows.ids_BK):
        _toss(rows.ids_BK, rows.lengths_B, accept_uniform_BK, rates_K, rows.drafted_B, rows.found)
        return rows.finish(sample_noise_BV)


def verify_synthetic_greedy(
    target_ids_BS: Tensor, draft_ids_BK: Tensor, lengths_B: Tensor, accept_uniform_BK: Tensor, rates_K: Tensor
) -> Verification:
    """The kernel of `rejection.verify_synthetic_greedy`."""
    ids, found = _dense(draft_ids_BK), _empty(draft_ids_BK)
    with torch.cuda.device_of(ids):
        drafted_B = torch.empty_like(found.num_accepted_B)
        _toss(ids, lengths_B.contiguous(), accept_uniform_BK, rates_K, drafted_B, found)
    places_B1 = found.num_accepted_B[:, None]
    found.output_ids_BS.scatter_(1, places_B1, target_ids_BS.gather(1, places_B1))
    return found


def _toss(
    ids_BK: Tensor, lengths_B: Tensor, coins_BK: Tensor, rates_K: Tensor, drafted_B: Tensor, found: Verification
) -> None:
    coins_BK = _dense(coins_BK)
    _tosses_kernel[(len(ids_BK),)](
        *(ids_BK, ids_BK.stride(0), lengths_B, ids_BK.shape[1], coins_BK, coins_BK.stride(0)),
        *(rates_K.contiguous(), drafted_B, found.num_accepted_B, found.output_ids_BS),
        num_warps=1,
        **OPTIONS,
    )


def _dense(tensor: Tensor) -> Tensor:
    """The tensor with the values of its last dimension side by side, which kernels know no stride of."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _empty(draft_ids_BK: Tensor) -> Verification:
    batch, slots = draft_ids_BK.shape
    accepted_B = torch.empty(batch, dtype=torch.int64, device=draft_ids_BK.device)
    return Verification(accepted_B, accepted_B.new_empty(batch, slots + 1))
