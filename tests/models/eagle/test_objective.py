from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from speculators.errors import UsageError
from speculators.models.draft_model import PackedBatch
from speculators.models.eagle.objective import EagleObjective, align
from speculators.models.family import Count
from speculators.models.speculator import Speculator
from tests.models.drafts import HIDDEN, document_of, gradients, pack, random_speculator, verifier_head
from tests.models.eagle.dense import dense_loss

HEAD = verifier_head()
# A prompt with an answer, one that starts supervised, a hole, an answer at the very end, nothing to learn, two tokens.
MASKS = [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0], [1, 1]]
EVERYTHING = {
    "num_layers": 2,
    "bias": True,
    "qkv_bias": True,
    "embed_layernorm": True,
    "post_embedding_layernorm": True,
}


def near(gradient: Tensor) -> float:
    """What float32 sums in another order may differ by."""
    return 1e-5 * max(1.0, gradient.abs().max().item())


def agrees(speculator: Speculator, batch: PackedBatch, objective: EagleObjective, **dense: object) -> None:
    """Loss, gradients and counts are those of the dense twin."""
    found = objective.step(speculator.draft, batch, HEAD)
    found.loss.backward()
    found_gradients = gradients(speculator.draft)
    expected, counts = dense_loss(speculator, batch, HEAD, **dense)
    expected.backward()
    expected_gradients = gradients(speculator.draft)
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-6)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=near(gradient), msg=name)
    assert {name: tuple(found.metrics[name]) for name in counts} == counts


@pytest.mark.parametrize("options", [{}, {"bias": True}, EVERYTHING], ids=["plain", "bias", "everything"])
def test_regression_and_teacher_distribution_equal_the_dense_twin(options: dict) -> None:
    agrees(random_speculator("eagle", **options), pack(MASKS, row=16), EagleObjective(feature_noise=0.0, chunk_rows=5))


