"""The DFlash network: blocks over packed rows for training, one pass over a masked block for serving.

The verifier's states at a position become one context state, from which every layer makes keys and values of its own;
they never run through a layer. A block is an anchor and mask tokens. Shape suffixes as in `draft_model`; C context
positions of a packed batch, A blocks, S slots of a block, N key heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from speculators.models.cache import SlotWrite, attend
from speculators.models.compiling import compilable
from speculators.models.decoder_draft import DecoderDraftModel
from speculators.models.dflash.blocks import BlockKeys, BlockMask, BlockPlan, block_attention, flex_block_attention
from speculators.models.dflash.config import BlockDraftConfig
from speculators.models.draft_model import DraftContext, DraftSampler, Proposal
from speculators.models.layers import DecoderLayer, RMSNorm, RotaryTable, SkinnyLinear
from speculators.models.proposing import Drafts, at_last, aux_states

# What a layer calls with its attention's input [A, S, H], to get the attended heads [A, S, Q, E].
Attend = Callable[[Tensor], Tensor]


@dataclass
class BlockInputs:
    """Training inputs without padding: documents one after another, `document_lengths` context positions each.

    `features_CX` are the verifier's states, `positions_C` int64 the rotary positions, `anchors_A` int64 (ascending)
    the context positions of the blocks' anchors and `anchor_ids_A` int64 the tokens there.
    """

    features_CX: Tensor
    positions_C: Tensor
    document_lengths: list[int]
    anchors_A: Tensor
    anchor_ids_A: Tensor


class BlockLayer(DecoderLayer):
    """A decoder layer over the slots of blocks; what its attention sees is the caller's to say."""

    def __init__(self, config: BlockDraftConfig, index: int) -> None:
        decoder = config.transformer_layer_config
        super().__init__(decoder, index)
        heads = decoder.num_attention_heads * decoder.head_dim
        bias = decoder.attention_bias and config.output_bias
        self.self_attn.o_proj = SkinnyLinear(heads, decoder.hidden_size, bias=bias)

    def run(self, hidden_ASH: Tensor, attend: Attend) -> Tensor:
        """States of all slots [A, S, H] in and out."""
        inputs, residual = self.prepare(hidden_ASH)
        return self.finish(residual, attend(inputs))


