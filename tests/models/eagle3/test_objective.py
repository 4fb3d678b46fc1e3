import pytest
import torch
from pydantic import ValidationError

from speculators.errors import UsageError
from speculators.models.draft_model import PackedBatch
from speculators.models.eagle3.distillation import align
from speculators.models.eagle3.draft import Eagle3Draft
from speculators.models.eagle3.objective import Eagle3Objective
from speculators.models.family import Count
from speculators.models.losses import VerifierHead
from speculators.models.supervision import schedule
from tests.models.drafts import document_of, gradients, pack, random_speculator, verifier_shape, verifier_weights
from tests.models.eagle3.dense import dense_loss

HEAD = VerifierHead.from_weights(verifier_weights())
# A prompt with an answer, one that starts supervised, a hole, an answer at the very end, nothing to learn, two tokens.
MASKS = [
    [0, 0, 0, 1, 1, 1, 1],
    [1, 1, 1, 1, 1],
    [0, 0, 1, 0, 0, 1, 1, 0],
    [0, 0, 0, 0, 0, 1],
    [0, 0, 0, 0],
    [1, 1],
]

MIXED = Eagle3Draft(num_layers=2, layer_type="qwen3").decoder(verifier_shape()).to_json() | {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 2,
    "use_sliding_window": True,
}
VARIANTS = {
    "plain": {},
    "qwen3": {"layer_type": "qwen3"},
    "window": {"layer_type": "qwen3", "sliding_window": 3},
    "biases": {"attention_bias": True},
    "two_layers": {"num_layers": 2},
    "three_qwen3_layers_window": {"num_layers": 3, "layer_type": "qwen3", "sliding_window": 2},
    "residual_unnormed": {"norm_before_residual": False},
    "fc_norm": {"norm_before_fc": False, "fc_norm": True},
    "no_feature_norm": {"norm_before_fc": False},
    "prenorm_recycled": {"norm_output": False},
    "full_vocabulary": {"draft_vocab_size": None},
    "two_features": {"aux_layer_ids": [0, 8]},
    "one_window_of_two_layers": {"num_layers": 2, "config": {"transformer_layer_config": MIXED}},
    "trained_embeddings": {"embed_requires_grad": True},
    "narrower": {"hidden_size": 16, "norm_output": False},
    "narrower_full_vocabulary": {"hidden_size": 16, "draft_vocab_size": None, "num_layers": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_supervised_rows_only_equal_the_dense_twin(variant: str) -> None:
    speculator = random_speculator(**VARIANTS[variant])
    batch = pack(MASKS, row=16, num_aux=len(speculator.draft.aux_layer_ids))
    objective = Eagle3Objective(ttt_steps=3, step_decay=0.7, chunk_rows=5)
    found = objective.step(speculator.draft, batch, HEAD)
    found.loss.backward()
    found_gradients = gradients(speculator.draft)
    expected, counts = dense_loss(speculator, batch, HEAD, steps=3, decay=0.7)
    expected.backward()
    expected_gradients = gradients(speculator.draft)
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-6)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert {name: tuple(found.metrics[name]) for name in counts} == counts


def test_counts_of_the_loss_are_those_of_the_supervised_labels() -> None:
    metrics = Eagle3Objective().step(random_speculator().draft, pack(MASKS, row=16), HEAD).metrics
    # Labels at index 2 + k and later: step 0 counts 4 + 3 + 3 + 1, step 1 has 4 + 2 + 2 + 1, step 2 has 3 + 1 + 2 + 1.
    assert [metrics[f"loss_{k}"].count for k in range(3)] == [11, 9, 7]
    assert metrics["loss"].count == 11
    weighted = sum(0.8**k * metrics[f"loss_{k}"].sum for k in range(3))
    assert metrics["loss"].sum == pytest.approx(weighted, rel=1e-6)


@pytest.mark.parametrize("supervised", range(8))
def test_a_single_supervised_token_is_predicted_from_the_right_places(supervised: int) -> None:
    """Pitfall 14: ids, teacher and mask are shifted together, wherever the one token stands."""
    mask = [int(index == supervised) for index in range(8)]
    aligned = align(pack([[0, 0, 1], mask], row=16))
    tokens_before = 2  # of the first document, positions up to its last supervised prediction: one
    slots, counted = schedule(aligned.supervised_C, aligned.document_lengths, 3)
    first = aligned.document_lengths[0]
    assert first == tokens_before - 1
    for step in range(3):
        found = [slot - first for slot in slots[step][counted[step][slots[step]]].tolist() if slot >= first]
        # Slot t at step k predicts token t + 2 + k.
        assert found == ([supervised - 2 - step] if supervised - 2 - step >= 0 else [])


def test_step_inputs_are_the_tokens_and_states_that_serving_has() -> None:
    batch = pack([[0, 0, 0, 1, 1, 1]], row=10)
    aligned = align(batch)
    # Token 5 is the last label; predicting it takes token 4, beside the features of token 3.
    assert torch.equal(aligned.token_ids_C, batch.input_ids[0, 1:5])
    assert torch.equal(aligned.features_CX, batch.aux_hidden_states[0, :4])
    assert torch.equal(aligned.last_hidden_states_CH, batch.last_hidden_states[0, 1:5])
    assert torch.equal(aligned.positions_C, torch.arange(4))
    assert aligned.supervised_C.tolist() == [False, True, True, True]


def test_one_supervised_token_gives_one_row_of_gradient_a_step() -> None:
    """Pitfall 14."""
    speculator = random_speculator()
    mask = [0, 0, 0, 0, 0, 1, 0, 0]
    states: list[torch.Tensor] = []

    class Recorded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = speculator.draft

        def forward(self, inputs):
            states.extend(self.module(inputs))
            for state in states:
                state.retain_grad()
            return states

    Eagle3Objective().step(Recorded(), pack([mask], row=8), HEAD).loss.backward()
    last_norms = [state.grad.abs().sum(-1) for state in states]
    # Steps 0, 1, 2 predict token 5 from the slots 3, 2, 1; slots that are recycled onwards are active earlier too.
    assert [len(norms) for norms in last_norms] == [3, 2, 1]
    assert all((norms > 0).sum() == len(norms) for norms in last_norms)


@pytest.mark.parametrize("ttt_steps", [1, 2, 3])
def test_packed_documents_are_as_if_alone(ttt_steps: int) -> None:
    """Pitfall 17; the second document of MASKS starts supervised."""
    speculator, objective = random_speculator(num_layers=2), Eagle3Objective(ttt_steps=ttt_steps)
    batch = pack(MASKS, row=16)
    together = objective.step(speculator.draft, batch, HEAD)
    together.loss.backward()
    packed_gradients = gradients(speculator.draft)
    outputs = [objective.step(speculator.draft, document_of(batch, n), HEAD) for n in range(len(MASKS))]
    total = sum(output.loss * output.metrics["loss"].count for output in outputs) / together.metrics["loss"].count
    total.backward()
    torch.testing.assert_close(together.loss, total, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients(speculator.draft).items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    for name, count in together.metrics.items():
        alone = [output.metrics[name] for output in outputs]
        assert count.count == sum(part.count for part in alone)
        assert count.sum == pytest.approx(sum(part.sum for part in alone), rel=1e-5)


@pytest.mark.parametrize("ttt_steps", [1, 2, 3])
def test_another_document_has_no_gradient(ttt_steps: int) -> None:
    """Pitfall 17: what one document learns does not depend on the states of its neighbours."""
    batch = pack([[0] * 5, [1] * 6, [0] * 5], row=16)
    batch.aux_hidden_states.requires_grad_()
    Eagle3Objective(ttt_steps=ttt_steps).step(random_speculator().draft, batch, HEAD).loss.backward()
    touched = batch.aux_hidden_states.grad[0].abs().sum(-1) > 0
    # The last two positions of a document predict nothing in it.
    assert touched.tolist() == [False] * 5 + [True] * 4 + [False] * 7


def test_equal_ids_of_neighbouring_rows_are_different_documents() -> None:
    batch = pack([[0, 0, 1, 1], [0, 0, 1, 1]], row=4)
    batch.document_ids[:] = 0
    assert align(batch).document_lengths == [2, 2]


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_everything_stays_finite_with_padding_and_unsupervised_documents(num_layers: int) -> None:
    """Pitfall 23."""
    speculator = random_speculator(num_layers=num_layers)
    output = Eagle3Objective().step(speculator.draft, pack([*MASKS, [0] * 9], row=32), HEAD)
    output.loss.backward()
    assert output.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(speculator.draft).values())


@pytest.mark.parametrize("masks", [[[0, 0, 0]], [[1, 1]], [[1]]])
def test_a_batch_with_nothing_to_learn_is_a_zero_that_can_be_differentiated(masks: list[list[int]]) -> None:
    """Nothing to learn is a zero and no NaN (pitfall 23)."""
    speculator = random_speculator()
    output = Eagle3Objective().step(speculator.draft, pack(masks, row=5), HEAD)
    output.loss.backward()
    assert output.loss.item() == 0
    assert set(output.metrics.values()) == {Count(0, 0)}
    assert all((gradient == 0).all() for gradient in gradients(speculator.draft).values())


def test_under_autocast_gradients_are_float32_and_near() -> None:
    speculator, batch = random_speculator(), pack(MASKS, row=16)
    exact = Eagle3Objective().step(speculator.draft, batch, HEAD).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = Eagle3Objective().step(speculator.draft, batch, HEAD.to("cpu", torch.bfloat16)).loss
    rounded.backward()
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05)
    assert {gradient.dtype for gradient in gradients(speculator.draft).values()} == {torch.float32}


