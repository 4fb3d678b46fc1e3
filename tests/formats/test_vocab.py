"""The draft vocabulary: which tokens are kept, how ids are mapped, and which maps are refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from speculators.errors import FormatError
from speculators.formats.vocab import DraftVocab
from speculators.formats.vocab_map import map_fault
from tests.formats.eagle3_directory import GOLDEN, KEPT


def code_of(d2t: list[int], vocab_size: int, kept: list[int] | None = None) -> str | None:
    problem = map_fault(d2t, vocab_size, kept)
    return None if problem is None else problem.slug


def test_selection_by_hand() -> None:
    """The most frequent of 8 tokens, ties to the smaller id, in ascending order."""
    counts = torch.tensor([5, 0, 3, 9, 3, 0, 3, 1])
    vocab = DraftVocab.from_counts(counts, 4)
    assert vocab.draft_ids.tolist() == [0, 2, 3, 4]
    assert vocab.d2t.tolist() == [0, 1, 1, 1]
    assert vocab.d2t.dtype == torch.int64
    assert vocab.t2d.tolist() == [True, False, True, True, True, False, False, False]
    assert vocab.coverage(counts) == 20 / 24


def test_unused_tokens_fill_up_from_the_smallest_id() -> None:
    assert DraftVocab.from_counts(torch.tensor([0, 0, 0, 7, 0]), 3).draft_ids.tolist() == [0, 1, 3]


def test_kept_tokens_displace_the_least_frequent() -> None:
    counts = torch.tensor([5, 4, 3, 2, 1, 0])
    vocab = DraftVocab.from_counts(counts, 3, always_keep=[5, 0])
    assert vocab.draft_ids.tolist() == [0, 1, 5]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.data())
def test_selection_against_a_plain_sort(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    keep = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    vocab = DraftVocab.from_counts(torch.tensor(counts), size, keep)
    ranked = sorted(set(range(len(counts))) - keep, key=lambda token: (-counts[token], token))
    assert vocab.draft_ids.tolist() == sorted([*keep, *ranked[: size - len(keep)]])
    assert (vocab.draft_size, vocab.verifier_size) == (size, len(counts))
    assert vocab.is_full == (size == len(counts))


@settings(deadline=None, max_examples=100)
@given(st.sets(st.integers(0, 49), min_size=1))
def test_maps_invert_each_other(ids: set[int]) -> None:
    vocab = DraftVocab.from_ids(ids, 50)
    draft_ids = torch.arange(len(ids))
    assert vocab.to_verifier(draft_ids).tolist() == sorted(ids)
    assert torch.equal(vocab.to_draft(vocab.to_verifier(draft_ids)), draft_ids)
    everything = vocab.to_draft(torch.arange(50).reshape(5, 10))
    assert everything.shape == (5, 10)
    assert everything.flatten().tolist() == [sorted(ids).index(token) if token in ids else -1 for token in range(50)]
    again = DraftVocab.from_d2t(vocab.d2t, 50, vocab.t2d)
    assert torch.equal(again.draft_ids, vocab.draft_ids)
    assert torch.equal(DraftVocab.from_ids(ids, 50).t2d, vocab.t2d)


def test_golden_map_is_read() -> None:
    """Pitfall 32: the offset form, checked against the mask beside it."""
    tensors = load_file(GOLDEN / "eagle3" / "model.safetensors")
    vocab = DraftVocab.from_d2t(tensors["d2t"], 128, tensors["t2d"])
    assert vocab.draft_ids.tolist() == torch.nonzero(tensors["t2d"]).flatten().tolist()
    assert torch.equal(DraftVocab.from_d2t(tensors["d2t"], 128).t2d, tensors["t2d"])


def test_full_vocabulary_is_the_identity() -> None:
    vocab = DraftVocab.full(5)
    assert vocab.is_full
    assert vocab.to_verifier(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert vocab.coverage(torch.zeros(5)) == 1.0


@pytest.mark.parametrize(
    ("counts", "size", "keep", "words"),
    [
        (torch.ones(4), 5, [], "1 to 4"),
        (torch.ones(4), 0, [], "1 to 4"),
        (torch.ones(4), 2, [4], "within 0..3"),
        (torch.ones(4), 2, [-1], "within 0..3"),
        (torch.ones(4), 2, [0, 1, 2], "do not fit"),
        (torch.tensor([1, -1]), 1, [], "negative"),
        (torch.tensor([1.0, float("nan")]), 1, [], "finite"),
        (torch.ones(2, 2), 1, [], "one row"),
    ],
)
def test_nonsense_is_refused(counts: torch.Tensor, size: int, keep: list[int], words: str) -> None:
    with pytest.raises(FormatError, match=words) as caught:
        DraftVocab.from_counts(counts, size, keep)
    assert caught.value.code == "F015"


@pytest.mark.parametrize("ids", [[], [3, 3], [-1], [8]])
def test_ids_must_be_distinct_tokens(ids: list[int]) -> None:
    with pytest.raises(FormatError, match=r"within 0\.\.7"):
        DraftVocab.from_ids(ids, 8)


def test_tensors_of_another_kind_are_refused() -> None:
    good = DraftVocab.from_ids([1, 3], 4)
    with pytest.raises(FormatError, match="d2t"):
        DraftVocab(good.d2t.to(torch.int32), good.t2d)
    with pytest.raises(FormatError, match="t2d"):
        DraftVocab(good.d2t, good.t2d.to(torch.uint8))
    with pytest.raises(FormatError, match="expected the verifier's 5"):
        DraftVocab.from_d2t(good.d2t, 5, good.t2d)


OFFSETS = [token - index for index, token in enumerate(KEPT)]


class TestMapFaults:
    """Pitfall 31 and pitfall 32: maps that are read without a word and never propose the right token."""

    def test_sound_maps_pass(self) -> None:
        assert code_of(OFFSETS, 64) is None
        assert code_of(OFFSETS, 64, KEPT) is None
        assert code_of([0] * 5, 5) is None
        assert code_of([0] * 5, 8, list(range(5))) is None

    def test_ids_instead_of_offsets(self) -> None:
        assert code_of(KEPT, 64, KEPT) == "d2t-absolute"
        assert code_of(KEPT, 64) == "d2t-absolute"

    def test_ids_that_could_be_offsets_are_told_by_the_lack_of_neighbours(self) -> None:
        """2,000 of 50,000 tokens hold about 80 neighbouring pairs; a map that never repeats itself has none."""
        rising = list(range(0, 20_000, 10))
        assert code_of(rising, 50_000) == "d2t-absolute"
        kept = [offset + index for index, offset in enumerate(rising)]
        assert code_of(rising, 50_000, kept) is None

    def test_a_few_spread_tokens_stay_offsets(self) -> None:
        assert code_of([10, 20, 30], 50_000) is None

    def test_maps_out_of_range_or_order(self) -> None:
        assert code_of([-1, 0], 8) == "d2t-invalid"
        assert code_of([0, 0, 9], 8) == "d2t-invalid"
        assert code_of([4, 2, 1], 8) == "d2t-invalid"
        assert code_of([7, 7], 8, [7, 8]) == "d2t-invalid"

    def test_disagreement_with_the_mask(self) -> None:
        assert code_of(OFFSETS, 64, KEPT[:-1]) == "d2t-invalid"
        assert code_of([0] * 16, 64, list(range(64))) == "d2t-invalid"

    def test_a_map_that_was_never_filled(self) -> None:
        assert code_of([0] * 16, 64) == "d2t-all-zero"
        assert DraftVocab.from_d2t(torch.zeros(16, dtype=torch.int64), 64).draft_ids.tolist() == list(range(16))

    def test_objects_refuse_what_the_check_finds(self) -> None:
        kept = torch.zeros(64, dtype=torch.bool)
        kept[KEPT] = True
        with pytest.raises(FormatError, match="offsets") as caught:
            DraftVocab.from_d2t(torch.tensor(KEPT), 64, kept)
        assert caught.value.code == "F012"
        with pytest.raises(FormatError, match="offsets"):
            DraftVocab.from_d2t(torch.tensor(KEPT), 64)
        with pytest.raises(FormatError, match="never filled"):
            DraftVocab.from_d2t(torch.zeros(16, dtype=torch.int64), 64, kept)