class DFlashModel(DecoderDraftModel):
    """A block drafter; embeddings and head are the verifier's and frozen, unless the draft is of another width.

    A family that builds on it gives its own layers (`layer_type`), its own way from slot states to tokens (`choose`),
    or both.
    """

    config: BlockDraftConfig
    layer_type: ClassVar[type[BlockLayer]] = BlockLayer

    def __init__(self, config: BlockDraftConfig) -> None:
        decoder = config.transformer_layer_config
        super().__init__(config, decoder)
        hidden, own = decoder.hidden_size, config.has_own_width
        self.fc = SkinnyLinear(config.num_features, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, decoder.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer_type(config, index) for index in range(decoder.num_hidden_layers))
        self.norm = RMSNorm(hidden, decoder.rms_norm_eps)
        self.add_vocabulary(config.draft_vocab_size, own=own, trained_embeddings=own)
        self.rotary = RotaryTable(decoder)

    @compilable
    def combine(self, aux_hidden_states: Tensor) -> Tensor:
        """Aux states [..., A*H] -> context states [..., H], of which every layer makes its keys and values."""
        context: Tensor = self.hidden_norm(self.fc(aux_hidden_states.to(self.fc.weight.dtype)))
        return context

    def context_key_values(self, index: int, context: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Context states [..., H] -> rotated keys and values [..., N, E] of layer `index`."""
        return self.blocks()[index].self_attn.key_value(context, cos, sin)

    def embed_blocks(self, anchor_ids_A: Tensor, num_slots: int) -> Tensor:
        """Anchors (verifier ids, int64) and `num_slots` - 1 mask tokens each -> embeddings [A, S, H]."""
        ids_AS = anchor_ids_A[:, None].repeat(1, num_slots)
        ids_AS[:, 1:] = self.config.mask_token_id
        return self.embed(ids_AS)

    def forward(self, inputs: BlockInputs) -> Tensor:
        """Fill the blocks of packed documents; returns the states [A, S, H] that `lm_head` reads, S = block size."""
        packed = _PackedBlocks(self, inputs)
        return self.fill(self.embed_blocks(inputs.anchor_ids_A, self.config.block_size), packed.attend)

    def fill(self, hidden_ASH: Tensor, attend: Callable[[int, Tensor], Tensor]) -> Tensor:
        """All layers and the final norm over the slots of blocks; `attend` also takes the number of the layer."""
        for index, layer in enumerate(self.blocks()):
            hidden_ASH = self.segment(partial(layer.run, attend=partial(attend, index)), hidden_ASH)
        normed: Tensor = self.norm(hidden_ASH)
        return normed

    @torch.no_grad()
    def propose(self, context: DraftContext, num_tokens: int, sampler: DraftSampler) -> Proposal:
        """Bring the cache in step with the verified tokens and fill one block of `num_tokens` tokens after them."""
        drafts = Drafts(self, sampler, num_tokens)
        self._remember(context)
        if num_tokens:
            anchor_ids_B, num_slots = at_last(context.token_ids_BT, context), self._slots_for(num_tokens)
            served = _ServedBlocks(self, context, num_slots)
            states_BSH = self.fill(self.embed_blocks(anchor_ids_B, num_slots), served.attend)
            first = self.config.first_slot
            confidence_BK = self.choose(states_BSH[:, : first + num_tokens], anchor_ids_B, drafts)
            return drafts.proposal(context, confidence_BK)
        return drafts.proposal(context)

    def choose(self, states_BSH: Tensor, anchor_ids_B: Tensor, drafts: Drafts) -> Tensor | None:
        """Draw a token from each slot that predicts one, left to right; the anchors, verifier ids, stand before.

        Returns how likely each is to be accepted, [B, K], where the family can tell.
        """
        for logits_BD in self.lm_head(states_BSH[:, self.config.first_slot :]).unbind(1):
            drafts.draw(logits_BD)
        return None

    def blocks(self) -> Sequence[BlockLayer]:
        """The layers, in order."""
        return cast(list[BlockLayer], list(self.layers))

    def _slots_for(self, num_tokens: int) -> int:
        """Slots of a served block: as many as in training, but for those at its end that no other slot sees."""
        all_causal = all(self.config.is_causal(index) for index in range(len(self.layers)))
        return self.config.first_slot + num_tokens if all_causal else self.config.block_size

    def _remember(self, context: DraftContext) -> None:
        """Write keys and values of the newly verified positions, over those that a block left there."""
        states_BTH = self.combine(aux_states(context, self))
        write = SlotWrite.at(context.rows, context.starts, states_BTH.shape[1], states_BTH.device)
        cos, sin = self.rotary.at(write.positions_BT, write.end, states_BTH.dtype)
        for index in range(len(self.layers)):
            keys, values = self.context_key_values(index, states_BTH, cos, sin)
            context.cache.write(index, write, keys.transpose(1, 2), values.transpose(1, 2))


class _PackedBlocks:
    """Attention while training: keys and values of all context positions, blocks anywhere among them."""

    def __init__(self, model: DFlashModel, inputs: BlockInputs) -> None:
        self.model, self.inputs = model, inputs
        self.context_CH = model.segment(model.combine, inputs.features_CX)
        slots_S = torch.arange(model.config.block_size, device=inputs.anchors_A.device)
        positions_AS = inputs.positions_C[inputs.anchors_A, None] + slots_S
        end = int(inputs.positions_C.max()) + len(slots_S) if len(inputs.positions_C) else 1
        self.here = model.rotary.at(positions_AS, end, self.context_CH.dtype)
        self.there = model.rotary.at(inputs.positions_C, end, self.context_CH.dtype)
        self.plans: dict[BlockMask, BlockPlan] = {}

    def attend(self, index: int, states_ASH: Tensor) -> Tensor:
        attention = self.model.blocks()[index].self_attn
        query, own = attention.query(states_ASH, *self.here), attention.key_value(states_ASH, *self.here)
        context = self.model.context_key_values(index, self.context_CH, *self.there)
        plan = self._plan(BlockMask(self.model.config.is_causal(index), attention.window))
        if self.model.execution.uses_flex(query.device):
            keys = BlockKeys(plan, self.inputs.document_lengths)
            return flex_block_attention(query, own, context, keys, attention.scale)
        return block_attention(query, own, context, plan, attention.scale)

    def _plan(self, mask: BlockMask) -> BlockPlan:
        if mask not in self.plans:
            config, inputs = self.model.config, self.inputs
            self.plans[mask] = BlockPlan.make(inputs.anchors_A, config.block_size, inputs.document_lengths, mask)
        return self.plans[mask]


class _ServedBlocks:
    """Attention while serving: one block a row, after the positions that the row's cache holds.

    The block's keys and values lie in the cache for this pass alone: the next positions are written over them.
    """

    def __init__(self, model: DFlashModel, context: DraftContext, num_slots: int) -> None:
        self.model, self.cache = model, context.cache
        self.write = SlotWrite.at(context.rows, context.ends, num_slots, model.device)
        self.rotation = model.rotary.at(self.write.positions_BT, self.write.end, model.dtype)

    def attend(self, index: int, states_BSH: Tensor) -> Tensor:
        attention = self.model.blocks()[index].self_attn
        own = attention.key_value(states_BSH, *self.rotation)
        keys, values = self.cache.write(index, self.write, *(tensor.transpose(1, 2) for tensor in own))
        q_BQSE = attention.query(states_BSH, *self.rotation).transpose(1, 2)
        scale, window = attention.scale, attention.serving_window
        causal = self.model.config.is_causal(index)
        return attend(self.write, q_BQSE, keys, values, scale, window, causal=causal).transpose(1, 2)
