import pytest
import torch

from speculators.models.family import Count
from speculators.models.mlp_speculator.objective import MlpSpeculatorObjective
from speculators.models.supervision import (
    acceptance_counts,
    counted_states,
    document_runs,
    schedule,
    step_metrics,
    sums_by_step,
    supervised,
    up_to_last,
)
from tests.models.drafts import pack


def test_equal_ids_of_neighbouring_rows_are_different_documents() -> None:
    ids = torch.tensor([[5, 5, 2, -1], [2, 2, 5, 5], [-1, -1, -1, -1]])
    assert document_runs(ids).tolist() == [0, 0, 1, -1, 2, 2, 3, 3, -1, -1, -1, -1]


def test_a_position_counts_for_supervised_tokens_of_its_own_document() -> None:
    """Pitfall 17: neither the next document nor padding nor the next row is predicted."""
    batch = pack([[0, 1, 1], [1, 0], [1, 1, 1]], row=6)
    # Rows: tokens a0 a1 a2 b0 b1 and padding; c0 c1 c2 and padding.
    assert supervised(batch, 1).long().tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert supervised(batch, 2).long().tolist() == [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert not supervised(batch, 3).any()
    assert not supervised(batch, 50).any()


def test_documents_are_kept_up_to_their_last_mark() -> None:
    runs = torch.tensor([0, 0, 0, -1, 1, 1, 2, 2, 2, -1])
    marked = torch.tensor([0, 1, 0, 0, 0, 0, 1, 0, 1, 0], dtype=torch.bool)
    kept, lengths = up_to_last(marked, runs)
    assert kept.tolist() == [0, 1, 6, 7, 8]
    assert lengths == [2, 3]
    kept, lengths = up_to_last(torch.zeros(10, dtype=torch.bool), runs)
    assert (kept.tolist(), lengths) == ([], [])


def test_positions_are_unrolled_as_far_as_they_count() -> None:
    # Two documents of 4 and 2 positions; supervised are the positions 1 and 3 of the first, 0 of the second.
    slots, counted = schedule(torch.tensor([0, 1, 0, 1, 1, 0], dtype=torch.bool), [4, 2], 3)
    assert [mask.long().tolist() for mask in counted] == [[0, 1, 0, 1, 1, 0], [1, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert [slot.tolist() for slot in slots] == [[0, 1, 2, 3, 4], [0, 1, 2], [1]]
    states = [100 * step + slot[:, None] for step, slot in enumerate(slots)]
    rows, places = counted_states(states, slots, counted)
    # Each state says at which step it was made, and where its position was unrolled from.
    assert rows.squeeze(1).tolist() == [1, 3, 4, 100, 102, 201]
    assert places.tolist() == [1, 3, 4, 1, 3, 3]
    totals, sizes = sums_by_step(rows.squeeze(1), counted)
    assert (totals.tolist(), sizes) == ([8, 202, 201], [3, 2, 1])


def test_row_28_acceptance_counts_by_hand() -> None:
    """Pitfall 28: acceptance is that of prefixes, and a position that is not scored is no mismatch."""
    counted = torch.tensor([[1, 1, 1, 0, 1], [1, 1, 0, 1, 1]], dtype=torch.bool)
    hits = torch.tensor([True, False, True, True, True, True, True, False])
    # Step 0: 3 of 4 right. Step 1: positions 0, 1, 4 count at both; 0 is right at both; 0 and 4 were right before.
    counts = acceptance_counts(hits, counted)
    assert counts == [[3, 4, 4], [1, 3, 2]]
    metrics = step_metrics(Count(2.5, 4), [2.0, 0.5], [4, 4], counts)
    assert metrics == {
        "loss": Count(2.5, 4),
        "loss_0": Count(2.0, 4),
        "full_acc_0": Count(3, 4),
        "cond_acc_0": Count(3, 4),
        "loss_1": Count(0.5, 4),
        "full_acc_1": Count(1, 3),
        "cond_acc_1": Count(1, 2),
    }
    # Any family's objective: one token of the verifier's, and each draft that is right with all before it.
    objective = MlpSpeculatorObjective()
    assert objective.acceptance_length(metrics) == pytest.approx(1 + 3 / 4 + 1 / 3)
    assert objective.acceptance_length({"loss": Count(1, 1), "full_acc_0": Count(0, 0)}) == 1.0
