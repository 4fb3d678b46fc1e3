"""What must not change a step, on every family: chunks of logits, rows of a batch, passes that a step is split into."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from speculators.models import FAMILIES
from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.losses import Head, TokenLoss
from speculators.models.speculator import Speculator
from tests.allocations import Allocations
from tests.models.drafts import document_of, gradients, pack, verifier_head
from tests.models.pitfalls import draft_of, every_family, objective_of

MASKS = [[1] * 13, [0, 0, 0, *[1] * 10], [0, *[1] * 12], [0, 0, *[1] * 11]]


def batch_for(speculator: Speculator, masks: list[list[int]], row: int) -> PackedBatch:
    return pack(masks, row=row, num_aux=len(speculator.draft.aux_layer_ids))


def row_of(batch: PackedBatch, row: int) -> PackedBatch:
    return PackedBatch(**{item.name: getattr(batch, item.name)[row : row + 1] for item in fields(batch)})


def close(found: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=rtol, atol=atol, msg=name)


@every_family
@pytest.mark.parametrize("chunk_rows", [1, 3, 16])
def test_losses_in_chunks_are_those_of_all_rows_at_once(family: str, chunk_rows: int) -> None:
    """`chunk_rows` is a knob of every objective; with as many as there are rows, all logits exist (pitfall 54)."""
    speculator, results = draft_of(family), []
    batch = batch_for(speculator, MASKS, 26)
    for rows in (10_000, chunk_rows):
        output = objective_of(family, chunk_rows=rows).step(speculator.draft, batch, verifier_head())
        output.loss.backward()
        results.append((output, gradients(speculator.draft)))
    (whole, expected), (chunked, found) = results
    torch.testing.assert_close(chunked.loss, whole.loss, rtol=1e-6, atol=1e-6)
    close(found, expected, rtol=1e-6, atol=1e-6)
    for name, (total, count) in chunked.metrics.items():
        assert (total, count) == pytest.approx(tuple(whole.metrics[name]), rel=1e-5), name


def accumulated(family: str, speculator: Speculator, passes: list[PackedBatch]) -> tuple[float, dict[str, Tensor]]:
    """What the loop makes of several passes: each weighs by what it counts."""
    objective, total, weight = objective_of(family), 0.0, 0.0
    for batch in passes:
        output: StepOutput = objective.step(speculator.draft, batch, verifier_head())
        count = output.metrics["loss"].count
        (output.loss * count).backward()
        total, weight = total + output.loss.item() * count, weight + count
    return total / weight, {name: gradient / weight for name, gradient in gradients(speculator.draft).items()}


# The loss of MTP is a sum of means over the labels of each step: passes whose steps count alike share their means.
UNEVEN = [family for family in FAMILIES if family != "mtp"]


@pytest.mark.parametrize(("family", "masks"), [*((f, MASKS) for f in UNEVEN), ("mtp", [[0, *[1] * 12]] * 4)])
def test_a_batch_of_four_rows_is_four_of_one(family: str, masks: list[list[int]]) -> None:
    speculator = draft_of(family)
    batch = batch_for(speculator, masks, 13)
    assert batch.input_ids.shape == (4, 13)
    loss, expected = accumulated(family, speculator, [batch])
    for passes in ([row_of(batch, row) for row in range(4)], [document_of(batch, number) for number in range(4)]):
        again, found = accumulated(family, speculator, passes)
        assert again == pytest.approx(loss, rel=1e-5)
        close(found, expected, rtol=1e-4, atol=1e-6)


@every_family
def test_a_packed_row_is_its_documents_apart(family: str) -> None:
    """Loss and gradients of four documents in one row, and of each in a batch of its own (pitfall 17)."""
    speculator = draft_of(family)
    masks = MASKS if family != "mtp" else [[0, *[1] * 12]] * 4
    batch = batch_for(speculator, masks, 52)
    assert batch.input_ids.shape == (1, 52)
    loss, expected = accumulated(family, speculator, [batch])
    again, found = accumulated(family, speculator, [document_of(batch, number) for number in range(4)])
    assert again == pytest.approx(loss, rel=1e-5)
    close(found, expected, rtol=1e-4, atol=1e-6)


VOCABULARY, WIDTH, STEPS = 50_000, 16, 3


def tensors(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((STEPS * tokens, WIDTH), (VOCABULARY, WIDTH), (tokens, WIDTH), (VOCABULARY, WIDTH))
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def chunked_step(tokens: int) -> tuple[Tensor, Tensor, int]:
    """Loss, gradient and peak bytes of `STEPS` draft states a token against the verifier's."""
    hidden, weight, teacher, teacher_weight = tensors(tokens)
    rows = torch.arange(tokens).repeat(STEPS)
    hidden.requires_grad_()
    with Allocations() as allocations:
        loss = TokenLoss({"kl_div": 1.0})(hidden, Head(weight), teacher, Head(teacher_weight), rows).loss.mean()
        loss.backward()
    return loss.detach(), hidden.grad, allocations.peak


def dense_step(tokens: int) -> tuple[Tensor, Tensor, int]:
    """The same by whole tensors of tokens by vocabulary."""
    hidden, weight, teacher, teacher_weight = tensors(tokens)
    hidden.requires_grad_()
    with Allocations() as allocations:
        log_p = (teacher @ teacher_weight.T).log_softmax(-1)
        terms = []
        for part in hidden.split(tokens):
            log_q = (part @ weight.T).log_softmax(-1)
            terms.append((log_p.exp() * (log_p - log_q)).sum(-1))
        loss = torch.cat(terms).mean()
        loss.backward()
    return loss.detach(), hidden.grad, allocations.peak


@pytest.mark.full
def test_row_54_losses_over_a_large_vocabulary_need_a_fraction_of_the_memory() -> None:
    """50,000 tokens and three steps: a quarter of what dense takes for 1024 tokens does for 2048 (pitfall 54)."""
    loss, gradient, peak = chunked_step(1024)
    expected, expected_gradient, dense_peak = dense_step(1024)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    *_, long_peak = chunked_step(2048)
    assert peak < dense_peak / 4
    assert long_peak < dense_peak / 4
    # Twice as many tokens take no more logits at a time.
    assert long_peak < peak + 8 * 2048 * STEPS * WIDTH * 4


@every_family
def test_row_54_unsupervised_rows_have_no_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 120 tokens 20 are supervised: the rows of logits made on either side are those of 20 tokens (pitfall 54)."""
    rows: list[int] = []
    logits = Head.logits

    def counting(self: Head, hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(Head, "logits", counting)
    speculator, made = draft_of(family), []
    for unsupervised in (0, 100):
        rows.clear()
        batch = batch_for(speculator, [[0] * unsupervised + [1] * 20], unsupervised + 20)
        with torch.no_grad():
            objective_of(family).step(speculator.draft, batch, verifier_head())
        made.append(sum(rows))
    # A longer document before them gives the first supervised tokens positions to be predicted from: at most five.
    assert 0 < made[0] <= made[1] <= made[0] + 5 * 10
