import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators.errors import FormatError, SpeculatorsError
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.speculator import Speculator
from tests.models.drafts import VOCAB, draft_vocab, random_speculator, verifier_weights

GOLDEN = Path(__file__).parent.parent / "golden"


def test_borrowed_embeddings_are_not_saved_and_come_back(tmp_path: Path) -> None:
    """The verifier's tensors are shared, stored as they are, or left out (pitfall 30)."""
    speculator = random_speculator("dflash")
    speculator.save_pretrained(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "embed_tokens.weight" not in stored
    assert {"lm_head.weight", "d2t", "t2d"} <= stored.keys()
    assert {tensor.dtype for tensor in stored.values() if tensor.is_floating_point()} == {torch.bfloat16}
    loaded = Speculator.from_pretrained(tmp_path / "out")
    assert loaded.draft.missing_tensors() == ["embed_tokens.weight"]
    with pytest.raises(SpeculatorsError, match=r"no values for embed_tokens\.weight"):
        loaded.draft.require_complete()
    weights = verifier_weights()
    loaded.attach_verifier(weights)
    assert loaded.draft.require_complete().embed_tokens.weight.data_ptr() == weights.embed_tokens.data_ptr()


def test_a_full_vocabulary_head_is_the_verifiers_and_not_saved(tmp_path: Path) -> None:
    """The verifier's tensors are shared, stored as they are, or left out (pitfall 30)."""
    speculator = random_speculator("dflash", draft_vocab_size=None)
    assert speculator.vocab.is_full
    assert torch.equal(speculator.draft.lm_head.weight, verifier_weights().lm_head)
    speculator.save_pretrained(tmp_path / "out")
    assert {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}.isdisjoint(
        load_file(tmp_path / "out" / "model.safetensors")
    )
    assert set(Speculator.from_pretrained(tmp_path / "out").draft.missing_tensors()) == {
        "lm_head.weight",
        "embed_tokens.weight",
    }


def test_what_a_reader_would_leave_uninitialised_is_saved_although_it_is_the_verifiers(tmp_path: Path) -> None:
    """PyPI's `speculators` fills absent embeddings and heads of EAGLE-3 with whatever memory holds (pitfall 30)."""
    weights = verifier_weights()
    speculator = random_speculator("eagle3", draft_vocab_size=None)
    speculator.save_pretrained(tmp_path / "out", dtype=torch.float32)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], weights.embed_tokens)
    assert torch.equal(stored["lm_head.weight"], weights.lm_head)


