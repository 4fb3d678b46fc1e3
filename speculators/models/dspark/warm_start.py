"""A DSpark draft that starts from a DFlash draft instead of from nothing."""

from __future__ import annotations

import torch

from speculators.models.dspark.config import DSparkConfig
from speculators.models.dspark.model import DSparkModel
from speculators.models.speculator import Speculator
from speculators.models.warm_start import require_same_tensors


def from_dflash(dflash: Speculator, config: DSparkConfig, *, seed: int = 0) -> Speculator:
    """Return a DSpark draft with the backbone and the vocabulary map of a DFlash draft, bit for bit, and fresh heads.

    The fresh Markov head adds nothing, so that with `sample_from_anchor` false and the attention that the DFlash draft
    was trained with, it proposes what that draft does. Dtype and device are the DFlash draft's; nothing but what it
    borrows from its verifier is shared with it. `seed` draws the heads. UsageError where the two configurations
    disagree about what the tensors mean.
    """
    require_same_tensors(config, dflash.config)
    draft = DSparkModel(config)
    draft.reset_heads(torch.Generator().manual_seed(seed))
    given = {
        name: tensor if name in dflash.borrowed else tensor.detach().clone()
        for name, tensor in dflash.draft.state_dict().items()
        if not tensor.is_meta
    }
    fresh = {
        name: tensor.to(dflash.draft.device, dflash.draft.dtype)
        for name, tensor in draft.state_dict().items()
        if name.startswith(("markov_head.", "confidence_head."))
    }
    draft.load_state_dict(given | fresh, strict=False, assign=True)
    return Speculator(config, draft, borrowed=dflash.borrowed)
