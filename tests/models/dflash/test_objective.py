"""The training step of a block drafter against its definition, slot by slot."""

import math

import pytest
import torch
from torch import Tensor

from speculators.errors import UsageError
from speculators.models.dflash.anchors import Positions
from speculators.models.dflash.objective import DFlashObjective
from speculators.models.dflash.supervision import Supervision
from speculators.models.draft_model import PackedBatch
from speculators.models.speculator import Speculator
from tests.models.dflash.dense import DenseDraft, slots_of, teacher_probabilities
from tests.models.drafts import document_of, gradients, pack, random_speculator, verifier_head

OPTIONS = {"block_size": 4, "num_layers": 2}
HOLES = [[0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1], [1] * 7]


def packed(speculator: Speculator, masks: list[list[int]], row: int = 24) -> PackedBatch:
    return pack(masks, row=row, num_aux=len(speculator.draft.aux_layer_ids))


def kl_div(q: Tensor, p: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum()


def cross_entropy(q: Tensor, p: Tensor) -> Tensor:
    return -q[p.argmax()].log()


def total_variation(q: Tensor, p: Tensor) -> Tensor:
    return (p - q).abs().sum() / 2


class Dense:
    """Every slot of every block of a batch, one by one: whether it counts, and q and p of what it predicts."""

    def __init__(self, speculator: Speculator, batch: PackedBatch) -> None:
        self.blocks: dict[tuple[int, int], list[tuple[int, bool, Tensor, Tensor]]] = {}
        dense = DenseDraft(speculator)
        for number in range(int(batch.document_ids.max()) + 1):
            document = document_of(batch, number)
            teacher_TD = teacher_probabilities(speculator, verifier_head(), document)
            for anchor, slot, predicted, counts in slots_of(speculator, document):
                q = dense.logits(document, anchor)[slot].softmax(-1)
                self.blocks.setdefault((number, anchor), []).append((slot, counts, q, teacher_TD[predicted - 1]))

    def slots(self) -> list[tuple[int, bool, Tensor, Tensor]]:
        return [slot for block in self.blocks.values() for slot in block]

    def mean(self, loss, weight) -> Tensor:
        """sum of weight(slot) * loss over the slots that count, divided by their number + 1e-5."""
        counted = [(slot, loss(q, p)) for slot, counts, q, p in self.slots() if counts]
        return sum(weight(slot) * value for slot, value in counted) / (len(counted) + 1e-5)


def decay(first: int, gamma: float):
    return lambda slot: math.exp(-(slot - first) / gamma)


@pytest.mark.parametrize("options", [{}, {"sample_from_anchor": True}, {"draft_vocab_size": None}])
def test_the_loss_is_the_sum_over_slots_by_the_formula(options: dict) -> None:
    """Two documents with holes in their masks, a reduced and a full vocabulary, and every gradient."""
    speculator = random_speculator("dflash", **OPTIONS | options)
    batch, first = packed(speculator, HOLES), speculator.config.first_slot
    objective = DFlashObjective(loss={"kl_div": 0.5, "tv": 2.0}, decay_gamma=3.0, chunk_rows=5)
    output = objective.step(speculator.draft, batch, verifier_head())
    output.loss.backward()
    found = gradients(speculator.draft)
    dense = Dense(speculator, batch)
    loss = dense.mean(lambda q, p: 0.5 * kl_div(q, p) + 2 * total_variation(q, p), decay(first, 3.0))
    torch.testing.assert_close(output.loss, loss, rtol=1e-5, atol=0.0)
    loss.backward()
    wanted = gradients(speculator.draft)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    # Anchors 2, 3, 5, 6 and 7 have two slots each that count besides their own, the second document's 0, 1 and 2 three.
    size = 5 * 2 + 3 * 3 + (0 if first else 8)
    assert tuple(output.metrics["loss"]) == pytest.approx((loss.item() * size, size), rel=1e-4)
    of_term = dense.mean(total_variation, decay(first, 3.0)).item()
    assert tuple(output.metrics["tv_loss"]) == pytest.approx((of_term * size, size), rel=1e-4)


def test_dpace_weighs_a_slot_by_what_it_adds_to_the_accepted_length() -> None:
    """w_j = sum over m >= j of the product of (1 - alpha) q + alpha up to m, over the slots that count."""
    speculator = random_speculator("dflash", **OPTIONS)
    batch = packed(speculator, HOLES)
    objective = DFlashObjective(loss={"ce": 1.0}, position_weights="dpace", dpace_alpha=0.3)
    output = objective.step(speculator.draft, batch, verifier_head())
    total, count = torch.zeros(()), 0
    for block in Dense(speculator, batch).blocks.values():
        losses = [cross_entropy(q, p) for _, _, q, p in block]
        counts = [counted for _, counted, _, _ in block]
        confidences = [
            0.7 * math.exp(-loss.item()) + 0.3 if counted else 1.0 for loss, counted in zip(losses, counts, strict=True)
        ]
        for j, loss in enumerate(losses):
            weight = sum(math.prod(confidences[: m + 1]) for m in range(j, len(block)) if counts[m])
            total = total + weight * loss * counts[j]
        count += sum(counts)
    torch.testing.assert_close(output.loss, total / (count + 1e-5), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("from_anchor", [False, True])
def test_counts_are_those_of_the_definition(from_anchor: bool) -> None:
    """Acceptance is that of prefixes, and chooses the checkpoint (pitfall 28)."""
    speculator = random_speculator("dflash", **OPTIONS, sample_from_anchor=from_anchor, draft_vocab_size=4)
    batch = packed(speculator, HOLES)
    metrics = DFlashObjective().step(speculator.draft, batch, verifier_head()).metrics
    dense = Dense(speculator, batch)
    hits = {slot: [0, 0] for slot in range(1 - from_anchor, 4)}
    accepted, lengths, greedy = 0.0, 0.0, 0.0
    full, given = ([[0, 0] for _ in hits] for _ in range(2))
    for block in dense.blocks.values():
        sampled, right, known = 1.0, 1.0, True
        for j, (slot, counts, q, p) in enumerate(block):
            hit = bool(counts and q.argmax() == p.argmax())
            # A slot that does not count is no mismatch: from there on the block says nothing about prefixes.
            given[j][1] += known and counts and right == 1.0
            known = known and counts
            full[j][0] += known and hit and right == 1.0
            full[j][1] += known
            hits[slot][0] += hit
            hits[slot][1] += counts
            overlap = (1 - total_variation(q, p).item()) if counts else 0.0
            accepted += overlap
            sampled, right = sampled * overlap, right * hit
            lengths, greedy = lengths + sampled, greedy + right
    size, blocks = sum(count for _, count in hits.values()), len(dense.blocks)
    for slot, (right, count) in hits.items():
        assert tuple(metrics[f"position_{slot}_acc"]) == (right, count)
    assert 0 < sum(right for right, _ in hits.values()) < size
    assert tuple(metrics["position_acc"]) == (sum(right for right, _ in hits.values()), size)
    assert tuple(metrics["accept_rate"]) == pytest.approx((accepted, size), rel=1e-4)
    assert tuple(metrics["accept_len"]) == pytest.approx((blocks + lengths, blocks), rel=1e-4)
    assert tuple(metrics["eal"]) == (blocks + greedy, blocks)
    assert [tuple(metrics[f"full_acc_{j}"]) for j in range(len(hits))] == [tuple(pair) for pair in full]
    assert [tuple(metrics[f"cond_acc_{j}"]) for j in range(len(hits))] == [
        (right, reached) for (right, _), (_, reached) in zip(full, given, strict=True)
    ]
    assert full[-1][1] < full[0][1]
    expected = 1 + sum(right / max(known, 1) for right, known in full)
    assert DFlashObjective().acceptance_length(metrics) == pytest.approx(expected)


def test_each_slot_is_labelled_with_the_token_of_its_place() -> None:
    """Pitfall 15: slot j of a block with anchor a has label a + j, or a + j + 1 from the anchor on."""
    for from_anchor, expected in ((False, [5, 6, 7]), (True, [5, 6, 7, 8])):
        speculator = random_speculator("dflash", **OPTIONS, sample_from_anchor=from_anchor)
        batch = packed(speculator, [[1] * 16], row=16)
        positions = Positions.of(batch)
        supervision = Supervision.of(positions, torch.tensor([4]), speculator.config)
        slots = list(range(speculator.config.first_slot, 4))
        predicted = (supervision.before_AJ[0] + 1).tolist()
        assert predicted == expected == [4 + slot + from_anchor for slot in slots]
        assert supervision.previous_ids_AJ[0].tolist() == batch.input_ids[0, [label - 1 for label in expected]].tolist()


@pytest.mark.parametrize("from_anchor", [False, True])
def test_the_likeliest_draft_of_a_known_document_is_its_next_token(from_anchor: bool) -> None:
    """A verifier whose state at token t says t + 1: trained on one document, slot j says what stands at its place."""
    speculator = random_speculator("dflash", **OPTIONS, sample_from_anchor=from_anchor)
    batch = packed(speculator, [[1] * 16], row=16)
    head = verifier_head()
    ids_T, vocab = batch.input_ids[0], speculator.vocab
    rows = head.head.weight[ids_T.roll(-1)]
    batch.last_hidden_states[0] = 8 * rows / (head.norm_weight * rows.norm(dim=-1, keepdim=True))
    assert torch.equal(
        head.restricted(vocab.draft_ids).logits(batch.last_hidden_states[0]).argmax(-1)[:-1], vocab.to_draft(ids_T[1:])
    )
    objective = DFlashObjective(loss={"ce": 1.0})
    optimizer = torch.optim.Adam(list(speculator.draft.trained_parameters()), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        objective.step(speculator.draft, batch, head).loss.backward()
        optimizer.step()
    states = speculator.draft(Supervision.of(Positions.of(batch), torch.arange(12), speculator.config).inputs)
    drafted = vocab.to_verifier(speculator.draft.lm_head(states).argmax(-1))
    for anchor in range(12):
        for slot in range(speculator.config.first_slot, 4):
            assert drafted[anchor, slot] == ids_T[anchor + slot + from_anchor], (anchor, slot)


@pytest.mark.parametrize("masks", [[[0] * 9], [[1] * 4], []])
def test_a_batch_without_anchors_is_harmless(masks: list[list[int]]) -> None:
    """Pitfall 23: nothing supervised, too short, or all padding; loss and gradients are zeros."""
    speculator = random_speculator("dflash", **OPTIONS)
    output = DFlashObjective().step(speculator.draft, packed(speculator, masks, row=12), verifier_head())
    assert output.loss.item() == 0
    output.loss.backward()
    found = gradients(speculator.draft)
    assert found.keys() == {name for name, p in speculator.draft.named_parameters() if p.requires_grad}
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found.values())
    assert all(tuple(count) == (0, 0) for count in output.metrics.values())
    assert DFlashObjective().acceptance_length(output.metrics) == 1.0


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("position_weights", ["exponential", "dpace"])
def test_mixed_lengths_and_padding_give_finite_numbers(num_layers: int, position_weights: str) -> None:
    """Pitfall 23."""
    speculator = random_speculator("dflash", block_size=4, num_layers=num_layers, sliding_window=2)
    batch = packed(speculator, [[1] * 5, [0] * 7, [1] * 11, [0, 1, 0, 0, 0, 0, 0]], row=16)
    output = DFlashObjective(position_weights=position_weights).step(speculator.draft, batch, verifier_head())
    assert output.loss.isfinite()
    output.loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(speculator.draft).values())


def test_knobs_do_what_they_say() -> None:
    speculator = random_speculator("dflash", **OPTIONS)
    batch = packed(speculator, HOLES)

    def step(**knobs):
        torch.manual_seed(1)
        return DFlashObjective(**knobs).step(speculator.draft, batch, verifier_head())

    plain = step()
    assert step(chunk_rows=1).loss.item() == pytest.approx(plain.loss.item(), rel=1e-5)
    changes = {
        "max_anchors": 2,
        "max_blocks": 3,
        "anchors_before_answers": True,
        "loss": {"ce": 1.0},
        "position_weights": "dpace",
        "decay_gamma": 1.0,
    }
    for name, value in changes.items():
        assert step(**{name: value}).loss.item() != pytest.approx(plain.loss.item(), rel=1e-3), name
    one, other = (step(position_weights="dpace", dpace_alpha=alpha).loss.item() for alpha in (0.3, 0.7))
    assert one != pytest.approx(other, rel=1e-3)
    assert step(max_anchors=2).metrics["eal"].count == 4
    assert step(max_blocks=3).metrics["eal"].count == 3
    with pytest.raises(UsageError, match="unknown loss klv"):
        DFlashObjective(loss={"klv": 1.0})


def test_the_mask_of_a_slot_is_its_own_tokens() -> None:
    """Pitfall 14: one hole in the mask takes out the one slot of each block that stands on it."""
    speculator = random_speculator("dflash", **OPTIONS)
    mask = [1] * 12
    mask[6] = 0
    metrics = DFlashObjective().step(speculator.draft, packed(speculator, [mask], row=12), verifier_head()).metrics
    # Anchors 0..7 but for 6; of slot k, the block with anchor 6 - k is missing.
    assert [metrics[f"position_{slot}_acc"].count for slot in (1, 2, 3)] == [6, 6, 6]
    assert metrics["loss"].count == 18