def test_both_parts_of_the_loss_weigh_what_their_knobs_say() -> None:
    speculator, batch = random_speculator("eagle"), pack(MASKS, row=16)
    (regression, _), (both, _) = (dense_loss(speculator, batch, HEAD, token_weight=weight) for weight in (0.0, 1.0))
    objective = EagleObjective(regression_weight=3.0, loss={"soft_ce": 0.5}, feature_noise=0.0)
    found = objective.step(speculator.draft, batch, HEAD).loss
    torch.testing.assert_close(found, 3.0 * regression + 0.5 * (both - regression), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_hass_passes_see_what_drafting_leaves(options: dict) -> None:
    """Pass k from position t is drafting step k after the verified positions 0..t, its inputs taken as constants."""
    speculator = random_speculator("eagle", **options)
    objective = EagleObjective(num_passes=3, loss={"soft_ce": 0.1, "top10_ce": 1.0}, feature_noise=0.0)
    agrees(speculator, pack(MASKS, row=16), objective, steps=3, top_weight=1.0)


def test_the_loss_is_the_sum_over_the_supervised_labels_of_step_0() -> None:
    metrics = EagleObjective(num_passes=3).step(random_speculator("eagle").draft, pack(MASKS, row=16), HEAD).metrics
    # Labels at index 2 + k and later: step 0 counts 4 + 3 + 3 + 1, step 1 has 4 + 2 + 2 + 1, step 2 has 3 + 1 + 2 + 1.
    assert [metrics[f"loss_{k}"].count for k in range(3)] == [11, 9, 7]
    assert metrics["loss"].count == 11
    assert metrics["loss"].sum == pytest.approx(sum(metrics[f"loss_{k}"].sum for k in range(3)), rel=1e-6)


@pytest.mark.parametrize("supervised", range(8))
def test_a_single_supervised_token_is_compared_with_its_own_state_and_distribution(supervised: int) -> None:
    """Pitfall 14: one row is trained, from two positions before the token, towards the state that predicts it."""
    mask = [int(index == supervised) for index in range(8)]
    batch = pack([[0, 0, 1], mask], row=16)
    aligned = align(batch, HEAD)
    places = torch.nonzero(aligned.supervised_C).flatten().tolist()
    if supervised < 2:
        assert (places, aligned.document_lengths) == ([0], [1])
        return
    assert places == [0, 1 + supervised - 2]
    assert aligned.document_lengths == [1, supervised - 1]
    at = places[1]
    assert aligned.token_ids_C[at] == batch.input_ids[0, 3 + supervised - 1]
    states = HEAD.norm(batch.last_hidden_states[0])
    torch.testing.assert_close(aligned.features_CH[at], states[3 + supervised - 2])
    torch.testing.assert_close(aligned.targets_CH[at], states[3 + supervised - 1])
    assert aligned.positions_C[at] == supervised - 2


def test_packed_documents_are_trained_like_each_alone() -> None:
    """Pitfall 17: some start supervised; gradients too; in float64, as random drafts amplify rounding."""
    speculator = random_speculator("eagle", num_layers=2).to("cpu", torch.float64)
    batch = pack(MASKS, row=16).to("cpu", torch.float64)
    objective = EagleObjective(num_passes=3, feature_noise=0.0)
    together = objective.step(speculator.draft, batch, HEAD)
    together.loss.backward()
    packed = gradients(speculator.draft)
    outputs = [objective.step(speculator.draft, document_of(batch, number), HEAD) for number in range(len(MASKS))]
    total = sum(output.loss * (output.metrics["loss"].count + 1e-5) for output in outputs)
    (total / (together.metrics["loss"].count + 1e-5)).backward()
    for name, gradient in gradients(speculator.draft).items():
        torch.testing.assert_close(packed[name], gradient, msg=name)


def test_noise_is_uniform_on_features_alone_and_narrower_in_longer_documents() -> None:
    speculator, batch = random_speculator("eagle"), pack(MASKS, row=16)
    objective = EagleObjective(feature_noise=0.02)
    torch.manual_seed(5)
    # Documents as far as their last supervised prediction, in order: 5, 3, 5, 4 positions.
    drawn = torch.split(torch.rand(17, HIDDEN) - 0.5, [5, 3, 5, 4])
    noise = [torch.zeros(len(mask), HIDDEN) for mask in MASKS]
    for number, part in enumerate(drawn):
        noise[number][: len(part)] = part * 0.02 * 512 / len(MASKS[number])
    torch.manual_seed(5)
    agrees(speculator, batch, objective, noise=noise)
    speculator.draft.eval()
    agrees(speculator, batch, objective)


def test_the_scale_of_the_verifiers_head_is_that_of_both_distributions() -> None:
    speculator, batch = random_speculator("eagle"), pack(MASKS, row=16)
    scaled = replace(HEAD, head=replace(HEAD.head, scale=0.5))
    halved = replace(HEAD, head=replace(HEAD.head, weight=HEAD.head.weight * 0.5))
    objective = EagleObjective(feature_noise=0.0)
    one, other, unscaled = (objective.step(speculator.draft, batch, head).loss for head in (scaled, halved, HEAD))
    torch.testing.assert_close(one, other)
    assert abs(one.item() - unscaled.item()) > 1e-3


@pytest.mark.parametrize("masks", [[[0, 0, 0]], [[1, 1]], [[1]]])
def test_a_batch_with_nothing_to_learn_is_a_zero_that_can_be_differentiated(masks: list[list[int]]) -> None:
    """Nothing to learn is a zero and no NaN (pitfall 23)."""
    speculator = random_speculator("eagle")
    output = EagleObjective(num_passes=2).step(speculator.draft, pack(masks, row=5), HEAD)
    output.loss.backward()
    assert output.loss.item() == 0
    assert set(output.metrics.values()) == {Count(0, 0)}
    assert all((gradient == 0).all() for gradient in gradients(speculator.draft).values())


def test_under_autocast_gradients_are_float32_and_near() -> None:
    speculator, batch = random_speculator("eagle"), pack(MASKS, row=16)
    objective = EagleObjective(num_passes=2, feature_noise=0.0)
    exact = objective.step(speculator.draft, batch, HEAD).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = objective.step(speculator.draft, batch, HEAD.to("cpu", torch.bfloat16)).loss
    rounded.backward()
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05)
    assert {gradient.dtype for gradient in gradients(speculator.draft).values()} == {torch.float32}


def test_knobs_are_checked() -> None:
    with pytest.raises(ValidationError, match="num_passe"):
        EagleObjective(num_passe=2)
    with pytest.raises((ValidationError, UsageError), match="unknown loss"):
        EagleObjective(loss={"smooth": 1.0})
    with pytest.raises(ValidationError, match="feature_noise"):
        EagleObjective(feature_noise=-0.1)
