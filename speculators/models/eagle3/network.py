"""What EAGLE-3 and its descendants compute alike: features, embeddings, layers and their cache.

Position p carries the verifier's features of token p and the embedding of token p+1, and predicts token p+2; its rotary
position is p. Shape suffixes as in `draft_model`; S positions of a row whose output is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.errors import SpeculatorsError
from speculators.formats.verifier_weights import VerifierWeights
from speculators.formats.vocab import DraftVocab
from speculators.models.cache import SlotCache, SlotWrite, slot_attention
from speculators.models.draft_model import DraftContext, DraftModel
from speculators.models.eagle3.config import FusedDraftConfig
from speculators.models.layers import DecoderLayer, RMSNorm, RotaryTable, SkinnyLinear


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


class FusedDraftModel(DraftModel):
    """Decoder layers over embeddings and fused auxiliary states.

    Embeddings and head are the verifier's, frozen. Embeddings that are trained start as a copy of them; a draft of
    another width has embeddings and head of its own, both trained.
    """

    config: FusedDraftConfig
    # PyPI's `speculators` leaves these uninitialised where a file lacks them; vLLM shares them where they are equal.
    ships = frozenset({"embed_tokens.weight", "lm_head.weight"})

    def __init__(self, config: FusedDraftConfig) -> None:
        super().__init__(config)
        decoder = config.transformer_layer_config
        hidden, vocab, draft_vocab = decoder.hidden_size, decoder.vocab_size, config.draft_vocab_size
        num_aux, feature, eps = len(config.aux_layer_ids), config.verifier_hidden_size, decoder.rms_norm_eps
        self.fc = SkinnyLinear(config.num_features, hidden, bias=False)
        self.input_norm = RMSNorm(config.num_features, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(feature, eps) for _ in range(num_aux)) if config.fc_norm else None
        later = [DecoderLayer(decoder, index) for index in range(1, decoder.num_hidden_layers)]
        self.layers: nn.ModuleList = nn.ModuleList([Eagle3FirstLayer(config), *later])
        self.norm = RMSNorm(hidden, eps)
        # Without storage until a checkpoint or the verifier gives them their values.
        own, trained = config.has_own_width, config.embed_requires_grad
        self.embed_tokens = nn.Embedding(vocab, hidden, device=None if own and trained else "meta")
        self.embed_tokens.requires_grad_(trained)
        self.lm_head = SkinnyLinear(hidden, draft_vocab, bias=False, device=None if own else "meta")
        self.lm_head.requires_grad_(own)
        self.d2t: Tensor | None
        self.t2d: Tensor | None
        reduced = draft_vocab < vocab
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64) if reduced else None)
        self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool) if reduced else None)
        self.rotary = RotaryTable(decoder)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every trained matrix from N(0, initializer_range²); norms start at 1, biases at 0."""
        deviation = self.config.transformer_layer_config.initializer_range
        for name, parameter in self.named_parameters():
            if parameter.is_meta or not parameter.requires_grad:
                continue
            with torch.no_grad():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, deviation, generator=generator)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def start_from_verifier(self, weights: VerifierWeights, vocab: DraftVocab) -> None:
        """Give trained embeddings a float32 copy of the verifier's, which they shared until now."""
        if self.config.embed_requires_grad and not self.config.has_own_width:
            copied = weights.embed_tokens.to(self.device, torch.float32, copy=True)
            self.embed_tokens.weight = nn.Parameter(copied)

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
            out = F.linear(torch.cat(normed, -1) if len(normed) > 1 else normed[0], self.fc.weight * gain)
        else:
            parts = states.chunk(len(norms), -1)
            out = self.fc(torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], -1))
        return out

    def feature_norms(self) -> list[RMSNorm]:
        """The norms before `fc`: one over all features, one a layer, or none."""
        if self.fc_norm is not None:
            return cast(list[RMSNorm], list(self.fc_norm))
        return [] if self.input_norm is None else [self.input_norm]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Verifier ids of any shape -> embeddings [..., H]; the shared table may have the verifier's dtype."""
        embeds: Tensor = self.embed_tokens(token_ids)
        return embeds.to(self.fc.weight.dtype)

    def enter(self, context: DraftContext) -> tuple[Tensor, Tensor]:
        """Embeddings and first states [B, T, H] of newly verified positions.

        SpeculatorsError where the verifier's states are missing.
        """
        if context.aux_hidden_states_BTX is None:
            raise SpeculatorsError(f"this draft reads the verifier's states {self.aux_layer_ids}; none were given")
        return self.embed(context.token_ids_BT), self.combine(context.aux_hidden_states_BTX)

    def verifier_ids(self, draft_ids: Tensor) -> Tensor:
        """int64 ids of the draft vocabulary -> the verifier's."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def make_cache(self, num_slots: int) -> SlotCache:
        """An empty cache of this model's keys and values for `num_slots` requests."""
        return SlotCache(len(self.layers), num_slots, dtype=self.dtype, device=self.device)

    def extend(
        self,
        embeds_BTH: Tensor,
        hidden_BTH: Tensor,
        cache: SlotCache,
        write: SlotWrite,
        wanted: Sequence[Sequence[int]] | None,
    ) -> Tensor:
        """Run the layers over new positions; return the last one's output [B, S, H] at each row's indices `wanted`.

        Of the last layer, only keys and values are made for the other positions; with `wanted` None, for all.
        """
        cos, sin = self.rotary.at(write.positions_BT, write.end, hidden_BTH.dtype)
        for index, layer in enumerate(self.blocks()):
            attention = layer.self_attn
            if index == 0:
                inputs, residual = self.first_layer.join(embeds_BTH, hidden_BTH)
            else:
                inputs, residual = layer.prepare(hidden_BTH)
            keys, values = attention.key_value(inputs, cos, sin)
            keys, values = cache.write(index, write, keys.transpose(1, 2), values.transpose(1, 2))
            if index == len(self.layers) - 1:
                if wanted is None:
                    break
                if write.width > 1:
                    rows = torch.arange(len(wanted), device=inputs.device)[:, None]
                    at = torch.tensor(wanted, device=inputs.device)
                    inputs, residual, cos, sin = inputs[rows, at], residual[rows, at], cos[rows, at], sin[rows, at]
                    starts = [start + places[0] for start, places in zip(write.starts, wanted, strict=True)]
                    write = SlotWrite(write.rows, starts, at.shape[1], write.end, write.positions_BT[rows, at])
            q_BQTD = attention.query(inputs, cos, sin).transpose(1, 2)
            attended = slot_attention(q_BQTD, keys, values, write.mask(attention.window), attention.scale)
            hidden_BTH = layer.finish(residual, attended.transpose(1, 2))
        return hidden_BTH

    def blocks(self) -> list[DecoderLayer]:
        """The decoder layers, in order."""
        return cast(list[DecoderLayer], list(self.layers))

    @property
    def first_layer(self) -> Eagle3FirstLayer:
        """The layer that reads token embeddings."""
        return cast(Eagle3FirstLayer, self.layers[0])
