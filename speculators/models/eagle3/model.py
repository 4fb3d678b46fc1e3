"""The EAGLE-3 network: packed unrolling for training, incremental drafting for serving.

Position p carries the verifier's features of token p and the embedding of token p+1, and predicts token p+2; its rotary
position is p. Shape suffixes as in `draft_model`; C context positions of a packed batch, R of them active at a step.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.errors import SpeculatorsError
from speculators.models.cache import SlotCache, SlotWrite, slot_attention
from speculators.models.draft_model import DraftContext, DraftModel, DraftSampler, Proposal
from speculators.models.eagle3.config import Eagle3Config
from speculators.models.eagle3.unroll import Trunk, Unroll
from speculators.models.layers import DecoderLayer, RMSNorm, RotaryTable, SkinnyLinear


class Eagle3FirstLayer(DecoderLayer):
    """The layer that reads a token's embedding beside a state: attention sees both, the residual is the state."""

    def __init__(self, config: Eagle3Config) -> None:
        decoder = config.transformer_layer_config
        super().__init__(decoder, 0, 2 * decoder.hidden_size)
        self.hidden_norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def join(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and states, each [..., H] -> (attention input [..., 2H], residual [..., H])."""
        normed = self.hidden_norm(hidden)
        joined = torch.cat((self.input_layernorm(embeds), normed), -1)
        return joined, normed if self.norm_before_residual else hidden


class Eagle3Model(DraftModel):
    """An EAGLE-3 draft; frozen embeddings and head are the verifier's."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        decoder = config.transformer_layer_config
        hidden, vocab = decoder.hidden_size, decoder.vocab_size
        num_aux = len(config.aux_layer_ids)
        feature = config.target_hidden_size or hidden
        self.fc = SkinnyLinear(num_aux * feature, hidden, bias=False)
        self.input_norm = RMSNorm(num_aux * feature, decoder.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(feature, decoder.rms_norm_eps) for _ in range(num_aux)) if config.fc_norm else None
        )
        later = [DecoderLayer(decoder, index) for index in range(1, decoder.num_hidden_layers)]
        self.layers: nn.ModuleList = nn.ModuleList([Eagle3FirstLayer(config), *later])
        self.norm = RMSNorm(hidden, decoder.rms_norm_eps)
        draft_vocab = config.draft_vocab_size or vocab
        # Without storage until a checkpoint or the verifier gives them their values.
        self.embed_tokens = nn.Embedding(vocab, hidden, device="meta").requires_grad_(config.embed_requires_grad)
        self.lm_head = SkinnyLinear(hidden, draft_vocab, bias=False, device="meta").requires_grad_(False)
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

    def forward(self, inputs: Unroll) -> list[Tensor]:
        """Unroll over packed documents and return, per step, the states [R, H] that `lm_head` reads.

        Keys and values of step 0 are made for every context position, queries and all that follows for active ones.
        """
        trunk = Trunk(self, inputs)
        hidden, steps = trunk.first(self.combine(inputs.features_CX)), []
        for step in range(len(inputs.slots)):
            if step:
                hidden = trunk.later(hidden, step)
            normed: Tensor = self.norm(hidden)
            steps.append(normed)
            if self.config.norm_output:
                hidden = normed
        return steps

    def make_cache(self, num_slots: int) -> SlotCache:
        """An empty cache of this model's keys and values for `num_slots` requests."""
        return SlotCache(len(self.layers), num_slots, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def propose(self, context: DraftContext, num_tokens: int, sampler: DraftSampler) -> Proposal:
        """Bring the cache in step with the verified tokens and draft `num_tokens` more, one after another."""
        if context.aux_hidden_states_BTX is None:
            raise SpeculatorsError(f"this draft reads the verifier's states {self.aux_layer_ids}; none were given")
        rows, token_ids = len(context.starts), context.token_ids_BT
        hidden = self.combine(context.aux_hidden_states_BTX)
        write = SlotWrite.at(context.rows, context.starts, token_ids.shape[1], token_ids.device)
        last = [max(length, 1) - 1 for length in context.lengths] if num_tokens else None
        hidden = self._extend(self.embed(token_ids), hidden, context.cache, write, last)
        starts = [start + length for start, length in zip(context.starts, context.lengths, strict=True)]
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(num_tokens):
            if step:
                write = SlotWrite.at(context.rows, starts, 1, token_ids.device)
                hidden = self._extend(self.embed(drafts[-1]), hidden, context.cache, write, [0] * rows)
                starts = [start + 1 for start in starts]
            normed = self.norm(hidden)
            ids, probs_BD = sampler(self.lm_head(normed).squeeze(1), step)
            hidden = normed if self.config.norm_output else hidden
            drafts.append((ids if self.d2t is None else ids + self.d2t[ids])[:, None])
            probs.extend([] if probs_BD is None else [probs_BD])
        taking_part = [num_tokens if length else 0 for length in context.lengths]
        return Proposal(
            torch.cat(drafts, 1) if drafts else token_ids.new_empty(rows, 0),
            torch.tensor(taking_part, device=token_ids.device),
            torch.stack(probs, 1) if probs else None,
        )

    def _extend(
        self, embeds_BTH: Tensor, hidden_BTH: Tensor, cache: SlotCache, write: SlotWrite, last: list[int] | None
    ) -> Tensor:
        """Run the layers over new positions; return the last layer's output [B, 1, H] at index `last` of each row.

        Of the last layer, only keys and values are made for the other positions; with `last` None, for all.
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
                if last is None:
                    break
                if write.width > 1:
                    rows = torch.arange(len(last), device=inputs.device)[:, None]
                    at = torch.tensor(last, device=inputs.device)[:, None]
                    inputs, residual, cos, sin = inputs[rows, at], residual[rows, at], cos[rows, at], sin[rows, at]
                    ends = [start + offset for start, offset in zip(write.starts, last, strict=True)]
                    write = SlotWrite(write.rows, ends, 1, write.end, write.positions_BT[rows, at])
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
