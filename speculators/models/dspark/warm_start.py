"""A DSpark draft that starts from a DFlash draft instead of from nothing."""

from __future__ import annotations

from typing import Any

import torch

from speculators.errors import UsageError
from speculators.models.dflash.config import BlockDraftConfig, DFlashConfig
from speculators.models.dspark.config import DSparkConfig
from speculators.models.dspark.model import DSparkModel
from speculators.models.speculator import Speculator

# What the backbone's tensors mean; how far attention reaches and what the slots predict may change.
_SAME_KEYS = ("aux_hidden_state_layer_ids", "draft_vocab_size", "mask_token_id", "target_hidden_size")
_SAME_LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "rope_parameters", "attention_bias",
)  # fmt: skip


def from_dflash(dflash: Speculator, config: DSparkConfig, *, seed: int = 0) -> Speculator:
    """Return a DSpark draft with the backbone and the vocabulary map of a DFlash draft, bit for bit, and fresh heads.

    The fresh Markov head adds nothing, so that with `sample_from_anchor` false and the attention that the DFlash draft
    was trained with, it proposes what that draft does. Dtype and device are the DFlash draft's; nothing but what it
    borrows from its verifier is shared with it. `seed` draws the heads. UsageError where the two configurations
    disagree about what the tensors mean.
    """
    _require_same_backbone(dflash, config)
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


def _require_same_backbone(dflash: Speculator, config: DSparkConfig) -> None:
    given = dflash.config
    if not isinstance(given, DFlashConfig):
        raise UsageError(f"a {given.speculators_model_type!r} draft; a DSpark draft starts from one of family 'dflash'")
    theirs, ours = _meaning(given), _meaning(config)
    different = [f"{key} is {ours[key]!r}, that draft's {theirs[key]!r}" for key in ours if ours[key] != theirs[key]]
    if different:
        raise UsageError(f"a DSpark draft started from DFlash takes over its backbone; {'; '.join(different)}")


def _meaning(config: BlockDraftConfig) -> dict[str, Any]:
    layer = config.transformer_layer_config
    return {key: getattr(config, key) for key in _SAME_KEYS} | {key: getattr(layer, key) for key in _SAME_LAYER_KEYS}
