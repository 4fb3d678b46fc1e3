import torch

from speculators.models.draft_model import PackedBatch, Sample
from speculators.train.dataset import Rows
from speculators.train.faults import Suspects, blamed, where
from tests.train.tiny_training import Samples


def batch(*documents: int) -> PackedBatch:
    """A row with two tokens of each document and two of padding."""
    ids = torch.tensor([[number for number in documents for _ in range(2)] + [-1, -1]])
    states = torch.zeros(*ids.shape, 4)
    return PackedBatch(ids.clamp(min=0), ids >= 0, states.clone(), states.clone(), ids, torch.zeros_like(ids))


def test_a_sample_with_broken_states_is_named_alone() -> None:
    batches = [batch(4, 7, 9), batch(2, 5)]
    batches[0].aux_hidden_states[0, 3, 1] = float("nan")
    batches[1].last_hidden_states[0, 0, 0] = float("inf")
    # Padding is nobody's.
    batches[1].aux_hidden_states[0, -1] = float("nan")
    found = Suspects.among(batches, [False, True])
    assert blamed([found]) == ([2, 7], "hidden states that are not finite")


def test_else_those_of_the_passes_whose_loss_is_broken() -> None:
    first = Suspects.among([batch(4, 7), batch(1)], [True, True])
    second = Suspects.among([batch(3), batch(8, 6)], [True, False])
    assert blamed([first, second]) == ([6, 8], "a loss that is not finite")


def test_else_all_of_the_step() -> None:
    told = [Suspects.among([batch(4, 7)], [True]), Suspects.among([batch(3)], [True])]
    assert blamed(told) == ([3, 4, 7], "finite losses, but no finite gradient")


def test_a_sample_is_named_by_its_row_in_the_store_too() -> None:
    one = Sample(torch.zeros(2), torch.zeros(2), torch.zeros(2, 1, 1), torch.zeros(2, 1))
    source = Samples([one] * 6)
    assert where(source, [1]) == ""
    assert where(Rows(source, [5, 0, 3]), [0, 2]) == " (rows [5, 3] of the hidden states)"
