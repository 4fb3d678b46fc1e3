"""Training-time unrolling of an EAGLE-3 draft, whose first layer reads [embedding ; state]. Suffixes as in `unroll`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.models.eagle3.network import Eagle3FirstLayer, FusedDraftModel
from speculators.models.layers import DecoderLayer, linear
from speculators.models.unroll import Trunk, Unroll


class TokenPart:
    """What tokens contribute to the first layer's queries, keys and values, computed once for all steps.

    That layer's input is [embedding ; state], so each projection is a sum of two, the first of which depends on the
    token alone. The norm's gain is folded into the weight: where the embeddings are frozen, no product with the weight
    is needed for a gradient by them; where they are trained, autograd takes it through the normed embeddings.
    """

    def __init__(self, layer: Eagle3FirstLayer, embeds_CH: Tensor) -> None:
        attention, norm = layer.self_attn, layer.input_layernorm
        normed = F.rms_norm(embeds_CH, norm.weight.shape, None, norm.eps)
        self._contributed, self._state_weights = {}, {}
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(attention, name)
            of_token, of_state = torch.split(projection.weight, norm.weight.shape[0], 1)
            self._contributed[name] = linear(normed, of_token * norm.weight, projection.bias)
            self._state_weights[name] = of_state

    def project(self, name: str, state: Tensor, tokens: Tensor | None) -> Tensor:
        """The projection `name` of states [R, H] beside the tokens at context positions `tokens` [R] (None: all)."""
        contributed = self._contributed[name]
        contributed = contributed if tokens is None else contributed.index_select(0, tokens)
        return contributed + linear(state, self._state_weights[name])


class Eagle3Trunk(Trunk):
    """The layers over one packed batch; tokens reach the first one through `TokenPart`."""

    def __init__(self, model: FusedDraftModel, inputs: Unroll) -> None:
        super().__init__(model, inputs)
        self.first_layer = model.first_layer
        self.tokens = TokenPart(model.first_layer, model.embed(inputs.token_ids_C))

    def enter(self, layer: DecoderLayer, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What `project` reads, and the residual."""
        if layer is not self.first_layer:
            return super().enter(layer, hidden)
        state: Tensor = self.first_layer.hidden_norm(hidden)
        return state, state if self.first_layer.norm_before_residual else hidden

    def project(self, index: int, name: str, state: Tensor, tokens: Tensor | None) -> Tensor:
        """The projection `name` of layer `index` of states [R, H] beside the tokens at `tokens` [R] (None: all)."""
        return self.tokens.project(name, state, tokens) if index == 0 else super().project(index, name, state, tokens)