def test_validation_under_no_grad_gives_the_same_numbers() -> None:
    speculator, batch = random_speculator(), pack(MASKS, row=16)
    training = Eagle3Objective().step(speculator.draft, batch, HEAD)
    with torch.no_grad():
        validation = Eagle3Objective().step(speculator.draft, batch, HEAD)
    assert not validation.loss.requires_grad
    assert validation.loss.item() == pytest.approx(training.loss.item(), rel=1e-5)


def test_teacher_is_the_verifier_over_the_kept_tokens_even_if_the_draft_head_is_not_its() -> None:
    speculator, batch, objective = random_speculator(), pack(MASKS, row=16), Eagle3Objective()
    before = objective.step(speculator.draft, batch, HEAD).loss
    with torch.no_grad():
        speculator.draft.lm_head.weight = torch.nn.Parameter(2 * speculator.draft.lm_head.weight, requires_grad=False)
    found = objective.step(speculator.draft, batch, HEAD).loss
    expected, _ = dense_loss(speculator, batch, HEAD, steps=3, decay=0.8)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert abs(found.item() - before.item()) > 1e-3


def test_knobs_are_checked() -> None:
    with pytest.raises(ValidationError, match="ttt_step"):
        Eagle3Objective(ttt_step=2)
    with pytest.raises((ValidationError, UsageError), match="unknown loss"):
        Eagle3Objective(loss={"kl": 1.0})
    with pytest.raises(ValidationError, match="step_decay"):
        Eagle3Objective(step_decay=0.0)


def test_batches_move_and_count() -> None:
    batch = pack(MASKS, row=16)
    assert batch.num_tokens == sum(map(len, MASKS))
    moved = batch.to("cpu", torch.bfloat16)
    assert isinstance(moved, PackedBatch)
    assert moved.aux_hidden_states.dtype == moved.last_hidden_states.dtype == torch.bfloat16
    assert moved.input_ids.dtype == torch.int64
