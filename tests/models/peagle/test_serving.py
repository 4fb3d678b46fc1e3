"""Drafting in one pass: what each slot computes, and what the cache keeps of it."""

from pathlib import Path

import pytest
import torch

from speculators.errors import SpeculatorsError
from speculators.models.draft_model import DraftContext, PackedBatch
from speculators.models.speculator import Speculator
from tests.models.drafts import pack, random_speculator
from tests.models.peagle.dense import DenseParallelDraft
from tests.models.serving import Argmax

GOLDEN = Path(__file__).parents[2] / "golden" / "peagle"
OPTIONS = {"num_layers": 2}


def context_of(
    documents: list[PackedBatch], starts: list[int], lengths: list[int], speculator: Speculator, cache: object = None
) -> DraftContext:
    width = max(lengths)
    ids = torch.full((len(documents), width), 3)
    states = torch.full((len(documents), width, documents[0].aux_hidden_states.shape[-1]), 5.0)
    for row, (document, start, length) in enumerate(zip(documents, starts, lengths, strict=True)):
        ids[row, :length] = document.input_ids[0, start + 1 : start + length + 1]
        states[row, :length] = document.aux_hidden_states[0, start : start + length]
    cache = cache or speculator.draft.make_cache(len(documents))
    return DraftContext(ids, states, starts, lengths, cache, slice(0, len(documents)))


def document(length: int, seed: int) -> PackedBatch:
    return pack([[1] * length], row=length, seed=seed)


@pytest.mark.parametrize(
    "options", [OPTIONS, {**OPTIONS, "layer_type": "qwen3", "sliding_window": 3}, {"num_layers": 1}], ids=str
)
@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_every_slot_is_that_of_the_dense_twin(options: dict, num_tokens: int) -> None:
    """Eight drafts of a draft that knows nothing of depths: each is a slot of one causal pass."""
    speculator = random_speculator("peagle", **options)
    documents = [document(9, 1), document(9, 2)]
    sampler = Argmax()
    proposal = speculator.draft.propose(context_of(documents, [0, 0], [8, 3], speculator), num_tokens, sampler)
    assert proposal.token_ids_BK.shape == (2, num_tokens)
    twin = DenseParallelDraft(speculator)
    for row, length in enumerate((8, 3)):
        expected = twin.slots(
            documents[row].aux_hidden_states[0], documents[row].input_ids[0], length - 1, num_tokens
        ).detach()
        found = torch.stack([logits[row] for logits in sampler.logits])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        chosen = speculator.vocab.to_verifier(expected.argmax(-1))
        assert torch.equal(proposal.token_ids_BK[row], chosen)


def test_a_directory_of_independent_software_is_served_as_its_formula_says() -> None:
    """Windows of 32 bind: the document is longer."""
    speculator = Speculator.from_pretrained(GOLDEN, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids, states = torch.randint(128, (1, 41), generator=generator), torch.randn(1, 41, 192, generator=generator)
    cache, sampler = speculator.draft.make_cache(1), Argmax()
    context = DraftContext(ids[:, 1:], states[:, :-1], [0], [40], cache, slice(0, 1))
    speculator.draft.propose(context, 8, sampler)
    expected = DenseParallelDraft(speculator).slots(states[0], ids[0], 39, 8).detach()
    torch.testing.assert_close(torch.cat(sampler.logits), expected, atol=1e-4, rtol=1e-4)


def test_mask_slots_do_not_survive_in_the_cache() -> None:
    """Pitfall 67: after a proposal the cache is that of a request that never drafted, wherever it may be read."""
    speculator = random_speculator("peagle", **OPTIONS)
    documents = [document(12, 1), document(12, 2)]
    drafting, resting = speculator.draft.make_cache(2), speculator.draft.make_cache(2)
    starts = [0, 0]
    for lengths, num_tokens in (([3, 1], 8), ([1, 2], 8), ([0, 4], 3), ([2, 1], 1), ([1, 2], 8)):
        for cache, count in ((drafting, num_tokens), (resting, 0)):
            speculator.draft.propose(context_of(documents, list(starts), lengths, speculator, cache), count, Argmax())
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        for stored, expected in zip((*drafting.keys, *drafting.values), (*resting.keys, *resting.values), strict=True):
            for row, end in enumerate(starts):
                torch.testing.assert_close(stored[row, :, :end], expected[row, :, :end], atol=1e-6, rtol=1e-5)
    assert starts == [7, 10]


def test_drafts_of_a_row_do_not_depend_on_the_others_or_on_how_many_are_asked_for() -> None:
    speculator = random_speculator("peagle", **OPTIONS)
    documents = [document(9, 1), document(9, 2), document(9, 3)]
    together, alone, fewer = Argmax(), Argmax(), Argmax()
    proposal = speculator.draft.propose(context_of(documents, [0] * 3, [2, 0, 8], speculator), 4, together)
    assert proposal.lengths_B.tolist() == [4, 0, 4]
    speculator.draft.propose(context_of(documents[:1], [0], [2], speculator), 4, alone)
    speculator.draft.propose(context_of(documents[:1], [0], [2], speculator), 2, fewer)
    for step, logits in enumerate(together.logits):
        torch.testing.assert_close(logits[:1], alone.logits[step], atol=1e-5, rtol=1e-5)
    for step, logits in enumerate(fewer.logits):
        torch.testing.assert_close(logits, alone.logits[step], atol=1e-5, rtol=1e-5)


def test_half_precision_stays_near() -> None:
    speculator = random_speculator("peagle", **OPTIONS)
    exact, rounded = Argmax(), Argmax()
    speculator.draft.propose(context_of([document(9, 1)], [0], [8], speculator), 4, exact)
    half = speculator.to("cpu", torch.bfloat16)
    half.draft.propose(context_of([document(9, 1)], [0], [8], half), 4, rounded)
    assert rounded.logits[0].dtype == torch.bfloat16
    difference = (torch.cat(exact.logits) - torch.cat(rounded.logits).float()).abs().mean()
    assert difference < 0.05 * torch.cat(exact.logits).abs().mean()


def test_missing_states_are_named() -> None:
    speculator = random_speculator("peagle", **OPTIONS)
    context = context_of([document(4, 1)], [0], [3], speculator)
    context.aux_hidden_states_BTX = None
    with pytest.raises(SpeculatorsError, match=r"verifier's states \(2, 4, 5\)"):
        speculator.draft.propose(context, 2, Argmax())
