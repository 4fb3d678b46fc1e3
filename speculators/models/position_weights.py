"""How much each step, or each slot of a block, weighs in a training loss.

Shape suffixes: A blocks (one an anchor), K the steps of a draft or the slots of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def step_decay(num_steps: int, decay: float) -> Tensor:
    """decay^k of step k, float32 [K]: EAGLE-3's training-time test (arXiv 2503.01840)."""
    return torch.tensor(decay, dtype=torch.float32) ** torch.arange(num_steps)


def exponential_decay(num_slots: int, gamma: float, first: int = 0) -> Tensor:
    """exp(-(k - first) / gamma) of slot k, and 0 before slot `first`; float32 [K].

    DFlash (arXiv 2602.06036) has first = 1, its slot 0 being the anchor; DSpark (arXiv 2607.05147) has first = 0.
    """
    later_K = torch.arange(num_slots, dtype=torch.float32) - first
    return torch.exp(-later_K.clamp(min=0) / gamma) * (later_K >= 0)


def dpace(cross_entropy_AK: Tensor, mask_AK: Tensor, alpha: float = 0.5) -> Tensor:
    """D-PACE (arXiv 2605.18810): what the expected accepted length owes to each slot, float32 [A, K].

    Slot i is passed with probability c_i = (1 - alpha) exp(-cross_entropy_i) + alpha, and with 1 where `mask_AK` (bool)
    says that it does not count. Slot j weighs the sum of c_0 ... c_m over the slots m >= j that count, and 0 where it
    does not count itself. No gradient flows through the weights.
    """
    confidence_AK = (1 - alpha) * torch.exp(-cross_entropy_AK.detach().float()) + alpha
    reached_AK = confidence_AK.masked_fill(~mask_AK, 1.0).cumprod(-1) * mask_AK
    return reached_AK.flip(-1).cumsum(-1).flip(-1) * mask_AK
