"""Drafts of unequal lengths as one proposal."""

from collections.abc import Sequence

import torch

from speculators.models.draft_model import Proposal


def ragged_proposal(drafts: Sequence[Sequence[int]], num_tokens: int, device: torch.device) -> Proposal:
    """One-hot drafts, a list of at most `num_tokens` ids a row, as a Proposal [B, num_tokens] padded with 0."""
    padded = [[*draft, *[0] * (num_tokens - len(draft))] for draft in drafts]
    token_ids_BK = torch.tensor(padded, dtype=torch.int64, device=device).view(len(drafts), num_tokens)
    return Proposal(token_ids_BK, torch.tensor([len(draft) for draft in drafts], device=device))
