"""Serving a DSpark draft: slot by slot, in the verifier's ids, with calibrated confidences."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculators.formats.vocab import DraftVocab
from speculators.models.draft_model import DraftContext, Proposal
from speculators.models.dspark.calibration import calibrated
from speculators.models.dspark.draft import DSparkDraft
from speculators.models.proposing import Drafts
from speculators.models.speculator import Speculator
from tests.models.drafts import HIDDEN, VOCAB, pack, random_speculator, randomize, verifier_shape, verifier_weights
from tests.models.dspark.contract import BLOCK, read, training_logits

LAYOUTS = [True, False]
KINDS = ["vanilla", "gated", "rnn"]


class Likeliest:
    """Takes the likeliest draft id and keeps what it was shown."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, logits_BD: Tensor, step: int) -> tuple[Tensor, Tensor]:
        self.logits.append(logits_BD)
        return logits_BD.argmax(-1), logits_BD.softmax(-1)


class Forced(Likeliest):
    """Takes the data's tokens, given as draft ids [B, K]."""

    def __init__(self, draft_ids_BK: Tensor) -> None:
        super().__init__()
        self.draft_ids_BK = draft_ids_BK

    def __call__(self, logits_BD: Tensor, step: int) -> tuple[Tensor, Tensor]:
        super().__call__(logits_BD, step)
        return self.draft_ids_BK[:, step], logits_BD.softmax(-1)


def document(length: int, num_aux: int, seed: int = 5):
    return pack([[1] * length], row=length, num_aux=num_aux, seed=seed)


def served(speculator: Speculator, row, anchor: int, sampler: Likeliest, num_tokens: int | None = None) -> Proposal:
    """Draft after the document's tokens 0..anchor, whose states 0..anchor-1 are verified."""
    draft = speculator.draft
    context = DraftContext(
        row.input_ids[:, 1 : anchor + 1],
        row.aux_hidden_states[:, :anchor],
        [0],
        [anchor],
        draft.make_cache(1),
        slice(0, 1),
    )
    most = draft.config.max_speculative_tokens
    return draft.propose(context, most if num_tokens is None else num_tokens, sampler)


