"""What every family must keep; a new family is tested here by being in the table.

A family adds two things below: options that reach its branches, and how its training forward yields logits.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculators.errors import FormatError
from speculators.models import FAMILIES
from speculators.models.draft_model import DraftContext, PackedBatch
from speculators.models.eagle3.objective import align
from speculators.models.eagle3.unroll import Unroll
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from tests.models.drafts import document_of, gradients, pack, random_speculator, verifier_weights

DEPTH = 3
VARIANTS: dict[str, dict[str, dict]] = {
    "eagle3": {
        "plain": {},
        "qwen3_window": {"layer_type": "qwen3", "sliding_window": 4},
        "three_layers": {"num_layers": 3, "norm_output": False},
        "two_features_biases": {"aux_layer_ids": [1, 8], "attention_bias": True, "norm_before_residual": False},
        "fc_norm_full_vocabulary": {"fc_norm": True, "norm_before_fc": False, "draft_vocab_size": None},
        "llama3_rope": {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    }
}
FLAGS: dict[str, list[dict]] = {
    "eagle3": [
        {"norm_before_residual": False},
        {"norm_before_fc": False},
        {"norm_before_fc": False, "fc_norm": True},
        {"norm_output": False},
        {"sliding_window": 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ]
}


def eagle3_logits(speculator: Speculator, batch: PackedBatch) -> list[Tensor]:
    """Logits [T - 2 - k, D] of one document at every step, position by position."""
    aligned = align(batch)
    length = len(aligned.token_ids_C)
    slots = [torch.arange(length - step) for step in range(DEPTH)]
    inputs = Unroll(aligned.features_CX, aligned.token_ids_C, aligned.positions_C, aligned.document_lengths, slots)
    return [speculator.draft.lm_head(state) for state in speculator.draft(inputs)]


TRAINING_LOGITS: dict[str, Callable[[Speculator, PackedBatch], list[Tensor]]] = {"eagle3": eagle3_logits}
CASES = [(family, variant) for family in FAMILIES for variant in VARIANTS[family]]


class Forced:
    """A sampler that takes the data's tokens, row by row, and keeps the logits it was shown."""

    def __init__(self, draft_ids_BK: Tensor) -> None:
        self.draft_ids_BK = draft_ids_BK
        self.logits: list[Tensor] = []

    def __call__(self, logits_BD: Tensor, step: int) -> tuple[Tensor, None]:
        self.logits.append(logits_BD.clone())
        return self.draft_ids_BK[:, step], None


def whole(length: int, speculator: Speculator, seed: int) -> PackedBatch:
    """One document of this length, all of it supervised."""
    return pack([[1] * length], row=length, num_aux=len(speculator.draft.aux_layer_ids), seed=seed)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_config_round_trips_and_refuses_unknown_keys(family: str, variant: str) -> None:
    config = random_speculator(family, **VARIANTS[family][variant]).config
    written = config.to_json()
    assert type(config).from_json(written).to_json() == written
    assert "model_type" not in written
    assert written["speculators_model_type"] == family
    with pytest.raises(FormatError, match="surprise"):
        type(config).from_json({**written, "surprise": 1})


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_every_tensor_is_accounted_for_and_survives_saving_bit_by_bit(
    family: str, variant: str, tmp_path: Path
) -> None:
    speculator = random_speculator(family, **VARIANTS[family][variant])
    expected = speculator.config.expected_tensors()
    tensors = speculator.draft.state_dict()
    required = {name for name, spec in expected.items() if spec.required}
    assert required <= tensors.keys() <= expected.keys()
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: expected[name].shape for name in tensors
    }
    speculator.save_pretrained(tmp_path / "saved", dtype=torch.float32)
    loaded = Speculator.from_pretrained(tmp_path / "saved").attach_verifier(verifier_weights())
    assert loaded.config.to_json() == {**speculator.config.to_json(), "dtype": "float32"}
    for name, tensor in loaded.draft.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_training_logits_are_those_of_serving(family: str, variant: str) -> None:
    """Two requests of different lengths, prefilled in chunks, drafting, then going on over their stale drafts."""
    speculator = random_speculator(family, **VARIANTS[family][variant])
    documents = [whole(length, speculator, seed) for length, seed in ((17, 5), (13, 6))]
    expected = [TRAINING_LOGITS[family](speculator, document) for document in documents]
    vocab, cache = speculator.vocab, speculator.draft.make_cache(4)
    starts = [0, 0]
    # Lengths of what each request has verified, per call: chunked prefill, one request resting, several at once.
    for lengths, num_tokens in (((3, 1), 0), ((2, 2), DEPTH), ((0, 1), DEPTH), ((2, 1), 1), ((4, 3), DEPTH)):
        width = max(lengths)
        context = DraftContext(
            token_ids_BT=torch.zeros(2, width, dtype=torch.int64),
            aux_hidden_states_BTX=torch.full((2, width, documents[0].aux_hidden_states.shape[-1]), 7.0),
            last_hidden_states_BTH=None,
            starts=list(starts),
            lengths=list(lengths),
            cache=cache,
            rows=slice(1, 3),
        )
        forced = torch.zeros(2, DEPTH, dtype=torch.int64)
        for row, (document, start, length) in enumerate(zip(documents, starts, lengths, strict=True)):
            context.token_ids_BT[row, :length] = document.input_ids[0, start + 1 : start + length + 1]
            context.aux_hidden_states_BTX[row, :length] = document.aux_hidden_states[0, start : start + length]
            following = document.input_ids[0, start + length + 1 :][:DEPTH]
            forced[row, : len(following)] = vocab.to_draft(following)
        sampler = Forced(forced)
        proposal = speculator.draft.propose(context, num_tokens, sampler)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        assert torch.equal(proposal.token_ids_BK, vocab.to_verifier(forced[:, :num_tokens]))
        assert proposal.lengths_B.tolist() == [num_tokens if length else 0 for length in lengths]
        for row in range(2):
            for step in range(num_tokens if lengths[row] else 0):
                slot = starts[row] - 1
                torch.testing.assert_close(
                    sampler.logits[step][row], expected[row][step][slot], atol=1e-4, rtol=1e-4, msg=f"{row} {step}"
                )


