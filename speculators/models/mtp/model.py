"""The MTP network: one block applied to its own output, over packed documents for training and over a cache in serving.

Position p carries the verifier's state of token p after its final norm and the embedding of token p+1, and predicts
token p+2; its rotary position is p. A verifier's own checkpoint may have several blocks, each of which goes on from the
one before it (see `turns`); they are served and not trained. Shape suffixes as in `draft_model`; C positions of a batch
that is packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from speculators.formats.verifier_weights import VerifierWeights
from speculators.models.attention_interface import SlotKeyValues
from speculators.models.cache import SlotCache, SlotWrite
from speculators.models.compiling import compilable
from speculators.models.draft_model import DraftContext, DraftModel, DraftSampler, Proposal
from speculators.models.layers import SkinnyLinear, draw_parameters
from speculators.models.mtp.block import MtpBlock, build_block, build_rotary, cache_argument
from speculators.models.mtp.config import PREFIX, MtpConfig
from speculators.models.mtp.native import read_native
from speculators.models.mtp.turns import Turn, TurnCache
from speculators.models.proposing import Drafts, normed_states

Part = Literal["router", "experts"]
_PART_PREFIXES: dict[Part, str] = {"router": f"{PREFIX}mlp.gate.", "experts": f"{PREFIX}mlp.experts."}


@dataclass
class MtpSteps:
    """What a training forward reads: documents without padding one after another, `document_lengths` positions each.

    `states_CH`: the verifier's states, after its final norm; `positions_C` int64: rotary positions; `token_ids_KC`
    int64: per step the token whose embedding is read, that after the state's token at step 0.
    """

    states_CH: Tensor
    positions_C: Tensor
    token_ids_KC: Tensor
    document_lengths: list[int]


class MtpModel(DraftModel):
    """An MTP draft; frozen embeddings and head are the verifier's."""

    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        layer = config.transformer_layer_config
        self.mtp_layers = nn.ModuleList(build_block(layer, place) for place in range(config.num_nextn_predict_layers))
        self.rotary = build_rotary(layer)
        # Without storage until a checkpoint or the verifier gives them their values.
        hidden, vocab = layer.hidden_size, layer.vocab_size
        self.embed_tokens = nn.Embedding(vocab, hidden, device="meta").requires_grad_(False)
        self.lm_head = SkinnyLinear(hidden, vocab, bias=False, device="meta").requires_grad_(False)
        self._cache_argument = cache_argument(self.mtp_layers[0])

    @property
    def block(self) -> MtpBlock:
        """The one layer, whose parameters all steps share."""
        return cast(MtpBlock, self.mtp_layers[0])

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every matrix from N(0, initializer_range²); norms start neutral, biases and expert offsets at 0."""
        layer = self.config.transformer_layer_config
        gain = 0.0 if layer.style.plus_one else 1.0
        draw_parameters(self.named_parameters(), layer.initializer_range, generator, gain=gain)
        for buffer in self.mtp_layers.buffers():
            buffer.zero_()

    def native_tensors(self, directory: Path, weights: VerifierWeights) -> dict[str, Tensor]:
        """The blocks that the verifier's checkpoint has, if any; see `native.read_native`."""
        layers, count = self.config.transformer_layer_config.num_hidden_layers, self.config.num_nextn_predict_layers
        return read_native(directory, layers, weights, count)

    def parameters_of(self, part: Part) -> Iterator[nn.Parameter]:
        """The parameters of the router, or of the routed experts; none in a dense block."""
        return (parameter for name, parameter in self.named_parameters() if name.startswith(_PART_PREFIXES[part]))

    def forward(self, inputs: MtpSteps) -> list[Tensor]:
        """Per step the states [C, H] that `lm_head` reads and that the next step takes for the verifier's.

        Every step attends causally within each document, to its own keys.
        """
        hidden_BCH, steps = inputs.states_CH[None].to(self.dtype), []
        options = {"documents": inputs.document_lengths}
        for token_ids_C in inputs.token_ids_KC:
            step = partial(self._apply_block, self.block, positions_BT=inputs.positions_C[None], options=options)
            hidden_BCH = self.segment(step, token_ids_C[None], hidden_BCH)
            steps.append(hidden_BCH[0])
        return steps

    def _apply_block(
        self, block: MtpBlock, token_ids_BT: Tensor, hidden_BTH: Tensor, positions_BT: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """A block on one step's tokens and states; `options` tell `attention_interface.attention` where keys lie."""
        inputs_BTH = self._join(block, token_ids_BT, hidden_BTH, positions_BT)
        turns = self.rotary(inputs_BTH, positions_BT)
        out = block(inputs_BTH, position_embeddings=turns, position_ids=positions_BT, attention_mask=None, **options)
        normed: Tensor = block.final_layernorm(out)
        return normed

    @compilable
    def _join(self, block: MtpBlock, token_ids_BT: Tensor, hidden_BTH: Tensor, positions_BT: Tensor) -> Tensor:
        """Tokens and states side by side -> what enters the layer."""
        embeds_BTH = self.embed_tokens(token_ids_BT).to(self.dtype)
        if self.config.transformer_layer_config.style.zero_first:
            embeds_BTH = embeds_BTH * (positions_BT != 0)[:, :, None]
        joined = torch.cat((block.token_layernorm(embeds_BTH), block.hidden_layernorm(hidden_BTH)), -1)
        entered: Tensor = block.input_proj(joined)
        return entered

    def make_cache(self, num_slots: int) -> SlotCache:
        """An empty cache of the blocks' keys and values for `num_slots` requests."""
        hidden = self.config.transformer_layer_config.hidden_size
        return TurnCache(len(self.mtp_layers), num_slots, hidden, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def propose(self, context: DraftContext, num_tokens: int, sampler: DraftSampler) -> Proposal:
        """Bring the cache in step with the verified tokens and draft `num_tokens` more, one after another.

        Each block drafts one token. Where more are asked for, the blocks take turns, and a turn goes on from the
        outputs of the one before it as if they were the verifier's states. What drafted positions write is overwritten
        once their tokens are verified.
        """
        drafts, cache, count = Drafts(self, sampler, num_tokens), cast(TurnCache, context.cache), len(self.mtp_layers)
        states_BTH = normed_states(context).to(self.dtype)
        turn = cache.turn(context.rows, context.token_ids_BT, states_BTH, context.starts, context.lengths)
        cache.remember(context.rows, turn)
        # All blocks: those of tokens that are not asked for have to know these positions later.
        outputs = self._take_turn(turn, context, drafts, num_tokens, count)
        while len(drafts.token_ids) < num_tokens:
            more = min(num_tokens - len(drafts.token_ids), count)
            turn = turn.then(torch.stack(drafts.token_ids[-count:], 1), torch.stack(outputs, 1))
            outputs = self._take_turn(turn, context, drafts, num_tokens, more)
        return drafts.proposal(context)

    def _take_turn(
        self, turn: Turn, context: DraftContext, drafts: Drafts, num_tokens: int, count: int
    ) -> list[Tensor]:
        """Run the first `count` blocks, and draw a token after each while more are wanted; last outputs [B, H]."""
        width = turn.token_ids_BW.shape[1]
        write = SlotWrite.at(context.rows, turn.starts, width, turn.token_ids_BW.device)
        options = {"slot_write": write, self._cache_argument: SlotKeyValues(context.cache, write)}
        ids_BW, hidden_BWH, outputs = turn.token_ids_BW, turn.states_BWH, []
        for block in list(self.mtp_layers)[:count]:
            hidden_BWH = self._apply_block(cast(MtpBlock, block), ids_BW, hidden_BWH, write.positions_BT, options)
            outputs.append(turn.at_last(hidden_BWH))
            token_B = ids_BW.new_zeros(len(ids_BW))
            if len(drafts.token_ids) < num_tokens:
                token_B = drafts.draw(self.lm_head(outputs[-1][:, None]).squeeze(1))
            ids_BW = turn.shifted(ids_BW, token_B)
        return outputs