def test_own_tensors_of_a_directory_are_kept(tmp_path: Path) -> None:
    """The verifier's tensors are shared, stored as they are, or left out (pitfall 30)."""
    golden = Speculator.from_pretrained(GOLDEN / "eagle3")
    assert golden.draft.missing_tensors() == []
    own = golden.draft.embed_tokens.weight.clone()
    golden.attach_verifier(load_verifier_weights(GOLDEN / "verifier"))
    assert torch.equal(golden.draft.embed_tokens.weight, own)
    golden.save_pretrained(tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (GOLDEN / "eagle3", tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_mask_that_is_not_stored_is_derived_from_the_map(tmp_path: Path) -> None:
    random_speculator().save_pretrained(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    expected = tensors.pop("t2d")
    save_file(tensors, file)
    loaded = Speculator.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.draft.t2d, expected)
    assert torch.equal(loaded.draft.verifier_ids_D, draft_vocab().draft_ids)


def test_a_map_of_absolute_ids_is_refused(tmp_path: Path) -> None:
    """A map in another form is refused (pitfall 32)."""
    random_speculator().save_pretrained(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["d2t"] = draft_vocab().draft_ids
    save_file(tensors, file)
    with pytest.raises(FormatError, match="offsets"):
        Speculator.from_pretrained(tmp_path / "out")


def test_the_new_draft_takes_frozen_rows_from_the_verifier_and_the_rest_from_the_seed() -> None:
    one, same, other = random_speculator(seed=1), random_speculator(seed=1), random_speculator(seed=2)
    rows = verifier_weights().lm_head[draft_vocab().draft_ids]
    assert torch.equal(one.draft.lm_head.weight, rows)
    assert torch.equal(one.draft.fc.weight, same.draft.fc.weight)
    assert not torch.equal(one.draft.fc.weight, other.draft.fc.weight)
    assert one.draft.dtype == torch.float32
    assert one.num_speculative_tokens == 3


def test_a_vocabulary_of_another_size_is_refused() -> None:
    """No map is taken for granted; a vocabulary map stays with its weights (pitfall 31 and pitfall 33)."""
    config = random_speculator().config
    with pytest.raises(FormatError, match="keeps 8 of 40 tokens; the config says 16 of 40"):
        Speculator.create(config, verifier_weights(), draft_vocab(8))
    with pytest.raises(FormatError, match="keeps 40 of 40"):
        Speculator.create(config, verifier_weights())


def test_another_verifiers_weights_are_refused(tmp_path: Path) -> None:
    random_speculator("dflash").save_pretrained(tmp_path / "out")
    weights = verifier_weights()
    smaller = type(weights)(weights.embed_tokens[:30], weights.lm_head[:30], weights.final_norm, 1e-6)
    with pytest.raises(SpeculatorsError, match=r"embed_tokens.weight.*\[40, 32\].*\[30, 32\].*org/tiny"):
        Speculator.from_pretrained(tmp_path / "out").attach_verifier(smaller)


def test_converting_copies_and_leaves_the_original_alone() -> None:
    speculator = random_speculator()
    assert speculator.to("cpu", torch.float32) is speculator
    half = speculator.to("cpu", torch.bfloat16)
    assert (half.draft.dtype, speculator.draft.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(half.draft.fc.weight, speculator.draft.fc.weight.bfloat16())
    assert {name for name, p in half.draft.named_parameters() if p.requires_grad} == {
        name for name, p in speculator.draft.named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize("value", ["medusa9", None, 3])
def test_an_unknown_family_is_named(tmp_path: Path, value: object) -> None:
    random_speculator().save_pretrained(tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "speculators_model_type": value}), encoding="utf-8")
    with pytest.raises(FormatError, match=r"speculators_model_type is .*; expected one of .*eagle3, "):
        Speculator.from_pretrained(tmp_path / "out")


def test_saved_dtype_is_what_the_config_says(tmp_path: Path) -> None:
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        random_speculator().save_pretrained(tmp_path / name, dtype=dtype)
        assert json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))["dtype"] == name
        assert Speculator.from_pretrained(tmp_path / name).draft.dtype == dtype
        assert Speculator.from_pretrained(tmp_path / name, dtype=torch.float32).draft.dtype == torch.float32


def test_vocabulary_maps_between_both_sides() -> None:
    vocab = random_speculator().vocab
    assert (vocab.draft_size, vocab.verifier_size) == (16, VOCAB)
    assert vocab.to_verifier(torch.tensor([0, 1, 15])).tolist() == [3, 5, 33]


@pytest.mark.parametrize(
    ("family", "tables"),
    [
        ("eagle3", {"embed_tokens.weight", "lm_head.weight"}),
        ("dflash2", {"candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"}),
        ("dspark", {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}),
        ("medusa", {"lm_heads.0.weight"}),
        ("mlp_speculator", {"emb.0.weight", "head.0.weight"}),
    ],
)
def test_matrices_with_a_row_a_token_are_known_as_tables(family: str, tables: set[str]) -> None:
    draft = random_speculator(family, **({"draft_vocab_size": None} if family == "dflash2" else {})).draft
    found = draft.vocabulary_tables()
    assert tables <= found
    assert all(matrix.shape[0] in (16, 40) for name, matrix in draft.named_parameters() if name in found)
