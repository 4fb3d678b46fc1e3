"""The EAGLE network: packed unrolling for training, incremental drafting for serving.

Position p carries the verifier's state of token p after its final norm and the embedding of token p+1. The output there
stands for the verifier's state of token p+1: its head turns it into the prediction of token p+2, and position p+1 takes
it where the verifier's own is not known yet. The rotary position is p. Shape suffixes as in `draft_model`; C context
positions of a packed batch, R of them active at a step.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from speculators.formats.decoder import DecoderConfig
from speculators.models.cache import SlotCache, SlotWrite, attend
from speculators.models.draft_model import DraftContext, DraftModel, DraftSampler, Proposal
from speculators.models.eagle.config import EagleConfig
from speculators.models.eagle.unroll import Trunk, Unroll
from speculators.models.layers import DecoderLayer, RMSNorm, RotaryTable, SkinnyLinear
from speculators.models.proposing import normed_states, proposal_of


class EagleLayer(DecoderLayer):
    """A llama layer whose attention has biases but for its output; layer 0 has no norm on its input."""

    def __init__(self, decoder: DecoderConfig, index: int) -> None:
        super().__init__(decoder, index)
        self.normed = index > 0
        if not self.normed:
            del self.input_layernorm
        queries = self.self_attn.o_proj.in_features
        self.self_attn.o_proj = SkinnyLinear(queries, decoder.hidden_size, bias=False)

    def prepare(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H] -> (attention input, residual)."""
        return (self.input_layernorm(hidden) if self.normed else hidden), hidden


class EagleModel(DraftModel):
    """An EAGLE draft; embeddings and head are the verifier's, frozen, and the head is never stored."""

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        decoder, hidden = config.decoder(), config.hidden_size
        self.embed_layernorm = RMSNorm(hidden, config.rms_norm_eps) if config.embed_layernorm else None
        self.fc = SkinnyLinear(2 * hidden, hidden, bias=config.bias)
        self.layers = nn.ModuleList(EagleLayer(decoder, index) for index in range(config.num_hidden_layers))
        self.post_embedding_layernorm = (
            RMSNorm(hidden, config.rms_norm_eps) if config.post_embedding_layernorm else None
        )
        # Without storage until a checkpoint or the verifier gives them their values.
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden, device="meta").requires_grad_(False)
        self.lm_head = SkinnyLinear(hidden, config.vocab_size, bias=False, device="meta").requires_grad_(False)
        self.rotary = RotaryTable(decoder)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every trained matrix from N(0, initializer_range²); norms start at 1, biases at 0."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.is_meta or not parameter.requires_grad:
                    continue
                if parameter.dim() > 1:
                    parameter.normal_(0.0, self.config.initializer_range, generator=generator)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def fuse(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Verifier ids [...] and states [..., H] -> the first layer's input [..., H]."""
        embeds = self.embed_tokens(token_ids).to(self.fc.weight.dtype)
        if self.embed_layernorm is not None:
            embeds = self.embed_layernorm(embeds)
        out: Tensor = self.fc(torch.cat((embeds, hidden.to(self.fc.weight.dtype)), -1))
        return out

    def output(self, hidden: Tensor) -> Tensor:
        """The last layer's output [..., H] -> what the verifier's head reads and the next position takes."""
        return hidden if self.post_embedding_layernorm is None else self.post_embedding_layernorm(hidden)

    def blocks(self) -> list[EagleLayer]:
        """The decoder layers, in order."""
        return cast(list[EagleLayer], list(self.layers))

    def forward(self, inputs: Unroll) -> list[Tensor]:
        """Unroll over packed documents and return, per step, the states [R, H] that the verifier's head reads.

        What a step hands to the next is detached, as in HASS: each step learns to continue the states it is given.
        """
        trunk = Trunk(self, inputs)
        hidden = self.output(trunk.first(inputs.features_CH))
        steps = [hidden]
        for step in range(1, len(inputs.slots)):
            hidden = self.output(trunk.later(hidden.detach(), step))
            steps.append(hidden)
        return steps

    def make_cache(self, num_slots: int) -> SlotCache:
        """An empty cache of this model's keys and values for `num_slots` requests."""
        return SlotCache(len(self.layers), num_slots, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def propose(self, context: DraftContext, num_tokens: int, sampler: DraftSampler) -> Proposal:
        """Bring the cache in step with the verified tokens and draft `num_tokens` more, one after another."""
        token_ids, rows = context.token_ids_BT, len(context.starts)
        write = SlotWrite.at(context.rows, context.starts, token_ids.shape[1], token_ids.device)
        last = [max(length, 1) - 1 for length in context.lengths] if num_tokens else None
        hidden = self._extend(self.fuse(token_ids, normed_states(context)), context.cache, write, last)
        starts = [start + length for start, length in zip(context.starts, context.lengths, strict=True)]
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(num_tokens):
            if step:
                write = SlotWrite.at(context.rows, starts, 1, token_ids.device)
                hidden = self._extend(self.fuse(drafts[-1][:, None], hidden), context.cache, write, [0] * rows)
                starts = [start + 1 for start in starts]
            ids, probs_BD = sampler(self.lm_head(hidden).squeeze(1), step)
            drafts.append(ids)
            probs.extend([] if probs_BD is None else [probs_BD])
        return proposal_of(context, drafts, probs)

    def _extend(self, hidden_BTH: Tensor, cache: SlotCache, write: SlotWrite, last: list[int] | None) -> Tensor:
        """Run the layers over new positions; return the draft's output [B, 1, H] at index `last` of each row.

        Of the last layer, only keys and values are made for the other positions; with `last` None, for all.
        """
        cos, sin = self.rotary.at(write.positions_BT, write.end, hidden_BTH.dtype)
        for index, layer in enumerate(self.blocks()):
            attention = layer.self_attn
            inputs, residual = layer.prepare(hidden_BTH)
            keys, values = attention.key_value(inputs, cos, sin)
            keys, values = cache.write(index, write, keys.transpose(1, 2), values.transpose(1, 2))
            if index == len(self.layers) - 1:
                if last is None:
                    return hidden_BTH
                if write.width > 1:
                    rows = torch.arange(len(last), device=inputs.device)[:, None]
                    at = torch.tensor(last, device=inputs.device)[:, None]
                    inputs, residual, cos, sin = inputs[rows, at], residual[rows, at], cos[rows, at], sin[rows, at]
                    ends = [start + offset for start, offset in zip(write.starts, last, strict=True)]
                    write = SlotWrite(write.rows, ends, 1, write.end, write.positions_BT[rows, at])
            q_BQTD = attention.query(inputs, cos, sin).transpose(1, 2)
            attended = attend(write, q_BQTD, keys, values, attention.scale)
            hidden_BTH = layer.finish(residual, attended.transpose(1, 2))
        return self.output(hidden_BTH)
