import pytest
import torch

from speculators.models.family import Count
from speculators.models.supervision import (
    acceptance_counts,
    document_runs,
    predicted_length,
    schedule,
    step_metrics,
    supervised,
)
from tests.models.drafts import pack


def test_equal_ids_of_neighbouring_rows_are_different_documents() -> None:
    ids = torch.tensor([[5, 5, 2, -1], [2, 2, 5, 5], [-1, -1, -1, -1]])
    assert document_runs(ids).tolist() == [0, 0, 1, -1, 2, 2, 3, 3, -1, -1, -1, -1]


def test_a_position_counts_for_supervised_tokens_of_its_own_document() -> None:
    """Row 17: neither the next document nor padding nor the next row is predicted."""
    batch = pack([[0, 1, 1], [1, 0], [1, 1, 1]], row=6)
    # Rows: tokens a0 a1 a2 b0 b1 and padding; c0 c1 c2 and padding.
    assert supervised(batch, 1).long().tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert supervised(batch, 2).long().tolist() == [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert not supervised(batch, 3).any()
    assert not supervised(batch, 50).any()


def test_positions_are_unrolled_as_far_as_they_count() -> None:
    # Two documents of 4 and 2 positions; supervised are the positions 1 and 3 of the first, 0 of the second.
    slots, counted = schedule(torch.tensor([0, 1, 0, 1, 1, 0], dtype=torch.bool), [4, 2], 3)
    assert [mask.long().tolist() for mask in counted] == [[0, 1, 0, 1, 1, 0], [1, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert [slot.tolist() for slot in slots] == [[0, 1, 2, 3, 4], [0, 1, 2], [1]]


def test_acceptance_counts_by_hand() -> None:
    counted = [torch.tensor([1, 1, 1, 0, 1], dtype=torch.bool), torch.tensor([1, 1, 0, 1, 1], dtype=torch.bool)]
    hits = [torch.tensor([True, False, True, True]), torch.tensor([True, True, True, False])]
    # Step 0: 3 of 4 right. Step 1: positions 0, 1, 4 count at both; 0 is right at both; 0 and 4 were right before.
    counts = acceptance_counts(hits, counted)
    assert counts == [[3, 4, 4], [1, 3, 2]]
    metrics = step_metrics(Count(2.5, 4), [Count(2.0, 4), Count(0.5, 4)], counts)
    assert metrics == {
        "loss": Count(2.5, 4),
        "loss_0": Count(2.0, 4),
        "full_acc_0": Count(3, 4),
        "cond_acc_0": Count(3, 4),
        "loss_1": Count(0.5, 4),
        "full_acc_1": Count(1, 3),
        "cond_acc_1": Count(1, 2),
    }
    assert predicted_length(metrics, 2) == pytest.approx(1 + 3 / 4 + 1 / 3)
