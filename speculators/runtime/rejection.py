"""Verification of drafted tokens: which are kept, and which token follows them.

The readable reference. Shapes: B rows, K drafted tokens at most (row b drafted lengths_B[b]), S = K + 1 positions, V
verifier vocabulary. Every rule emits the accepted prefix of the drafts and one more token of the verifier's.

Of the arguments that rules share, `target_probs_BSV` are what the verifier samples from at each position,
`draft_ids_BK` int64 the drafts (a negative id ends its row there), `lengths_B` int64 how many of them there are, and
`draft_probs_BKV` the law that each was drawn from, or None where all are one-hot. `accept_uniform_BK` is U[0, 1) in
float64, `sample_noise_BV` Exp(1): a draw is argmax(weight / noise). The three sources of randomness (drafting,
accepting, drawing) must be independent, and where a row's drafts end must not depend on tokens beyond its end.
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

    `target_ids_BS` [B, K+1] int64 is the argmax at each position.
    """
    matches_BK = (draft_ids_BK == target_ids_BS[:, :-1]) & drafted(draft_ids_BK, lengths_B)
    accepted_B = leading(matches_BK)
    return emit(draft_ids_BK, accepted_B, target_ids_BS.gather(1, accepted_B[:, None])[:, 0])


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
    after a full acceptance from p. A one-hot draft x is kept with probability p(x), and its residual is p without x.
    """
    drafted_BK = drafted(draft_ids_BK, lengths_B)
    p_BK, q_BK = probabilities_of_drafts(target_probs_BSV, draft_ids_BK, draft_probs_BKV)
    accepted_B = leading((accept_uniform_BK * q_BK < p_BK) & (q_BK > 0) & drafted_BK)
    weight_BV = next_weights(target_probs_BSV, draft_ids_BK, drafted_BK.sum(1), draft_probs_BKV, accepted_B)
    return emit(draft_ids_BK, accepted_B, draw(weight_BV, sample_noise_BV))


def verify_block(
    target_probs_BSV: Tensor,
    draft_ids_BK: Tensor,
    lengths_B: Tensor,
    draft_probs_BKV: Tensor | None,
    accept_uniform_BK: Tensor,
    sample_noise_BV: Tensor,
) -> Verification:
    """Rejection sampling of the drafts as a whole: lossless, and in the mean never shorter than `verify_standard`.

    With P_0 = 1 and P_i = min(P_{i-1} p(x_i) / q(x_i), 1), the first i drafts pass when u_i < h_i, where h_i = R_i /
    (R_i + 1 - P_i), R_i is the mass of max(P_i p - q, 0) one position further, and h = P after the row's last draft.
    The longest prefix that passes is kept, whether or not shorter ones do; where drafts remain, the token after it is
    drawn from that residual, normalised (Sun et al., arXiv 2403.10444).
    """
    drafted_BK = drafted(draft_ids_BK, lengths_B)
    drafted_B = drafted_BK.sum(1)
    share_BS = shares(target_probs_BSV, draft_ids_BK, draft_probs_BKV)
    accepted_B = torch.zeros_like(drafted_B)
    for slot in range(draft_ids_BK.shape[1]):
        share_B = share_BS[:, slot + 1]
        threshold_B = share_B
        if slot + 1 < draft_ids_BK.shape[1]:
            mass_B = _residual_mass(target_probs_BSV, draft_ids_BK, draft_probs_BKV, slot + 1, share_B)
            missing_B = mass_B + 1 - share_B
            going_on_B = torch.where(missing_B > 0, mass_B / missing_B, 1.0)
            threshold_B = torch.where(slot + 1 < drafted_B, going_on_B, share_B)
        passes_B = (accept_uniform_BK[:, slot] < threshold_B) & drafted_BK[:, slot]
        accepted_B = torch.where(passes_B, slot + 1, accepted_B)
    kept_share_B = share_BS.gather(1, accepted_B[:, None])[:, 0]
    weight_BV = next_weights(target_probs_BSV, draft_ids_BK, drafted_B, draft_probs_BKV, accepted_B, kept_share_B)
    return emit(draft_ids_BK, accepted_B, draw(weight_BV, sample_noise_BV))


def verify_synthetic(
    target_probs_BSV: Tensor,
    draft_ids_BK: Tensor,
    lengths_B: Tensor,
    draft_probs_BKV: Tensor | None,
    accept_uniform_BK: Tensor,
    sample_noise_BV: Tensor,
    rates_K: Tensor,
) -> Verification:
    """Keep drafts by coin alone, draft i with probability `rates_K[i]` where those before it were: for measuring speed.

    What is emitted is meaningless. `rates_K` is float64, of K values or more. After the last kept draft comes a token
    drawn as in `verify_standard`.
    """
    drafted_BK = drafted(draft_ids_BK, lengths_B)
    accepted_B = leading((accept_uniform_BK < rates_K[: draft_ids_BK.shape[1]]) & drafted_BK)
    weight_BV = next_weights(target_probs_BSV, draft_ids_BK, drafted_BK.sum(1), draft_probs_BKV, accepted_B)
    return emit(draft_ids_BK, accepted_B, draw(weight_BV, sample_noise_BV))


def verify_synthetic_greedy(
    target_ids_BS: Tensor, draft_ids_BK: Tensor, lengths_B: Tensor, accept_uniform_BK: Tensor, rates_K: Tensor
) -> Verification:
    """Keep drafts by coin alone as `verify_synthetic` does, then emit the verifier's argmax `target_ids_BS` (int64)."""
    tossed_BK = (accept_uniform_BK < rates_K[: draft_ids_BK.shape[1]]) & drafted(draft_ids_BK, lengths_B)
    accepted_B = leading(tossed_BK)
    return emit(draft_ids_BK, accepted_B, target_ids_BS.gather(1, accepted_B[:, None])[:, 0])


