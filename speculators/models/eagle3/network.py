"""What EAGLE-3 and its descendants compute alike: features, embeddings, layers and their cache.

Position p carries the verifier's features of token p and the embedding of token p+1, and predicts token p+2; its rotary
position is p. Shape suffixes as in `draft_model`.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.formats.verifier_weights import VerifierWeights
from speculators.formats.vocab import DraftVocab
from speculators.models.compiling import compilable
from speculators.models.decoder_draft import DecoderDraftModel
from speculators.models.draft_model import DraftContext
from speculators.models.eagle3.config import FusedDraftConfig
from speculators.models.layers import DecoderLayer, RMSNorm, RotaryTable, SkinnyLinear, linear
from speculators.models.proposing import aux_states


class Eagle3FirstLayer(DecoderLayer):
    """The layer that reads a token's embedding beside a state: attention sees both, the residual is the state."""

    def __init__(self, config: FusedDraftConfig) -> None:
        decoder = config.transformer_layer_config
        super().__init__(decoder, 0, 2 * decoder.hidden_size)
        self.hidden_norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def join(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and states, each [..., H] -> (attention input [..., 2H], residual [..., H])."""
        normed = self.hidden_norm(hidden)
        joined = torch.cat((self.input_layernorm(embeds), normed), -1)
        return joined, normed if self.norm_before_residual else hidden


class FusedDraftModel(DecoderDraftModel):
    """Decoder layers over embeddings and fused auxiliary states.

    Embeddings and head are the verifier's, frozen. Embeddings that are trained start as a copy of them; a draft of
    another width has embeddings and head of its own, both trained.
    """

    config: FusedDraftConfig
    # PyPI's `speculators` leaves these uninitialised where a file lacks them; vLLM shares them where they are equal.
    ships = frozenset({"embed_tokens.weight", "lm_head.weight"})

    def __init__(self, config: FusedDraftConfig) -> None:
        decoder = config.transformer_layer_config
        super().__init__(config, decoder)
        hidden = decoder.hidden_size
        num_aux, feature, eps = len(config.aux_layer_ids), config.verifier_hidden_size, decoder.rms_norm_eps
        self.fc = SkinnyLinear(config.num_features, hidden, bias=False)
        self.input_norm = RMSNorm(config.num_features, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(feature, eps) for _ in range(num_aux)) if config.fc_norm else None
        later = [DecoderLayer(decoder, index) for index in range(1, decoder.num_hidden_layers)]
        self.layers = nn.ModuleList([Eagle3FirstLayer(config), *later])
        self.norm = RMSNorm(hidden, eps)
        own, trained = config.has_own_width, config.embed_requires_grad
        self.add_vocabulary(config.draft_vocab_size, own=own, trained_embeddings=trained)
        self.rotary = RotaryTable(decoder)

    def start_from_verifier(self, weights: VerifierWeights, vocab: DraftVocab) -> None:
        """Give trained embeddings a float32 copy of the verifier's, which they shared until now."""
        if self.config.embed_requires_grad and not self.config.has_own_width:
            copied = weights.embed_tokens.to(self.device, torch.float32, copy=True)
            self.embed_tokens.weight = nn.Parameter(copied)

    @compilable
    def combine(self, aux_hidden_states: Tensor) -> Tensor:
        """Aux states [..., A*H] -> the draft's first state [..., H]: the norms the config asks for, then `fc`.

        While training, the norms' gains are folded into the weight: features need no gradient, and so its product with
        the weight is spared.
        """
        states = aux_hidden_states.to(self.fc.weight.dtype)
        norms = self.feature_norms()
        if not norms:
            out: Tensor = self.fc(states)
        elif torch.is_grad_enabled():
            parts = states.chunk(len(norms), -1)
            normed = [F.rms_norm(part, part.shape[-1:], None, norms[0].eps) for part in parts]
            gain = torch.cat([norm.weight for norm in norms])
            out = linear(torch.cat(normed, -1) if len(normed) > 1 else normed[0], self.fc.weight * gain)
        else:
            parts = states.chunk(len(norms), -1)
            out = self.fc(torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], -1))
        return out

    def feature_norms(self) -> list[RMSNorm]:
        """The norms before `fc`: one over all features, one a layer, or none."""
        if self.fc_norm is not None:
            return cast(list[RMSNorm], list(self.fc_norm))
        return [] if self.input_norm is None else [self.input_norm]

    def enter(self, context: DraftContext) -> tuple[Tensor, Tensor]:
        """Embeddings and first states [B, T, H] of newly verified positions."""
        return self.embed(context.token_ids_BT), self.combine(aux_states(context, self))

    @property
    def first_layer(self) -> Eagle3FirstLayer:
        """The layer that reads token embeddings."""
        return cast(Eagle3FirstLayer, self.layers[0])
