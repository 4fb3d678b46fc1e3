"""Drafts of decoder layers between token embeddings and a head over the draft vocabulary. Suffixes as in `draft_model`.

S positions of a row whose output is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from speculators.formats.config import SpeculatorConfig
from speculators.formats.decoder import DecoderConfig
from speculators.models.cache import SlotCache, SlotWrite, attend
from speculators.models.draft_model import DraftModel
from speculators.models.layers import DecoderLayer, RotaryTable, SkinnyLinear, draw_parameters


class DecoderDraftModel(DraftModel):
    """What such drafts have in common: `embed_tokens`, `layers`, `lm_head` and, of a reduced vocabulary, its map.

    Embeddings and head are the verifier's and frozen, unless a family says that they are the draft's own.
    """

    layers: nn.ModuleList
    rotary: RotaryTable
    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: SpeculatorConfig, decoder: DecoderConfig) -> None:
        super().__init__(config)
        self.decoder = decoder

    def add_vocabulary(self, num_draft_ids: int, *, own: bool = False, trained_embeddings: bool = False) -> None:
        """Make embeddings, head and map. What is not the draft's own has no storage until it is given its values.

        With `own` both are the draft's, and the head is trained; `trained_embeddings` are, from the verifier's on where
        they are not its own.
        """
        vocab, hidden = self.decoder.vocab_size, self.decoder.hidden_size
        place = None if own and trained_embeddings else "meta"
        self.embed_tokens = nn.Embedding(vocab, hidden, device=place).requires_grad_(trained_embeddings)
        place = None if own else "meta"
        self.lm_head = SkinnyLinear(hidden, num_draft_ids, bias=False, device=place).requires_grad_(own)
        reduced = num_draft_ids < vocab
        self.register_buffer("d2t", torch.zeros(num_draft_ids, dtype=torch.int64) if reduced else None)
        self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool) if reduced else None)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every trained matrix from N(0, initializer_range²); norms start at 1, biases at 0."""
        draw_parameters(self.named_parameters(), self.decoder.initializer_range, generator)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Verifier ids of any shape -> embeddings [..., H]; a shared table may have the verifier's dtype."""
        embeds: Tensor = self.embed_tokens(token_ids)
        return embeds.to(self.dtype)

    def make_cache(self, num_slots: int) -> SlotCache:
        """An empty cache of this model's keys and values for `num_slots` requests."""
        return SlotCache(len(self.layers), num_slots, dtype=self.dtype, device=self.device)

    def blocks(self) -> Sequence[DecoderLayer]:
        """The decoder layers, in order."""
        return cast(list[DecoderLayer], list(self.layers))

    def extend(
        self,
        inputs_BTX: Tensor,
        residual_BTH: Tensor,
        cache: SlotCache,
        write: SlotWrite,
        wanted: Sequence[Sequence[int]] | None,
    ) -> Tensor:
        """Run the layers over new positions; return the last one's output [B, S, H] at each row's indices `wanted`.

        The first layer's attention reads `inputs_BTX`. Of the last layer, only keys and values are made for the other
        positions; with `wanted` None, for all, and what is returned is what entered it.
        """
        hidden_BTH = residual_BTH
        cos, sin = self.rotary.at(write.positions_BT, write.end, hidden_BTH.dtype)
        for index, layer in enumerate(self.blocks()):
            attention = layer.self_attn
            if index:
                inputs_BTX, residual_BTH = layer.prepare(hidden_BTH)
            keys, values = attention.key_value(inputs_BTX, cos, sin)
            keys, values = cache.write(index, write, keys.transpose(1, 2), values.transpose(1, 2))
            if index == len(self.layers) - 1:
                if wanted is None:
                    break
                if write.width > len(wanted[0]):
                    rows = torch.arange(len(wanted), device=cos.device)[:, None]
                    at = torch.tensor(wanted, device=cos.device)
                    inputs_BTX, residual_BTH, cos, sin = (
                        part[rows, at] for part in (inputs_BTX, residual_BTH, cos, sin)
                    )
                    starts = [start + places[0] for start, places in zip(write.starts, wanted, strict=True)]
                    write = SlotWrite(write.rows, starts, at.shape[1], write.end, write.positions_BT[rows, at])
            q_BQTD = attention.query(inputs_BTX, cos, sin).transpose(1, 2)
            attended = attend(write, q_BQTD, keys, values, attention.scale, attention.serving_window)
            hidden_BTH = layer.finish(residual_BTH, attended.transpose(1, 2))
        return hidden_BTH
