"""The EAGLE network: packed unrolling for training, incremental drafting for serving.

Position p carries the verifier's state of token p after its final norm and the embedding of token p+1. The output there
stands for the verifier's state of token p+1: its head turns it into the prediction of token p+2, and position p+1 takes
it where the verifier's own is not known yet. The rotary position is p. Shape suffixes as in `draft_model`; R context
positions of a packed batch that are active at a step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculators.formats.decoder import DecoderConfig
from speculators.models.draft_model import DraftContext
from speculators.models.eagle.config import EagleConfig
from speculators.models.layers import DecoderLayer, RMSNorm, RotaryTable, SkinnyLinear
from speculators.models.proposing import normed_states
from speculators.models.stepwise import StepwiseDraftModel
from speculators.models.unroll import Memory, Trunk, Unroll


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


class EagleModel(StepwiseDraftModel):
    """An EAGLE draft; embeddings and head are the verifier's, frozen, and the head is never stored."""

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        decoder, hidden, eps = config.decoder(), config.hidden_size, config.rms_norm_eps
        super().__init__(config, decoder)
        self.embed_layernorm = RMSNorm(hidden, eps) if config.embed_layernorm else None
        self.fc = SkinnyLinear(2 * hidden, hidden, bias=config.bias)
        self.layers = nn.ModuleList(EagleLayer(decoder, index) for index in range(config.num_hidden_layers))
        self.post_embedding_layernorm = RMSNorm(hidden, eps) if config.post_embedding_layernorm else None
        self.add_vocabulary(config.vocab_size)
        self.rotary = RotaryTable(decoder)

    def fuse(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Verifier ids [...] and states [..., H] -> the first layer's input [..., H]."""
        embeds = self.embed(token_ids)
        if self.embed_layernorm is not None:
            embeds = self.embed_layernorm(embeds)
        out: Tensor = self.fc(torch.cat((embeds, hidden.to(self.dtype)), -1))
        return out

    def output(self, hidden: Tensor) -> Tensor:
        """The last layer's output [..., H] -> what the verifier's head reads and the next position takes."""
        return hidden if self.post_embedding_layernorm is None else self.post_embedding_layernorm(hidden)

    def forward(self, inputs: Unroll) -> list[Tensor]:
        """Unroll over packed documents and return, per step, the states [R, H] that the verifier's head reads.

        Features are the verifier's states after its final norm. What a step hands to the next is detached, as in HASS:
        each step learns to continue the states it is given.
        """
        trunk, memory = EagleTrunk(self, inputs), Memory(len(self.layers))
        hidden = self.output(trunk.first(inputs.features_CX, memory))
        steps = [hidden]
        for step in range(1, len(inputs.slots)):
            hidden = self.output(trunk.later(hidden.detach(), memory, step))
            steps.append(hidden)
        return steps

    def first_states(self, context: DraftContext) -> Tensor:
        """The verifier's states after its final norm."""
        return normed_states(context)

    def layer_inputs(self, token_ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Verifier ids beside the states before them -> the first layer's input and residual, [..., H] each."""
        return self.blocks()[0].prepare(self.fuse(token_ids, states))

    def predict(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The last layer's output [..., H] -> logits [..., V], and the states that the next token is read with."""
        states = self.output(hidden)
        return self.lm_head(states), states


class EagleTrunk(Trunk):
    """The layers over one packed batch; a token reaches them through `fc`."""

    def __init__(self, model: EagleModel, inputs: Unroll) -> None:
        super().__init__(model, inputs)
        self.draft = model

    def fuse(self, hidden: Tensor, tokens: Tensor | None) -> Tensor:
        """States beside the tokens at context positions `tokens` [R] (None: all) -> the first layer's input."""
        token_ids = self.inputs.token_ids_C
        return self.draft.fuse(token_ids if tokens is None else token_ids.index_select(0, tokens), hidden)
