from pathlib import Path

import pytest
import torch

from speculators.errors import TrainingError
from speculators.models.draft_model import Sample
from speculators.train.dataset import PackedRows, Rows, collate, split_rows
from tests.train.tiny_training import Samples


def sample(length: int, first: int = 0) -> Sample:
    """States that tell their token: aux layer a of token i is 100 a + i, the last state -i."""
    tokens = torch.arange(first, first + length)
    aux = (tokens[:, None] + 100 * torch.arange(3)).to(torch.bfloat16)[:, :, None].expand(-1, -1, 2)
    return Sample(tokens, tokens % 2 == 0, aux, -tokens[:, None].expand(-1, 2).to(torch.bfloat16))


def test_samples_lie_one_after_another_raw_and_unshifted() -> None:
    """Documents in one row do not know of each other (pitfall 17)."""
    batch = collate([[(4, sample(3, 10)), (7, sample(2, 20))], [(1, sample(4, 30))]], 6)
    assert batch.input_ids.tolist() == [[10, 11, 12, 20, 21], [30, 31, 32, 33, 0]]
    assert batch.loss_mask.tolist() == [[True, False, True, True, False], [True, False, True, False, False]]
    assert batch.document_ids.tolist() == [[4, 4, 4, 7, 7], [1, 1, 1, 1, -1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch.aux_hidden_states[0, 3].tolist() == [20, 20, 120, 120, 220, 220]
    assert batch.last_hidden_states[..., 0].tolist() == [[-10, -11, -12, -20, -21], [-30, -31, -32, -33, 0]]
    assert batch.aux_hidden_states.dtype is torch.bfloat16
    assert batch.num_tokens == 9


def test_a_long_sample_is_cut() -> None:
    batch = collate([[(0, sample(9))]], 6)
    assert batch.input_ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    with pytest.raises(TrainingError, match="a row of 8 tokens was planned; rows hold 6"):
        collate([[(0, sample(4)), (1, sample(4))]], 6)


def test_batches_arrive_in_float32_and_in_order() -> None:
    source = Samples([sample(length, 40 * number) for number, length in enumerate((5, 9, 3, 7, 8, 2))])
    rows = PackedRows(source, 10, seed=1)
    steps = rows.steps(0, 1, 2)
    for prefetch in (True, False):
        found = list(rows.step_batches(0, steps, torch.device("cpu"), prefetch=prefetch))
        assert [len(batches) for batches in found] == [len(step) for step in steps]
        flat = [batch for batches in found for batch in batches]
        for batch, row in zip(flat, rows.plan(0).rows, strict=True):
            assert batch.aux_hidden_states.dtype is torch.float32
            expected = torch.cat([source[number].input_ids for number in row])
            assert torch.equal(batch.input_ids[0], expected)
    assert list(rows.step_batches(0, [], torch.device("cpu"))) == []


def test_nothing_to_train_on_is_an_error() -> None:
    with pytest.raises(TrainingError, match="holds no sample"):
        PackedRows(Samples([]), 10)


def test_rows_held_back_are_disjoint_and_fixed() -> None:
    source = Samples([sample(3, number) for number in range(20)])
    training, validation = split_rows(source, 5, seed=3)
    again = split_rows(source, 5, seed=3)
    ids = [{int(rows[i].input_ids[0]) for i in range(len(rows))} for rows in (training, validation, *again)]
    assert ids[:2] == ids[2:]
    assert len(ids[0]) == 15
    assert len(ids[1]) == 5
    assert ids[0].isdisjoint(ids[1])
    assert training.lengths == [3] * 15
    with pytest.raises(TrainingError, match="20 of 20 rows are to be held back"):
        split_rows(source, 20, seed=0)


def test_a_prompt_is_what_precedes_the_first_answer() -> None:
    row = sample(6)
    row.loss_mask = torch.tensor([False, False, True, True, False, True])
    assert Rows(Samples([row]), [0]).prompt(0) == [0, 1]


def test_a_store_is_a_source(tmp_path: Path) -> None:
    from speculators.extract.store import HiddenStatesStore, StoreIdentity, StoreWriter

    samples = [sample(length, 10 * length) for length in (4, 2, 6)]
    identity = StoreIdentity(
        verifier="tiny", verifier_fingerprint="f", aux_layer_ids=(0, 1, 2), num_layers=3, hidden_size=2,
        dtype="bfloat16", template_hash="t", rows_hash="r",
    )  # fmt: skip
    with StoreWriter(tmp_path / "store", identity, [4, 2, 6]) as writer:
        for shard in writer.missing:
            rows = samples[shard.first : shard.last]
            states = [torch.cat([row.aux_hidden_states, row.last_hidden_states[:, None]], 1) for row in rows]
            writer.write(shard, [row.input_ids for row in rows], [row.loss_mask for row in rows], states)
    store = HiddenStatesStore.open(tmp_path / "store")
    rows = PackedRows(store, 16)
    assert sorted(rows.plan(0).rows[0]) == [0, 1, 2]
    batch = rows.batch(0, [0])
    order = rows.plan(0).rows[0]
    assert torch.equal(batch.input_ids[0], torch.cat([samples[number].input_ids for number in order]))
    expected = torch.cat([samples[number].aux_hidden_states.flatten(1) for number in order])
    assert torch.equal(batch.aux_hidden_states[0], expected)
