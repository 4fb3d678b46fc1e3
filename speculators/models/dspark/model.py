"""The DSpark network: DFlash's backbone, whose slots are turned into tokens one after another.

Shape suffixes as in `draft_model`; A blocks, S slots of a block, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculators.models.dflash.model import DFlashModel
from speculators.models.dspark.config import DSparkConfig
from speculators.models.dspark.heads import MARKOV_HEADS, ConfidenceHead
from speculators.models.proposing import Drafts


class DSparkModel(DFlashModel):
    """A DSpark draft; frozen embeddings and head are the verifier's."""

    config: DSparkConfig
    tables = (*DFlashModel.tables, "markov_head.markov_w?.weight")

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        decoder, rank = config.transformer_layer_config, config.markov_rank
        head = MARKOV_HEADS[config.markov_head_type]
        self.markov_head = head(decoder.vocab_size, config.draft_vocab_size, rank, decoder.hidden_size)
        self.confidence_head = (
            ConfidenceHead(decoder.hidden_size, rank if config.confidence_head_with_markov else None)
            if config.enable_confidence_head
            else None
        )

    @property
    def tells_confidence(self) -> bool:
        """Whether there is a confidence head."""
        return self.confidence_head is not None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """The backbone as DFlash's; the heads' matrices from N(0, initializer_range²), but W2 and biases at 0."""
        super().reset_parameters(generator)
        self.reset_heads(generator)

    def reset_heads(self, generator: torch.Generator) -> None:
        """Give both heads fresh values and leave the backbone as it is."""
        deviation = self.config.transformer_layer_config.initializer_range
        self.markov_head.reset_parameters(deviation, generator)
        if self.confidence_head is not None:
            self.confidence_head.reset_parameters(deviation, generator)

    def rank_vectors(self, states_ASH: Tensor, previous_ids_AJ: Tensor) -> tuple[Tensor, Tensor]:
        """What the Markov head makes of whole blocks: W1[previous] and rank vectors, [A, J, R] each.

        States are those of all slots; `previous_ids_AJ` int64 are ids of the verifier's, the tokens before those that
        the predicting slots predict. A first slot that predicts nothing has the anchor, on which it stands, before it.
        """
        first = self.config.first_slot
        previous_AS = torch.cat((previous_ids_AJ[:, :1],) * first + (previous_ids_AJ,), 1)
        embeds_ASR = self.markov_head.embed(previous_AS)
        return embeds_ASR[:, first:], self.segment(self.markov_head, states_ASH, embeds_ASR)[:, first:]

    def choose(self, states_BSH: Tensor, anchor_ids_B: Tensor, drafts: Drafts) -> Tensor | None:
        """Draw left to right, each slot from logits biased by the token before it, which is an id of the verifier's.

        Returns how likely each token is to be accepted, given that those before it were, [B, K] float32: calibrated
        where the config has temperatures, None without a confidence head.
        """
        first, previous_B, state = self.config.first_slot, anchor_ids_B, None
        if first:
            _, state = self.markov_head.step(states_BSH[:, 0], self.markov_head.embed(anchor_ids_B), None)
        states_BKH = states_BSH[:, first:]
        logits_BKD = self._candidates(self.lm_head(states_BKH))
        certainty: list[Tensor] = []
        for step in range(states_BKH.shape[1]):
            hidden_BH, embeds_BR = states_BKH[:, step], self.markov_head.embed(previous_B)
            vector_BR, state = self.markov_head.step(hidden_BH, embeds_BR, state)
            if self.confidence_head is not None:
                certainty.append(self.confidence_head(hidden_BH, embeds_BR))
            previous_B = drafts.draw(logits_BKD[:, step] + self.markov_head.bias(vector_BR))
        return self._calibrated(torch.stack(certainty, 1)) if certainty else None

    def _candidates(self, logits_BKD: Tensor) -> Tensor:
        """The logits of the head's likeliest tokens, which alone can be drafted; -inf for the others."""
        if self.num_candidates is None:
            return logits_BKD
        top = logits_BKD.topk(self.num_candidates, -1)
        return torch.full_like(logits_BKD, float("-inf")).scatter(-1, top.indices, top.values)

    def _calibrated(self, logits_BK: Tensor) -> Tensor:
        temperatures = self.config.confidence_temperatures
        if temperatures is not None:
            temperature_K = torch.tensor(temperatures[: logits_BK.shape[1]], device=logits_BK.device)
            logits_BK = logits_BK / temperature_K
        return torch.sigmoid(logits_BK)
