"""One greedy proposal of a draft that reads the verifier's states after its final norm."""

import torch
from torch import Tensor

from speculators.models.draft_model import DraftContext, Proposal
from speculators.models.speculator import Speculator


class Argmax:
    """Takes the likeliest token, and keeps the logits it was shown."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, logits_BD: Tensor, step: int) -> tuple[Tensor, None]:
        assert step == len(self.logits)
        self.logits.append(logits_BD)
        return logits_BD.argmax(-1), None


def greedy_proposal(
    speculator: Speculator, tokens_BT: Tensor, states_BTH: Tensor, lengths: list[int], num_tokens: int
) -> tuple[Proposal, list[Tensor]]:
    """What fresh requests are proposed after `lengths` positions, and the logits [B, D] of every step."""
    sampler, rows = Argmax(), len(lengths)
    context = DraftContext(
        token_ids_BT=tokens_BT,
        aux_hidden_states_BTX=None,
        starts=[0] * rows,
        lengths=lengths,
        cache=speculator.draft.make_cache(rows),
        rows=slice(0, rows),
        normed_hidden_states_BTH=states_BTH,
    )
    return speculator.draft.propose(context, num_tokens, sampler), sampler.logits


def random_inputs(rows: int, width: int, hidden: int, vocab: int, seed: int = 4) -> tuple[Tensor, Tensor]:
    """The tokens after some positions [B, T], and the verifier's states there [B, T, H]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (rows, width), generator=generator)
    return tokens, torch.randn(rows, width, hidden, generator=generator)
