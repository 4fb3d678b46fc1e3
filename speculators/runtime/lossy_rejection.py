"""Verification rules that are *lossy*: they keep more drafts, and what comes out no longer follows the verifier's law.

Both are vLLM-Ascend's, off unless asked for. Shapes and shared arguments are those of `rejection`.
"""

import torch
from torch import Tensor

from speculators.runtime.rejection import (
    Verification,
    drafted,
    draw,
    emit,
    leading,
    next_weights,
    probabilities_of_drafts,
    shares,
)


def posterior_tolerance(logits_BKV: Tensor, threshold: float, alpha: float) -> Tensor:
    """How far a draft's ratio may fall below the coin's, float64 [B, K]: min(exp(-alpha H), threshold).

    H = -sum p log(p + 1e-10) is the entropy of softmax(logits) in nats, of logits before temperature and truncation
    (vLLM-Ascend's `enable_entropy_verify`).
    """
    probs_BKV = logits_BKV.float().softmax(-1)
    entropy_BK = -(probs_BKV * (probs_BKV + 1e-10).log()).sum(-1).double()
    return (-alpha * entropy_BK).exp().clamp(max=threshold)


def verify_entropy(
    target_probs_BSV: Tensor,
    draft_ids_BK: Tensor,
    lengths_B: Tensor,
    draft_probs_BKV: Tensor | None,
    accept_uniform_BK: Tensor,
    sample_noise_BV: Tensor,
    tolerance_BK: Tensor,
) -> Verification:
    """Lossy: keep draft x when t u < p(x) / q(x), with a tolerance t below 1 where the verifier is undecided.

    The token after the first rejection is drawn from max(p - q, 0). A tolerance of 1 everywhere is `verify_standard`.
    """
    drafted_BK = drafted(draft_ids_BK, lengths_B)
    p_BK, q_BK = probabilities_of_drafts(target_probs_BSV, draft_ids_BK, draft_probs_BKV)
    accepted_B = leading((tolerance_BK * accept_uniform_BK * q_BK < p_BK) & (q_BK > 0) & drafted_BK)
    weight_BV = next_weights(target_probs_BSV, draft_ids_BK, drafted_BK.sum(1), draft_probs_BKV, accepted_B)
    return emit(draft_ids_BK, accepted_B, draw(weight_BV, sample_noise_BV))


def verify_ascend_block(
    target_probs_BSV: Tensor,
    draft_ids_BK: Tensor,
    lengths_B: Tensor,
    draft_probs_BKV: Tensor | None,
    accept_uniform_BK: Tensor,
    sample_noise_BV: Tensor,
    tolerance_BK: Tensor | None = None,
) -> Verification:
    """Lossy: keep the drafts through the last i whose product of min(p/q, 1) exceeds the product of the first i coins.

    The token after them is drawn from max(P p - q, 0), P being that of `verify_block`, whose criterion is another one
    (vLLM-Ascend's `enable_block_verify`). A `tolerance_BK` multiplies the product of coins, as in `verify_entropy`.
    """
    drafted_BK = drafted(draft_ids_BK, lengths_B)
    p_BK, q_BK = probabilities_of_drafts(target_probs_BSV, draft_ids_BK, draft_probs_BKV)
    ratio_BK = torch.where(q_BK > 0, p_BK / q_BK, 0.0).clamp(max=1)
    coins_BK = accept_uniform_BK.double().cumprod(1)
    if tolerance_BK is not None:
        coins_BK = tolerance_BK * coins_BK
    passes_BK = (coins_BK < ratio_BK.cumprod(1)) & drafted_BK
    ends_K = torch.arange(1, draft_ids_BK.shape[1] + 1, device=draft_ids_BK.device)
    zeros_B1 = torch.zeros_like(draft_ids_BK[:, :0].sum(1, keepdim=True))
    accepted_B = torch.cat([zeros_B1, torch.where(passes_BK, ends_K, 0)], 1).amax(1)
    share_BS = shares(target_probs_BSV, draft_ids_BK, draft_probs_BKV)
    share_B = share_BS.gather(1, accepted_B[:, None])[:, 0]
    weight_BV = next_weights(target_probs_BSV, draft_ids_BK, drafted_BK.sum(1), draft_probs_BKV, accepted_B, share_B)
    return emit(draft_ids_BK, accepted_B, draw(weight_BV, sample_noise_BV))
