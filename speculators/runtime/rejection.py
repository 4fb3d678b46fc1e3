"""Verification of drafted tokens: which are kept, and which token follows them.

The readable reference. Shapes: B rows, K drafted tokens at most (row b drafted lengths_B[b]), V verifier vocabulary.
Every rule emits the accepted prefix of the drafts and one more token of the verifier's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Verification:
    """Outcome of one verification: `num_accepted_B` drafts kept a row and `output_ids_BS` [B, K+1] int64, -1 padded."""

    num_accepted_B: Tensor
    output_ids_BS: Tensor


def verify_greedy(target_ids_BS: Tensor, draft_ids_BK: Tensor, lengths_B: Tensor) -> Verification:
    """Keep drafts while they equal the verifier's argmax; then emit that argmax.

    `target_ids_BS` [B, K+1] is the argmax at each position.
    """
    slots_K = torch.arange(draft_ids_BK.shape[1], device=draft_ids_BK.device)
    matches_BK = (draft_ids_BK == target_ids_BS[:, :-1]) & (slots_K < lengths_B[:, None])
    accepted_B = matches_BK.long().cumprod(1).sum(1)
    return _emit(draft_ids_BK, accepted_B, target_ids_BS.gather(1, accepted_B[:, None])[:, 0])


def verify_standard(
    target_probs_BSV: Tensor,
    draft_ids_BK: Tensor,
    lengths_B: Tensor,
    draft_probs_BKV: Tensor | None,
    accept_uniform_BK: Tensor,
    sample_noise_BV: Tensor,
) -> Verification:
    """Rejection sampling that leaves the verifier's distribution unchanged (Leviathan et al., arXiv 2211.17192).

    Draft x is kept when u < p(x) / q(x); at the first rejection the token is drawn from the normalised max(p - q, 0),
    after a full acceptance from p. `draft_probs_BKV` None means one-hot drafts: x is kept with probability p(x) and the
    residual is p without x. `accept_uniform_BK` is U[0, 1), `sample_noise_BV` Exp(1): a draw is argmax(weight / noise).
    The three sources of randomness (drafting, accepting, drawing) must be independent.
    """
    batch, num_drafts = draft_ids_BK.shape
    chosen_BK1 = draft_ids_BK.clamp(min=0)[:, :, None]
    p_BK = target_probs_BSV[:, :num_drafts].gather(2, chosen_BK1)[:, :, 0]
    q_BK = torch.ones_like(p_BK) if draft_probs_BKV is None else draft_probs_BKV.gather(2, chosen_BK1)[:, :, 0]
    slots_K = torch.arange(num_drafts, device=draft_ids_BK.device)
    kept_BK = (accept_uniform_BK * q_BK < p_BK) & (q_BK > 0) & (slots_K < lengths_B[:, None])
    accepted_B = kept_BK.long().cumprod(1).sum(1)

    rows_B = torch.arange(batch, device=draft_ids_BK.device)
    weight_BV = target_probs_BSV[rows_B, accepted_B].clone()
    rejected_B = accepted_B < lengths_B
    at_B = accepted_B.clamp(max=max(num_drafts - 1, 0))
    if num_drafts and draft_probs_BKV is None:
        refused_B = draft_ids_BK[rows_B, at_B].clamp(min=0)
        weight_BV[rows_B, refused_B] = torch.where(rejected_B, 0.0, weight_BV[rows_B, refused_B])
    elif draft_probs_BKV is not None and num_drafts:
        residual_BV = (weight_BV - draft_probs_BKV[rows_B, at_B]).clamp(min=0)
        weight_BV = torch.where(rejected_B[:, None], residual_BV, weight_BV)
    return _emit(draft_ids_BK, accepted_B, draw(weight_BV, sample_noise_BV))


def draw(weight_BV: Tensor, noise_BV: Tensor) -> Tensor:
    """One id a row with probability proportional to `weight_BV`, by an exponential race against Exp(1) noise.

    The division is done in float64, where the smallest float32 noise cannot make two weights overflow to a tie.
    """
    return (weight_BV.double() / noise_BV.double().clamp(min=1e-300)).argmax(-1)


def _emit(draft_ids_BK: Tensor, accepted_B: Tensor, last_B: Tensor) -> Verification:
    slots_S = torch.arange(draft_ids_BK.shape[1] + 1, device=draft_ids_BK.device)
    output_BS = torch.cat([draft_ids_BK, last_B[:, None]], 1)
    output_BS = torch.where(slots_S < accepted_B[:, None], output_BS, -1)
    output_BS[torch.arange(len(last_B), device=last_B.device), accepted_B] = last_B
    return Verification(accepted_B, output_BS)
