"""The two heads of DSpark beside its backbone: what the token before adds to the logits, and how sure the draft is.

Formulas are those of arXiv 2607.05147, names and layouts those that vLLM loads. Shape suffixes: `...` any leading
dimensions, N blocks, K slots of a block, H hidden, R rank, V verifier vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.models.dspark.config import MarkovKind
from speculators.models.layers import SkinnyLinear, draw_parameters


class MarkovHead(nn.Module):
    """A low-rank bias of the logits by the token before (`vanilla`): W2 · W1[previous].

    `markov_w1` [V, R] reads a token of the verifier's vocabulary, `markov_w2` [D, R] writes into the draft's. What lies
    between the two is the rank vector [..., R]; a kind of head is how it is made.
    """

    def __init__(self, vocab_size: int, num_draft_ids: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank, self.hidden_size = rank, hidden_size
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = SkinnyLinear(rank, num_draft_ids, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """The verifier's ids of the tokens before, int64 of any shape -> W1[previous] [..., R]."""
        embeds: Tensor = self.markov_w1(previous)
        return embeds

    def forward(self, hidden_NKH: Tensor, embeds_NKR: Tensor) -> Tensor:
        """Rank vectors [N, K, R] of whole blocks, given the backbone's states and the tokens before every slot."""
        return embeds_NKR

    def step(self, hidden: Tensor, embeds: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot's rank vector [..., R] and what the next slot needs of it; `state` is None at a block's first."""
        return self(hidden.unsqueeze(-2), embeds.unsqueeze(-2)).squeeze(-2), None

    def bias(self, rank_vectors: Tensor) -> Tensor:
        """Rank vectors [..., R] -> what is added to the backbone's logits [..., D]."""
        bias: Tensor = self.markov_w2(rank_vectors)
        return bias

    def reset_parameters(self, deviation: float, generator: torch.Generator) -> None:
        """Draw matrices from N(0, deviation²); biases and W2 start at 0, so that a fresh head adds nothing."""
        draw_parameters(self.named_parameters(), deviation, generator)
        nn.init.zeros_(self.markov_w2.weight)


class GatedMarkovHead(MarkovHead):
    """A Markov head that the backbone's state can mute (`gated`).

    With e = W1[previous], the bias is W2 (sigmoid(G [h ; e] + b) * e).
    """

    def __init__(self, vocab_size: int, num_draft_ids: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, num_draft_ids, rank, hidden_size)
        self.gate_proj = SkinnyLinear(hidden_size + rank, rank)

    def forward(self, hidden_NKH: Tensor, embeds_NKR: Tensor) -> Tensor:
        """Rank vectors [N, K, R] of whole blocks, given the backbone's states and the tokens before every slot."""
        return torch.sigmoid(self.gate_proj(torch.cat((hidden_NKH, embeds_NKR), -1))) * embeds_NKR


class RecurrentMarkovHead(MarkovHead):
    """A Markov head with a memory of the block (`rnn`).

    J [s_{k-1} ; e ; h_k] + b holds three rank vectors, g, c and o. With u = sigmoid(g), s_k = u * s_{k-1} + (1 - u) *
    tanh(c), and the bias is W2 tanh(o). Before the block's first drafted token, s = 0.
    """

    def __init__(self, vocab_size: int, num_draft_ids: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, num_draft_ids, rank, hidden_size)
        self.joint_proj = SkinnyLinear(2 * rank + hidden_size, 3 * rank)

    def forward(self, hidden_NKH: Tensor, embeds_NKR: Tensor) -> Tensor:
        """Rank vectors [N, K, R] of whole blocks, given the backbone's states and the tokens before every slot."""
        # All but the state's part of the product is made for every slot at once.
        joint_NKZ = F.linear(torch.cat((embeds_NKR, hidden_NKH), -1), self._of_inputs, self.joint_proj.bias)
        state, vectors = embeds_NKR.new_zeros(len(embeds_NKR), self.rank), []
        for joint_NZ in joint_NKZ.unbind(1):
            vector, state = self._cell(joint_NZ, state)
            vectors.append(vector)
        return torch.stack(vectors, 1)

    def step(self, hidden: Tensor, embeds: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot's rank vector [..., R] and what the next slot needs of it; `state` is None at a block's first."""
        joint = F.linear(torch.cat((embeds, hidden), -1), self._of_inputs, self.joint_proj.bias)
        return self._cell(joint, torch.zeros_like(embeds) if state is None else state)

    def _cell(self, joint: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate, output = (joint + F.linear(state, self.joint_proj.weight[:, : self.rank])).chunk(3, -1)
        kept = torch.sigmoid(gate)
        return torch.tanh(output), kept * state + (1 - kept) * torch.tanh(candidate)

    @property
    def _of_inputs(self) -> Tensor:
        return self.joint_proj.weight[:, self.rank :]


MARKOV_HEADS: dict[MarkovKind, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}


class ConfidenceHead(nn.Module):
    """How likely the verifier is to accept a slot's token: sigmoid(w · [h ; W1[previous]] + b), or of h alone."""

    def __init__(self, hidden_size: int, rank: int | None) -> None:
        super().__init__()
        self.with_markov = rank is not None
        self.proj = nn.Linear(hidden_size + (rank or 0), 1)

    def forward(self, hidden: Tensor, embeds: Tensor) -> Tensor:
        """States [..., H] and W1[previous] [..., R] -> logits [...], in at least float32."""
        inputs = torch.cat((hidden, embeds), -1) if self.with_markov else hidden
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        with torch.autocast(inputs.device.type, enabled=False):
            logits = F.linear(inputs.to(dtype), self.proj.weight.to(dtype), self.proj.bias.to(dtype))
        return logits.squeeze(-1)

    def reset_parameters(self, deviation: float, generator: torch.Generator) -> None:
        """Draw the weight from N(0, deviation²); the bias starts at 0."""
        draw_parameters(self.named_parameters(), deviation, generator)
