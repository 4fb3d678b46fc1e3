"""Training-time unrolling of an EAGLE-3 draft, whose first layer reads [embedding ; state]. Suffixes as in `unroll`."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn import functional as F

from speculators.models.eagle3.network import Eagle3FirstLayer, FusedDraftModel
from speculators.models.layers import DecoderLayer, linear
from speculators.models.unroll import Trunk, Unroll

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class TokenPart:
    """What tokens contribute to the first layer's queries, keys and values, computed once for all steps.

    That layer's input is [embedding ; state], so each projection is a sum of two, the first of which depends on the
    token alone. The norm's gain is folded into the weight: where the embeddings are frozen, no product with the weight
    is needed for a gradient by them; where they are trained, autograd takes it through the normed embeddings.
    """

    def __init__(self, model: FusedDraftModel, embeds_CH: Tensor) -> None:
        attention, width = model.first_layer.self_attn, model.first_layer.input_layernorm.weight.shape[0]
        weights = [getattr(attention, name).weight.split(width, 1)[1] for name in _PROJECTIONS]
        contributed = model.segment(partial(_contributions, model.first_layer), embeds_CH)
        self._state_weights = dict(zip(_PROJECTIONS, weights, strict=True))
        self._contributed = dict(zip(_PROJECTIONS, contributed, strict=True))

    def project(self, name: str, state: Tensor, tokens: Tensor | None) -> Tensor:
        """The projection `name` of states [R, H] beside the tokens at context positions `tokens` [R] (None: all)."""
        contributed = self._contributed[name]
        contributed = contributed if tokens is None else contributed.index_select(0, tokens)
        return contributed + linear(state, self._state_weights[name])


def _contributions(layer: Eagle3FirstLayer, embeds_CH: Tensor) -> list[Tensor]:
    """What the tokens add to each of `_PROJECTIONS`; a function of its own, see `Memory`."""
    norm = layer.input_layernorm
    normed, width = F.rms_norm(embeds_CH, norm.weight.shape, None, norm.eps), norm.weight.shape[0]
    projections = (getattr(layer.self_attn, name) for name in _PROJECTIONS)
    return [linear(normed, each.weight.split(width, 1)[0] * norm.weight, each.bias) for each in projections]


class Eagle3Trunk(Trunk):
    """The layers over one packed batch; tokens reach the first one through `TokenPart`."""

    def __init__(self, model: FusedDraftModel, inputs: Unroll) -> None:
        super().__init__(model, inputs)
        self.first_layer = model.first_layer
        self.tokens = TokenPart(model, model.embed(inputs.token_ids_C))

    def enter(self, layer: DecoderLayer, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What `project` reads, and the residual."""
        if layer is not self.first_layer:
            return super().enter(layer, hidden)
        state: Tensor = self.first_layer.hidden_norm(hidden)
        return state, state if self.first_layer.norm_before_residual else hidden

    def project(self, index: int, name: str, state: Tensor, tokens: Tensor | None) -> Tensor:
        """The projection `name` of layer `index` of states [R, H] beside the tokens at `tokens` [R] (None: all)."""
        return self.tokens.project(name, state, tokens) if index == 0 else super().project(index, name, state, tokens)
