"""P-EAGLE training written out anchor by anchor, as serving would compute it: the dense twin of model and objective.

For every anchor by itself a plain causal decoder over the verified positions and the mask slots behind them; nothing is
shared with the package but the checkpoint's tensor names.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from speculators.models.draft_model import PackedBatch
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from tests.models.eagle3.dense import DenseDraft


class DenseParallelDraft(DenseDraft):
    """The network on the slots of one anchor."""

    def slots(self, aux: Tensor, tokens: Tensor, anchor: int, depths: int) -> Tensor:
        """Logits [depths, D] of the slots anchor .. anchor + depths - 1, of which the first alone is verified."""
        masks = self.tensors["mask_hidden"].flatten()[None].expand(depths - 1, -1)
        hidden = self.features(torch.cat((aux[: anchor + 1], masks)))
        ids = torch.cat((tokens[1 : anchor + 2], torch.full((depths - 1,), self.config.mask_token_id)))
        embeds = self.tensors["embed_tokens.weight"][ids]
        positions = torch.arange(anchor + depths)
        for index in range(self.layer.num_hidden_layers):
            hidden = self.decode(index, embeds, hidden, positions, [])
        return self.linear("lm_head", self.norm("norm", hidden))[anchor:]


def expected_sizes(num_valid: int, num_depths: int, ratio: float, smallest: float) -> list[int]:
    """int((n - d) * max(r^d, r_min)) for every depth d."""
    return [int((num_valid - d) * max(ratio**d, smallest)) if num_valid >= d else 0 for d in range(num_depths)]


def all_elements(mask: Sequence[int], num_depths: int) -> list[tuple[int, int]]:
    """(anchor, depth) of every element with a supervised label, whose shallower elements have one too."""
    return [
        (anchor, depth)
        for anchor in range(len(mask))
        for depth in range(num_depths)
        if anchor + depth + 2 < len(mask) and all(mask[anchor + 2 : anchor + depth + 3])
    ]


def dense_loss(
    speculator: Speculator, batch: PackedBatch, head: VerifierHead, elements: Sequence[Sequence[tuple[int, int]]]
) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """The mean KL loss over (anchor, depth) elements, given per document, and its counts by depth."""
    draft, ids = DenseParallelDraft(speculator), speculator.draft.verifier_ids_D
    num_depths = 1 + max(depth for kept in elements for _, depth in kept)
    losses: list[list[Tensor]] = [[] for _ in range(num_depths)]
    counts = {f"{kind}_{d}": [0, 0] for kind in ("full_acc", "cond_acc") for d in range(num_depths)}
    for number, kept in enumerate(elements):
        chosen = batch.document_ids == number
        tokens, aux = batch.input_ids[chosen], batch.aux_hidden_states[chosen]
        teacher = head.logits(batch.last_hidden_states[chosen])
        teacher = teacher if ids is None else teacher[:, ids]
        for anchor in sorted({anchor for anchor, _ in kept}):
            depths = sorted(depth for other, depth in kept if other == anchor)
            assert depths == list(range(len(depths)))
            logits = draft.slots(aux, tokens, anchor, len(depths))
            right = True
            for depth in depths:
                log_p, log_q = teacher[anchor + depth + 1].log_softmax(0), logits[depth].log_softmax(0)
                losses[depth].append((log_p.exp() * (log_p - log_q)).sum())
                counts[f"cond_acc_{depth}"][1] += right
                right = right and bool(log_q.argmax() == log_p.argmax())
                counts[f"full_acc_{depth}"][1] += 1
                for kind in ("full_acc", "cond_acc"):
                    counts[f"{kind}_{depth}"][0] += right
    sums = [sum(rows, torch.zeros(())) for rows in losses]
    found = {name: (float(a), float(b)) for name, (a, b) in counts.items()}
    found |= {f"loss_{d}": (float(total.detach()), float(len(losses[d]))) for d, total in enumerate(sums)}
    return sum(sums, torch.zeros(())) / sum(map(len, losses)), found