def drafted(draft_ids_BK: Tensor, lengths_B: Tensor) -> Tensor:
    """Which slots hold a draft, bool [B, K]: those within the row's length and before its first negative id."""
    slots_K = torch.arange(draft_ids_BK.shape[1], device=draft_ids_BK.device)
    return ((draft_ids_BK >= 0) & (slots_K < lengths_B[:, None])).long().cumprod(1).bool()


def leading(kept_BK: Tensor) -> Tensor:
    """How many slots from the first on are true, int64 [B]."""
    return kept_BK.long().cumprod(1).sum(1)


def probabilities_of_drafts(
    target_probs_BSV: Tensor, draft_ids_BK: Tensor, draft_probs_BKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What verifier and draft give each drafted token, float64 [B, K]; one-hot drafts give theirs 1."""
    chosen_BK1 = draft_ids_BK.clamp(min=0)[:, :, None]
    p_BK = target_probs_BSV[:, :-1].gather(2, chosen_BK1)[:, :, 0].double()
    if draft_probs_BKV is None:
        return p_BK, torch.ones_like(p_BK)
    return p_BK, draft_probs_BKV.gather(2, chosen_BK1)[:, :, 0].double()


def shares(target_probs_BSV: Tensor, draft_ids_BK: Tensor, draft_probs_BKV: Tensor | None) -> Tensor:
    """P_0 .. P_K of block verification, float64 [B, K+1]: P_i = min(P_{i-1} p(x_i) / q(x_i), 1)."""
    p_BK, q_BK = probabilities_of_drafts(target_probs_BSV, draft_ids_BK, draft_probs_BKV)
    ratio_BK = torch.where(q_BK > 0, p_BK / q_BK, 0.0)
    share_BS = p_BK.new_ones(p_BK.shape[0], p_BK.shape[1] + 1)
    for slot in range(p_BK.shape[1]):
        share_BS[:, slot + 1] = (share_BS[:, slot] * ratio_BK[:, slot]).clamp(max=1)
    return share_BS


def _residual_mass(
    target_probs_BSV: Tensor, draft_ids_BK: Tensor, draft_probs_BKV: Tensor | None, slot: int, share_B: Tensor
) -> Tensor:
    """Mass of max(share * p - q, 0) at one slot, float64 [B]."""
    target_BV = target_probs_BSV[:, slot].double()
    if draft_probs_BKV is None:
        chosen_B = target_BV.gather(1, draft_ids_BK[:, slot, None].clamp(min=0))[:, 0]
        return share_B * (1 - chosen_B).clamp(min=0)
    return (share_B[:, None] * target_BV - draft_probs_BKV[:, slot].double()).clamp(min=0).sum(1)


def next_weights(
    target_probs_BSV: Tensor,
    draft_ids_BK: Tensor,
    drafted_B: Tensor,
    draft_probs_BKV: Tensor | None,
    accepted_B: Tensor,
    share_B: Tensor | None = None,
) -> Tensor:
    """What the token after the accepted drafts is drawn by, float64 [B, V], not normalised.

    p where no draft remains (`accepted_B` = `drafted_B`), else max(share * p - q, 0), with a share of 1 where none is
    given. Where rounding alone has rejected, nothing is left of that; there, too, it is p.
    """
    rows_B = torch.arange(len(accepted_B), device=accepted_B.device)
    plain_BV = target_probs_BSV[rows_B, accepted_B].double()
    if draft_ids_BK.shape[1] == 0:
        return plain_BV
    at_B = accepted_B.clamp(max=draft_ids_BK.shape[1] - 1)
    if draft_probs_BKV is None:
        # Within one row a share is a factor of every weight.
        residual_BV = plain_BV.scatter(1, draft_ids_BK[rows_B, at_B].clamp(min=0)[:, None], 0.0)
    else:
        scaled_BV = plain_BV if share_B is None else share_B[:, None] * plain_BV
        residual_BV = (scaled_BV - draft_probs_BKV[rows_B, at_B].double()).clamp(min=0)
    rejected_B = (accepted_B < drafted_B) & (residual_BV > 0).any(1)
    return torch.where(rejected_B[:, None], residual_BV, plain_BV)


def draw(weight_BV: Tensor, noise_BV: Tensor) -> Tensor:
    """One id a row with probability proportional to `weight_BV`, by an exponential race against Exp(1) noise.

    The division is done in float64, where the smallest float32 noise cannot make two weights overflow to a tie.
    """
    return (weight_BV.double() / noise_BV.double().clamp(min=1e-300)).argmax(-1)


def emit(draft_ids_BK: Tensor, accepted_B: Tensor, last_B: Tensor) -> Verification:
    """The accepted drafts and the token `last_B` after them."""
    slots_S = torch.arange(draft_ids_BK.shape[1] + 1, device=draft_ids_BK.device)
    output_BS = torch.cat([draft_ids_BK, last_B[:, None]], 1)
    output_BS = torch.where(slots_S < accepted_B[:, None], output_BS, -1)
    return Verification(accepted_B, output_BS.scatter(1, accepted_B[:, None], last_B[:, None]))