@pytest.mark.parametrize("from_anchor", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_stepping_by_hand_with_true_tokens_gives_the_training_logits(kind: str, from_anchor: bool) -> None:
    """Pitfall 19: the Markov head is shown the same token before in training, by hand and by `propose`."""
    speculator = random_speculator("dspark", **BLOCK, markov_head_type=kind, sample_from_anchor=from_anchor)
    draft, vocab = speculator.draft, speculator.vocab
    row = document(14, len(draft.aux_layer_ids))
    training = read(speculator, row)
    first, drafts = draft.config.first_slot, draft.config.max_speculative_tokens
    assert (first, drafts) == ((0, 4) if from_anchor else (1, 3))
    for anchor in (1, 4, 9):
        states_SH = training.states_ASH[anchor - 1]
        state, by_hand = None, []
        # The anchor is before the first token, also for a first slot that predicts nothing.
        before = [row.input_ids[0, anchor]] * first + [row.input_ids[0, anchor + slot] for slot in range(drafts)]
        for slot, token in enumerate(before):
            vector, state = draft.markov_head.step(states_SH[slot], draft.markov_head.embed(token), state)
            by_hand.append(draft.lm_head(states_SH[slot]) + draft.markov_head.markov_w2.weight @ vector)
        true_ids = vocab.to_draft(row.input_ids[:, anchor + 1 : anchor + 1 + drafts])
        sampler = Forced(true_ids)
        proposal = served(speculator, row, anchor, sampler)
        assert torch.equal(proposal.token_ids_BK, vocab.to_verifier(true_ids))
        for slot in range(drafts):
            torch.testing.assert_close(
                by_hand[first + slot], training.logits_AJD[anchor - 1, slot], atol=1e-5, rtol=1e-5
            )
            torch.testing.assert_close(
                sampler.logits[slot][0], training.logits_AJD[anchor - 1, slot], atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("kind", KINDS)
def test_own_tokens_are_fed_back_as_the_verifiers_ids(kind: str) -> None:
    """Pitfall 22: 8 of 32 tokens; W1 reads the verifier's ids, W2 writes draft ids, all are mapped between."""
    kept = [1, 2, 7, 11, 12, 20, 27, 31]
    shape = verifier_shape(vocab_size=32)
    config = DSparkDraft(**BLOCK, draft_vocab_size=8, markov_head_type=kind).resolve(shape)
    weights = verifier_weights()
    weights = type(weights)(weights.embed_tokens[:32], weights.lm_head[:32], weights.final_norm, norm_eps=1e-6)
    speculator = Speculator.create(config, weights, DraftVocab.from_ids(kept, 32))
    randomize(speculator, 1)
    draft = speculator.draft
    assert draft.markov_head.markov_w1.weight.shape == (32, 6)
    assert draft.markov_head.markov_w2.weight.shape == (8, 6)
    row = pack([[1] * 9], row=9, num_aux=len(draft.aux_layer_ids), seed=3)
    row.input_ids %= 32
    sampler = Likeliest()
    proposal = served(speculator, row, 5, sampler)
    drafted = proposal.token_ids_BK[0].tolist()
    assert set(drafted) <= set(kept)
    # What the head makes of these tokens in training, each as the one before the next, are the logits just shown.
    again = pack([[1] * 10], row=10, num_aux=len(draft.aux_layer_ids), seed=3)
    again.aux_hidden_states[:, :5] = row.aux_hidden_states[:, :5]
    again.input_ids[0, :10] = torch.tensor([*row.input_ids[0, :6].tolist(), *drafted])
    for step, logits in enumerate(training_logits(speculator, again)):
        torch.testing.assert_close(sampler.logits[step][0], logits[4], atol=1e-5, rtol=1e-5)
        assert kept[sampler.logits[step][0].argmax()] == drafted[step]
    # The probabilities are over draft ids, and as a law over the verifier's tokens they sum to 1.
    assert proposal.probs_BKD.shape == (1, 4, 8)
    spread = torch.zeros(4, 32).index_add_(1, torch.tensor(kept), proposal.probs_BKD[0])
    torch.testing.assert_close(spread.sum(-1), torch.ones(4))
    assert set(torch.nonzero(spread.sum(0)).flatten().tolist()) == set(kept)


@pytest.mark.parametrize("from_anchor", LAYOUTS)
@pytest.mark.parametrize("with_markov", [True, False])
def test_confidences_are_those_of_training(with_markov: bool, from_anchor: bool) -> None:
    options = {"confidence_head_with_markov": with_markov, "sample_from_anchor": from_anchor}
    speculator = random_speculator("dspark", **BLOCK, **options)
    row = document(12, len(speculator.draft.aux_layer_ids))
    drafts, anchor = speculator.draft.config.max_speculative_tokens, 6
    sampler = Forced(speculator.vocab.to_draft(row.input_ids[:, anchor + 1 : anchor + 1 + drafts]))
    proposal = served(speculator, row, anchor, sampler)
    expected = read(speculator, row).certainty_AJ[anchor - 1].sigmoid()
    torch.testing.assert_close(proposal.confidence_BK[0], expected, atol=1e-5, rtol=1e-5)
    assert proposal.confidence_BK.dtype == torch.float32


def test_a_draft_without_the_head_has_no_confidences() -> None:
    speculator = random_speculator("dspark", **BLOCK, enable_confidence_head=False)
    row = document(8, len(speculator.draft.aux_layer_ids))
    assert served(speculator, row, 4, Likeliest()).confidence_BK is None


def test_temperatures_divide_the_confidence_logits_and_travel_with_the_directory(tmp_path: Path) -> None:
    speculator = random_speculator("dspark", **BLOCK)
    row = document(8, len(speculator.draft.aux_layer_ids))
    plain = served(speculator, row, 4, Likeliest())
    temperatures = [0.5, 1.0, 2.0, 8.0]
    scaled = calibrated(speculator, temperatures)
    assert speculator.config.confidence_temperatures is None
    assert scaled.draft.fc.weight.data_ptr() == speculator.draft.fc.weight.data_ptr()
    scaled.save_pretrained(tmp_path / "saved", torch.float32)
    loaded = Speculator.from_pretrained(tmp_path / "saved").attach_verifier(verifier_weights())
    expected = (plain.confidence_BK.logit() / torch.tensor(temperatures)).sigmoid()
    for other in (scaled, loaded):
        found = served(other, row, 4, Likeliest())
        torch.testing.assert_close(found.confidence_BK, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(found.token_ids_BK, plain.token_ids_BK)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]
    fewer = served(scaled, row, 4, Likeliest(), num_tokens=2)
    torch.testing.assert_close(fewer.confidence_BK, expected[:, :2], atol=1e-5, rtol=1e-5)


def test_a_fresh_draft_adds_nothing_to_the_backbones_logits() -> None:
    config = DSparkDraft(**BLOCK, draft_vocab_size=None).resolve(verifier_shape())
    speculator = Speculator.create(config, verifier_weights())
    row = document(9, len(speculator.draft.aux_layer_ids))
    sampler = Likeliest()
    served(speculator, row, 5, sampler)
    expected = speculator.draft.lm_head(read(speculator, row).states_ASH[4])
    torch.testing.assert_close(torch.cat(sampler.logits), expected, atol=1e-5, rtol=1e-5)
    assert expected.shape == (4, VOCAB)
    assert speculator.draft.fc.weight.shape[0] == HIDDEN


@torch.no_grad()
@pytest.mark.parametrize("candidates", [1, 3, 16])
def test_the_markov_head_chooses_among_the_heads_likeliest_tokens(candidates: int) -> None:
    """Everything else is -inf, whatever bias the token before gives it."""
    draft = random_speculator("dspark", **BLOCK, sample_from_anchor=True).draft
    draft.num_candidates = candidates
    states_BSH, anchors, sampler = torch.randn(2, 4, HIDDEN), [4, 11], Likeliest()
    drafts = Drafts(draft, sampler, 4)
    draft.choose(states_BSH, torch.tensor(anchors), drafts)
    first, second = draft.markov_head.markov_w1.weight, draft.markov_head.markov_w2.weight
    for row, previous in enumerate(anchors):
        for step in range(4):
            unary = draft.lm_head.weight @ states_BSH[row, step]
            expected = torch.full_like(unary, -torch.inf)
            for token in unary.argsort(descending=True)[:candidates].tolist():
                expected[token] = unary[token] + second[token] @ first[previous]
            torch.testing.assert_close(sampler.logits[step][row], expected, atol=1e-5, rtol=1e-4)
            previous = int(drafts.token_ids[step][row])