@pytest.mark.parametrize("family", FAMILIES)
def test_probabilities_of_a_sampled_proposal_stay_with_their_rows(family: str) -> None:
    speculator = random_speculator(family)
    document = whole(6, speculator, 3)

    def sampler(logits_BD: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return logits_BD.argmax(-1), logits_BD.softmax(-1)

    context = DraftContext(
        document.input_ids[:, 1:].repeat(2, 1),
        document.aux_hidden_states[:, :-1].repeat(2, 1, 1),
        None,
        [0, 0],
        [5, 3],
        speculator.draft.make_cache(2),
        slice(0, 2),
    )
    proposal = speculator.draft.propose(context, DEPTH, sampler)
    assert proposal.probs_BKD.shape == (2, DEPTH, speculator.vocab.draft_size)
    assert torch.equal(speculator.vocab.to_verifier(proposal.probs_BKD.argmax(-1)), proposal.token_ids_BK)
    assert speculator.vocab.t2d[proposal.token_ids_BK].all()


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_two_packed_documents_are_each_alone(family: str, variant: str) -> None:
    speculator = random_speculator(family, **VARIANTS[family][variant])
    num_aux = len(speculator.draft.aux_layer_ids)
    batch = pack([[1] * 7, [0, 1, 1, 0, 1]], row=14, num_aux=num_aux)
    objective, head = FAMILIES[family].objective(), VerifierHead.from_weights(verifier_weights())
    together = objective.step(speculator.draft, batch, head)
    alone = [objective.step(speculator.draft, document_of(batch, number), head) for number in (0, 1)]
    for name, count in together.metrics.items():
        assert count.count == sum(output.metrics[name].count for output in alone), name
        assert count.sum == pytest.approx(sum(output.metrics[name].sum for output in alone), rel=1e-5), name


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_no_position_sees_its_future_or_another_document(family: str, variant: str) -> None:
    speculator = random_speculator(family, **VARIANTS[family][variant])
    document = whole(9, speculator, 4)
    document.aux_hidden_states.requires_grad_()
    other = random_speculator(family, **VARIANTS[family][variant])
    assert other.draft.state_dict().keys() == speculator.draft.state_dict().keys()
    for step, logits in enumerate(TRAINING_LOGITS[family](speculator, document)):
        for slot in range(len(logits)):
            (gradient,) = torch.autograd.grad(logits[slot].sum(), document.aux_hidden_states, retain_graph=True)
            touched = gradient[0].abs().sum(-1) > 0
            assert not touched[slot + 1 :].any(), (step, slot)
            assert touched[slot]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_token_changes_no_earlier_logits(family: str) -> None:
    speculator = random_speculator(family)
    document = whole(9, speculator, 4)
    before = TRAINING_LOGITS[family](speculator, document)
    changed = document.input_ids.clone()
    changed[0, 6] = speculator.vocab.to_verifier((speculator.vocab.to_draft(changed[0, 6]) + 1) % 8)
    document.input_ids = changed
    for step, (one, other) in enumerate(zip(before, TRAINING_LOGITS[family](speculator, document), strict=True)):
        # The logits of slot t at step k have read tokens up to t + 1 + k.
        same = (one == other).all(-1).tolist()
        assert same == [slot + 1 + step < 6 for slot in range(len(one))]


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_every_trained_parameter_gets_a_gradient_and_no_frozen_one(family: str, variant: str) -> None:
    speculator = random_speculator(family, **VARIANTS[family][variant])
    batch = pack([[0, 0, *[1] * 9]], row=12, num_aux=len(speculator.draft.aux_layer_ids))
    head = VerifierHead.from_weights(verifier_weights())
    FAMILIES[family].objective().step(speculator.draft, batch, head).loss.backward()
    trained = {name for name, parameter in speculator.draft.named_parameters() if parameter.requires_grad}
    found = gradients(speculator.draft)
    assert found.keys() == trained
    # A bias of the keys moves all scores of a query alike only as far as positions agree, so it has a gradient too.
    assert {name for name, gradient in found.items() if gradient.abs().max() == 0} == set()
    assert {"embed_tokens.weight", "lm_head.weight"}.isdisjoint(trained)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_flag_changes_the_logits(family: str) -> None:
    kind = {"layer_type": "qwen3"}
    plain = random_speculator(family, **kind)
    document = whole(9, plain, 4)
    expected = TRAINING_LOGITS[family](plain, document)
    for flags in FLAGS[family]:
        changed = random_speculator(family, **kind, **flags)
        shared = {
            name: tensor for name, tensor in plain.draft.state_dict().items() if name in changed.draft.state_dict()
        }
        changed.draft.load_state_dict(shared, strict=False)
        found = TRAINING_LOGITS[family](changed, document)
        differences = [(one - other).abs().max().item() for one, other in zip(expected, found, strict=True)]
        assert max(differences) > 1e-3, flags
