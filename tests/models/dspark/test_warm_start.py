"""A DSpark draft that starts from a DFlash draft."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculators.errors import UsageError
from speculators.models import FAMILIES
from speculators.models.draft_model import DraftContext, Proposal
from speculators.models.dspark.draft import DSparkDraft
from speculators.models.dspark.warm_start import from_dflash
from speculators.models.speculator import Speculator
from tests.models.drafts import pack, random_speculator, verifier_head, verifier_shape, verifier_weights

BLOCK = {"block_size": 4, "num_layers": 2}
SPARK = {**BLOCK, "markov_rank": 6, "draft_vocab_size": 16}


def target(**options):
    return DSparkDraft(**SPARK, **options).resolve(verifier_shape())


def drafts_of(speculator: Speculator) -> Proposal:
    row = pack([[1] * 9], row=9, num_aux=len(speculator.draft.aux_layer_ids))
    context = DraftContext(
        row.input_ids[:, 1:6],
        row.aux_hidden_states[:, :5],
        [0],
        [5],
        speculator.draft.make_cache(1),
        slice(0, 1),
    )

    def likeliest(logits_BD: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return logits_BD.argmax(-1), logits_BD.softmax(-1)

    return speculator.draft.propose(context, 3, likeliest)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_backbone_and_vocabulary_are_taken_over_bit_for_bit_and_heads_are_fresh(kind: str) -> None:
    """A vocabulary map stays with its weights (pitfall 33)."""
    dflash = random_speculator("dflash", **BLOCK)
    spark = from_dflash(dflash, target(markov_head_type=kind), seed=4)
    given, taken = dflash.draft.state_dict(), spark.draft.state_dict()
    assert given.keys() < taken.keys()
    assert all(name.startswith(("markov_head.", "confidence_head.")) for name in taken.keys() - given.keys())
    for name, tensor in given.items():
        assert torch.equal(taken[name], tensor), name
        assert (taken[name].data_ptr() == tensor.data_ptr()) == (name in dflash.borrowed), name
    assert torch.equal(spark.vocab.draft_ids, dflash.vocab.draft_ids)
    assert taken["markov_head.markov_w1.weight"].abs().min() > 0
    assert not torch.equal(
        from_dflash(dflash, target(), seed=5).draft.markov_head.markov_w1.weight,
        from_dflash(dflash, target(), seed=6).draft.markov_head.markov_w1.weight,
    )


def test_in_the_dflash_layout_it_proposes_what_the_dflash_draft_does() -> None:
    """The fresh Markov head adds nothing, so that training goes on where the other draft's ended."""
    dflash = random_speculator("dflash", **BLOCK)
    spark = from_dflash(dflash, target(sample_from_anchor=False))
    expected, found = drafts_of(dflash), drafts_of(spark)
    assert torch.equal(found.token_ids_BK, expected.token_ids_BK)
    torch.testing.assert_close(found.probs_BKD, expected.probs_BKD)


def test_training_goes_on_with_every_parameter() -> None:
    dflash = random_speculator("dflash", **BLOCK)
    spark = from_dflash(dflash, target())
    batch = pack([[1] * 13], row=13, num_aux=len(spark.draft.aux_layer_ids))
    FAMILIES["dspark"].objective().step(spark.draft, batch, verifier_head()).loss.backward()
    # W1 gets its first gradient when W2 is no longer 0, but for what the confidence head reads of it.
    without = {name for name, p in spark.draft.named_parameters() if p.requires_grad and not p.grad.abs().max() > 0}
    assert without == set()
    assert all(p.grad is None for p in dflash.draft.parameters())


def test_what_was_borrowed_stays_borrowed(tmp_path: Path) -> None:
    random_speculator("dflash", **BLOCK).save_pretrained(tmp_path / "dflash", torch.float32)
    detached = Speculator.from_pretrained(tmp_path / "dflash")
    spark = from_dflash(detached, target())
    assert spark.draft.missing_tensors() == detached.draft.missing_tensors() == ["embed_tokens.weight"]
    attached = from_dflash(detached.attach_verifier(verifier_weights()), target())
    for number, one in enumerate((spark, attached)):
        one.save_pretrained(tmp_path / str(number), torch.float32)
        loaded = Speculator.from_pretrained(tmp_path / str(number))
        assert loaded.draft.missing_tensors() == ["embed_tokens.weight"]


def test_dtype_follows_the_dflash_draft(tmp_path: Path) -> None:
    random_speculator("dflash", **BLOCK).save_pretrained(tmp_path / "dflash", torch.bfloat16)
    spark = from_dflash(Speculator.from_pretrained(tmp_path / "dflash"), target())
    assert {p.dtype for p in spark.draft.parameters() if not p.is_meta} == {torch.bfloat16}


def test_another_backbone_is_refused_by_what_differs() -> None:
    dflash = random_speculator("dflash", **BLOCK)
    with pytest.raises(UsageError, match=r"draft_vocab_size is 12, that draft's 16"):
        from_dflash(dflash, DSparkDraft(**{**SPARK, "draft_vocab_size": 12}).resolve(verifier_shape()))
    with pytest.raises(UsageError, match=r"aux_hidden_state_layer_ids is \[1, 4\]"):
        from_dflash(dflash, target(aux_layer_ids=[1, 4]))
    with pytest.raises(UsageError, match=r"num_hidden_layers is 3, that draft's 2"):
        from_dflash(dflash, DSparkDraft(**{**SPARK, "num_layers": 3}).resolve(verifier_shape()))
    with pytest.raises(UsageError, match="family 'dflash'"):
        from_dflash(random_speculator("eagle3"), target())
