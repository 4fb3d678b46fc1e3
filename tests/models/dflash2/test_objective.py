"""The selector's loss against its definition, slot by slot."""

import math

import pytest
import torch
from torch import Tensor

from speculators.models.dflash.anchors import Positions
from speculators.models.dflash.supervision import Supervision
from speculators.models.dflash2.model import DFlash2Model
from speculators.models.dflash2.objective import DFlash2Objective
from speculators.models.draft_model import PackedBatch
from speculators.models.speculator import Speculator
from tests.models.dflash.dense import slots_of, teacher_probabilities
from tests.models.drafts import document_of, gradients, pack, random_speculator, verifier_head

OPTIONS = {"block_size": 4, "num_layers": 1, "draft_vocab_size": None, "selector_rank": 8, "selector_top_k": 6}
HOLES = [[0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1], [1] * 7]


def case(top_k: int = 6) -> tuple[Speculator, PackedBatch]:
    speculator = random_speculator("dflash2", **OPTIONS | {"selector_top_k": top_k})
    return speculator, pack(HOLES, row=20, num_aux=len(speculator.draft.aux_layer_ids))


class Slot:
    """One slot that counts: its unary logits [V], the selector's scores [V], and the verifier's choice."""

    def __init__(self, draft: DFlash2Model, state_H: Tensor, label: int) -> None:
        self.draft, self.state_H, self.label = draft, state_H, label
        self.unary_V = draft.lm_head.weight @ state_H
        self.best = self.unary_V.argsort(descending=True)[: draft.config.selector_top_k].tolist()

    def scores(self, previous: int) -> Tensor:
        selector = self.draft.candidate_selector
        query_R = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ self.state_H)
        return self.unary_V + selector.successor_codebook @ query_R

    def loss(self, previous: int) -> Tensor:
        candidates = self.best if self.label in self.best else [*self.best[:-1], self.label]
        return -self.scores(previous)[candidates].log_softmax(0)[candidates.index(self.label)]

    def chosen(self, previous: int) -> int:
        scores = self.scores(previous)
        return max(self.best, key=lambda token: scores[token].item())


def blocks(speculator: Speculator, batch: PackedBatch) -> list[list[tuple[int, Slot | None, int]]]:
    """Per block: number of the slot, what is to be known of it (None where it does not count), the data's token before.

    States come from the model, whose twin is tested with DFlash and by golden numbers.
    """
    found: list[list[tuple[int, Slot | None, int]]] = []
    for number in (0, 1):
        document = document_of(batch, number)
        labels = teacher_probabilities(speculator, verifier_head(), document).argmax(-1).tolist()
        slots = slots_of(speculator, document)
        anchors = sorted({anchor for anchor, *_ in slots})
        inputs = Supervision.of(Positions.of(document), torch.tensor(anchors), speculator.config).inputs
        states = speculator.draft(inputs)
        for row, anchor in enumerate(anchors):
            found.append([])
            for _, slot, predicted, counts in (entry for entry in slots if entry[0] == anchor):
                known = Slot(speculator.draft, states[row, slot], labels[predicted - 1]) if counts else None
                found[-1].append((slot, known, int(document.input_ids[0, predicted - 1])))
    return found


@pytest.mark.parametrize("chunk_rows", [4, 512])
def test_the_selectors_loss_and_gradients_are_those_of_the_definition(chunk_rows: int) -> None:
    """The gradient flows through the unary logits and the state, into all three matrices of the selector."""
    speculator, batch = case()
    objective = DFlash2Objective(selector_weight=3.0, decay_gamma=2.0, chunk_rows=chunk_rows)
    alone = DFlash2Objective(selector_weight=0.0, decay_gamma=2.0)
    difference = [
        objective.step(speculator.draft, batch, verifier_head()).loss,
        alone.step(speculator.draft, batch, verifier_head()).loss,
    ]
    (difference[0] - difference[1]).backward()
    found = gradients(speculator.draft)
    counted = [
        (slot, known, previous) for block in blocks(speculator, batch) for slot, known, previous in block if known
    ]
    absent = sum(known.label not in known.best for _, known, _ in counted)
    assert 0 < absent < len(counted) == 19
    total = sum(math.exp(-(slot - 1) / 2.0) * known.loss(previous) for slot, known, previous in counted)
    expected = 3.0 * total / (19 + 1e-5)
    torch.testing.assert_close(difference[0] - difference[1], expected, rtol=1e-4, atol=1e-6)
    expected.backward()
    wanted = gradients(speculator.draft)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_counts_are_those_of_the_definition() -> None:
    """Of a draft that has learnt a little, so that it is right here and there (pitfall 28)."""
    speculator, batch = case()
    optimizer = torch.optim.Adam(list(speculator.draft.trained_parameters()), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        DFlash2Objective().step(speculator.draft, batch, verifier_head()).loss.backward()
        optimizer.step()
    metrics = DFlash2Objective().step(speculator.draft, batch, verifier_head()).metrics
    recalled, chosen, lengths = 0, 0, 0
    found = blocks(speculator, batch)
    full = [[0, 0] for _ in found[0]]
    for block in found:
        right, counted, before = True, True, block[0][2]
        for j, (_, known, previous) in enumerate(block):
            recalled += known is not None and known.label in known.best
            chosen += known is not None and known.chosen(previous) == known.label
            # What the draft would do by itself, as long as it is right.
            right = right and known is not None and known.chosen(before) == known.label
            lengths += right
            counted = counted and known is not None
            full[j][0] += right
            full[j][1] += counted
            before = known.label if known else -1
    assert 0 < chosen < recalled < 19
    assert 0 < lengths < chosen
    assert tuple(metrics["candidate_recall"]) == (recalled, 19)
    assert tuple(metrics["selector_acc"]) == (chosen, recalled)
    assert tuple(metrics["eal"]) == (len(found) + lengths, len(found))
    assert [tuple(metrics[f"full_acc_{j}"]) for j in range(len(full))] == [tuple(pair) for pair in full]
    expected = 1 + sum(right / max(count, 1) for right, count in full)
    assert DFlash2Objective().acceptance_length(metrics) == pytest.approx(expected)
    assert metrics["loss"].sum == pytest.approx(metrics["unary_loss"].sum + metrics["selector_loss"].sum, rel=1e-5)


@pytest.mark.parametrize("masks", [[[0] * 9], []])
def test_a_batch_without_anchors_is_harmless(masks: list[list[int]]) -> None:
    """Pitfall 23."""
    speculator, _ = case()
    batch = pack(masks, row=12, num_aux=len(speculator.draft.aux_layer_ids))
    output = DFlash2Objective().step(speculator.draft, batch, verifier_head())
    output.loss.backward()
    assert output.loss.item() == 0
    assert all(not gradient.any() for gradient in gradients(speculator.draft).values())
    assert DFlash2Objective().acceptance_length(output.metrics) == 1.0
