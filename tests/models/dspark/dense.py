"""A dense twin of DSpark's training step: every anchor and slot by itself, whole logits, torch's own gradients."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.models.draft_model import PackedBatch
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from tests.models.drafts import document_of
from tests.models.dspark.contract import read


@dataclass
class Slot:
    """One slot: its number among those that predict, whether it counts, p, q and the confidence's logit."""

    number: int
    counted: bool
    p: Tensor
    q: Tensor
    logit: Tensor

    @property
    def acceptance(self) -> float:
        return torch.minimum(self.p, self.q).sum().item()


@dataclass
class Dense:
    """All blocks of a batch, and sums over their slots that count."""

    blocks: list[list[Slot]] = field(default_factory=list)

    @property
    def slots(self) -> list[Slot]:
        return [slot for block in self.blocks for slot in block if slot.counted]

    def token_loss(self, terms: dict[str, float], gamma: float) -> Tensor:
        total = torch.zeros(())
        for slot in self.slots:
            values = {
                "kl_div": (slot.p * (slot.p.log() - slot.q.log())).sum(),
                "ce": -slot.q.log()[slot.p.argmax()],
                "tv": (slot.p - slot.q).abs().sum() / 2,
            }
            total = total + math.exp(-slot.number / gamma) * sum(
                weight * values[name] for name, weight in terms.items()
            )
        return total / len(self.slots)

    def confidence_loss(self, gamma: float) -> Tensor:
        total = torch.zeros(())
        for slot in self.slots:
            error = F.binary_cross_entropy(slot.logit.sigmoid(), torch.tensor(slot.acceptance))
            total = total + math.exp(-slot.number / gamma) * error
        return total / len(self.slots)

    def metrics(self) -> dict[str, tuple[float, int]]:
        size, blocks = len(self.slots), len(self.blocks)
        hits = [float(slot.p.argmax() == slot.q.argmax()) for slot in self.slots]
        certain = [slot.logit.sigmoid().item() for slot in self.slots]
        accepted = [slot.acceptance for slot in self.slots]
        return {
            "position_acc": (sum(hits), size),
            "accept_rate": (sum(accepted), size),
            "accept_len": (sum(1 + sum(_runs(block, Slot.acceptance.fget)) for block in self.blocks), blocks),
            "eal": (sum(1 + sum(_runs(block, _hit)) for block in self.blocks), blocks),
            **{f"full_acc_{slot}": self.prefixes(slot) for slot in range(len(self.blocks[0]))},
            "confidence_pred_mean": (sum(certain), size),
            "confidence_abs_error": (sum(abs(c - a) for c, a in zip(certain, accepted, strict=True)), size),
            "confidence_cumprod_bias": (
                sum(sum(_runs(block, _certain)) - sum(_runs(block, Slot.acceptance.fget)) for block in self.blocks),
                size,
            ),
        }

    def prefixes(self, last: int) -> tuple[float, int]:
        """Blocks that are right up to a slot, of those whose slots count up to there."""
        counted = [block[: last + 1] for block in self.blocks if all(slot.counted for slot in block[: last + 1])]
        return sum(all(_hit(slot) for slot in block) for block in counted), len(counted)


def _hit(slot: Slot) -> float:
    return float(slot.p.argmax() == slot.q.argmax())


def _certain(slot: Slot) -> float:
    return slot.logit.sigmoid().item()


def _runs(block: list[Slot], value) -> list[float]:
    """The running products of a value, which a slot that does not count ends."""
    products, running = [], 1.0
    for slot in block:
        running = running * value(slot) if slot.counted else 0.0
        products.append(running)
    return products


def dense(speculator: Speculator, batch: PackedBatch, head: VerifierHead) -> Dense:
    """Every block at an anchor a of every document: a supervised, with more than a block's tokens after it or at it."""
    config, found = speculator.config, Dense()
    ids_D = speculator.vocab.draft_ids
    for number in sorted({n for n in batch.document_ids.flatten().tolist() if n >= 0}):
        document = document_of(batch, number)
        mask = document.loss_mask[0].tolist()
        if len(mask) <= config.block_size:
            continue
        training = read(speculator, document, first_anchor=0)
        teacher_TV = head.logits(document.last_hidden_states[0])
        for anchor in range(len(mask) - config.block_size):
            if not mask[anchor]:
                continue
            block = []
            for slot in range(config.max_speculative_tokens):
                stands = anchor + slot + (0 if config.sample_from_anchor else 1)
                p = teacher_TV[anchor + slot][ids_D].softmax(-1)
                q = training.logits_AJD[anchor, slot].softmax(-1)
                block.append(Slot(slot, mask[stands], p, q, training.certainty_AJ[anchor, slot]))
            found.blocks.append(block)
    return found
