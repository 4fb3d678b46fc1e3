"""The recurrence of MLPSpeculator for one position, from tensors by their checkpoint names."""

from collections.abc import Mapping

import torch
from torch import Tensor

from speculators.models.mlp_speculator.config import MlpSpeculatorConfig


def logits_of(config: MlpSpeculatorConfig, w: Mapping[str, Tensor], state: Tensor, tokens: list[int]) -> list[Tensor]:
    """Logits [V] of the steps that `tokens` reach: token i is given to step i."""
    n, inner, found = config.n_predict, config.inner_dim or config.emb_dim, []
    state_weight = 0.5 ** (0.5 / n)
    emb_weight = ((1 - state_weight**2) * (inner / 2)) ** 0.5
    if config.scale_input:
        state = state / (state.pow(2).mean() + 1e-6).sqrt() / 2**0.5
    for i, token in enumerate(tokens):
        one = 0 if config.tie_weights else i
        proj = min(i, 1) if config.tie_weights else i
        state = w[f"proj.{proj}.weight"] @ state + emb_weight / state_weight * w[f"emb.{one}.weight"][token]
        state = state / (state.pow(2).mean() + 1e-6).sqrt() * w[f"ln.{one}.weight"] + w[f"ln.{one}.bias"]
        state = 0.5 * state * (1 + torch.erf(state / 2**0.5))
        found.append(w[f"head.{one}.weight"] @ state)
    return found
