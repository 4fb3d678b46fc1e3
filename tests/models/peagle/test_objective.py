"""P-EAGLE training against its dense twin, and what it must not do: look ahead, mix documents, learn from padding."""

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from speculators.errors import UsageError
from speculators.models.draft_model import PackedBatch
from speculators.models.eagle3.distillation import align
from speculators.models.family import Count
from speculators.models.peagle.depths import sample_anchors
from speculators.models.peagle.draft import PEagleDraft
from speculators.models.peagle.objective import PEagleObjective
from speculators.models.supervision import counted_positions
from tests.models.drafts import document_of, gradients, pack, random_speculator, verifier_head, verifier_shape
from tests.models.peagle.dense import all_elements, dense_loss

HEAD = verifier_head()
# A prompt with an answer, one that starts supervised, a hole, an answer at the very end, nothing to learn, two tokens.
MASKS = [
    [0, 0, 0, 1, 1, 1, 1],
    [1, 1, 1, 1, 1],
    [0, 0, 1, 0, 0, 1, 1, 0],
    [0, 0, 0, 0, 0, 1],
    [0, 0, 0, 0],
    [1, 1],
]
EVERYTHING = PEagleObjective(num_depths=3, down_sample_ratio=1.0, chunk_rows=5)

MIXED = PEagleDraft(num_layers=2, layer_type="qwen3").decoder(verifier_shape()).to_json() | {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 2,
    "use_sliding_window": True,
}
VARIANTS = {
    "two_layers": {"num_layers": 2},
    "one_layer": {"num_layers": 1},
    "qwen3": {"num_layers": 2, "layer_type": "qwen3"},
    "window": {"num_layers": 2, "layer_type": "qwen3", "sliding_window": 3},
    "window_below_depth": {"num_layers": 2, "layer_type": "qwen3", "sliding_window": 1},
    "biases": {"num_layers": 2, "attention_bias": True},
    "residual_unnormed": {"num_layers": 2, "norm_before_residual": False},
    "no_feature_norm": {"num_layers": 2, "norm_before_fc": False},
    "full_vocabulary": {"num_layers": 2, "draft_vocab_size": None},
    "frozen_embeddings": {"num_layers": 2, "embed_requires_grad": False},
    "one_window_of_two_layers": {"num_layers": 2, "config": {"transformer_layer_config": MIXED}},
    "two_features": {"num_layers": 2, "aux_layer_ids": [0, 8]},
    "narrower": {"num_layers": 2, "hidden_size": 16},
}


def compare_with_twin(objective: PEagleObjective, variant: str, elements: list[list[tuple[int, int]]] | None) -> None:
    """Loss, every gradient and all counts; `elements` None: those that the objective draws with seed 5."""
    speculator = random_speculator("peagle", **VARIANTS[variant])
    batch = pack(MASKS, row=16, num_aux=len(speculator.draft.aux_layer_ids))
    torch.manual_seed(5)
    found = objective.step(speculator.draft, batch, HEAD)
    found.loss.backward()
    found_gradients = gradients(speculator.draft)
    expected, counts = dense_loss(speculator, batch, HEAD, elements or drawn(objective, batch))
    expected.backward()
    expected_gradients = gradients(speculator.draft)
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-6)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    for name, (total, count) in counts.items():
        assert tuple(found.metrics[name]) == (pytest.approx(total, rel=1e-4), count), name
    assert found.metrics["loss"].count == sum(count for name, (_, count) in counts.items() if name.startswith("loss_"))


def drawn(objective: PEagleObjective, batch: PackedBatch) -> list[list[tuple[int, int]]]:
    """(anchor, depth) elements per document that are drawn with seed 5."""
    aligned = align(batch)
    counted = counted_positions(aligned.supervised_C, aligned.document_lengths, objective.num_depths)
    torch.manual_seed(5)
    anchors = sample_anchors(
        counted, aligned.document_lengths, objective.down_sample_ratio, objective.down_sample_ratio_min
    )
    # The documents with something to learn come first in MASKS, and in the aligned batch there are no others.
    found, first = [], 0
    for length in aligned.document_lengths:
        here = [
            (place - first, depth) for depth, places in enumerate(anchors) for place in places.tolist()
            if first <= place < first + length
        ]  # fmt: skip
        found.append(here)
        first += length
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_elements_equal_the_dense_twin(variant: str) -> None:
    compare_with_twin(EVERYTHING, variant, [all_elements(mask, 3) for mask in MASKS])


@pytest.mark.parametrize("variant", ["two_layers", "window"])
def test_sampled_elements_equal_the_dense_twin(variant: str) -> None:
    objective = PEagleObjective(num_depths=3, down_sample_ratio=0.6, down_sample_ratio_min=0.4)
    compare_with_twin(objective, variant, None)


def test_elements_of_the_masks_by_hand() -> None:
    metrics = EVERYTHING.step(random_speculator("peagle").draft, pack(MASKS, row=16), HEAD).metrics
    # Labels a + 2 that are supervised: 4 + 3 + 3 + 1. With their successors: 3 + 2 + 1 + 0, and theirs: 2 + 1 + 0 + 0.
    assert [metrics[f"loss_{depth}"].count for depth in range(3)] == [11, 6, 3]
    assert metrics["loss"].count == 20
    assert metrics["loss"].sum == pytest.approx(sum(metrics[f"loss_{depth}"].sum for depth in range(3)), rel=1e-6)


@pytest.mark.parametrize("supervised", range(9))
def test_a_single_supervised_token_is_one_row_of_gradient(supervised: int) -> None:
    """Pitfall 14: ids, teacher and mask are shifted together; a lone token is predicted from two places before."""
    mask = [int(index == supervised) for index in range(9)]
    speculator, states = random_speculator("peagle", num_layers=1), []

    class Recorded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = speculator.draft

        def forward(self, inputs) -> list[Tensor]:
            anchors = [places.tolist() for places in inputs.anchors]
            assert anchors == [[supervised - 2], *[[]] * 7]
            states.extend(self.module(inputs))
            for state in states:
                state.retain_grad()
            return states

    batch = pack([mask], row=9)
    output = PEagleObjective().step(Recorded(), batch, HEAD)
    assert output.metrics["loss"].count == (supervised >= 2)
    if supervised >= 2:
        output.loss.backward()
        assert (states[0].grad.abs().sum(-1) > 0).tolist() == [True]
        # The teacher is the verifier's state at the token before the label.
        ids = speculator.draft.verifier_ids_D
        log_p = HEAD.logits(batch.last_hidden_states[0, supervised - 1])[ids].log_softmax(-1)
        log_q = speculator.draft.lm_head(states[0][0]).log_softmax(-1)
        torch.testing.assert_close(output.loss, (log_p.exp() * (log_p - log_q)).sum(), rtol=1e-5, atol=1e-6)


def test_packed_documents_are_as_if_alone_under_one_generator() -> None:
    """Pitfall 17, with sampling: documents draw one after another, so the order of the draws is the same."""
    speculator, objective = random_speculator("peagle", num_layers=2), PEagleObjective(num_depths=4)
    batch = pack([[1] * 12, [0, *[1] * 9], [0] * 5, [0, 0, 1, 1, 1]], row=24)
    torch.manual_seed(1)
    together = objective.step(speculator.draft, batch, HEAD)
    together.loss.backward()
    packed_gradients = gradients(speculator.draft)
    torch.manual_seed(1)
    outputs = [objective.step(speculator.draft, document_of(batch, n), HEAD) for n in range(4)]
    total = sum(output.loss * output.metrics["loss"].count for output in outputs) / together.metrics["loss"].count
    total.backward()
    torch.testing.assert_close(together.loss, total, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients(speculator.draft).items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    for name, count in together.metrics.items():
        alone = [output.metrics[name] for output in outputs]
        assert count.count == sum(part.count for part in alone)
        assert count.sum == pytest.approx(sum(part.sum for part in alone), rel=1e-5)


def test_another_document_has_no_gradient() -> None:
    """Pitfall 17: what one document learns does not depend on the states of its neighbour."""
    speculator, batch = random_speculator("peagle", num_layers=2), pack([[0] * 6, [1] * 8], row=14)
    batch.aux_hidden_states.requires_grad_()
    batch.loss_mask[0, 6:8] = False
    EVERYTHING.step(speculator.draft, batch, HEAD).loss.backward()
    touched = batch.aux_hidden_states.grad[0].abs().sum(-1) > 0
    assert not touched[:6].any()
    assert touched[6:11].all()


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_everything_stays_finite_with_padding_and_unsupervised_documents(num_layers: int) -> None:
    """Pitfall 23."""
    speculator = random_speculator("peagle", num_layers=num_layers)
    output = PEagleObjective().step(speculator.draft, pack([*MASKS, [0] * 9], row=32), HEAD)
    output.loss.backward()
    assert output.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(speculator.draft).values())


@pytest.mark.parametrize("masks", [[[0, 0, 0]], [[1, 1]], [[1]]])
def test_a_batch_with_nothing_to_learn_is_a_zero_that_can_be_differentiated(masks: list[list[int]]) -> None:
    """Nothing to learn is a zero and no NaN (pitfall 23)."""
    speculator = random_speculator("peagle", num_layers=2)
    output = PEagleObjective().step(speculator.draft, pack(masks, row=5), HEAD)
    output.loss.backward()
    assert output.loss.item() == 0
    assert set(output.metrics.values()) == {Count(0, 0)}
    assert all((gradient == 0).all() for gradient in gradients(speculator.draft).values())


def test_evaluation_keeps_all_elements_and_draws_no_luck() -> None:
    """Gradients and modes of training are what they seem (pitfall 27)."""
    speculator, batch, objective = (
        random_speculator("peagle", num_layers=2),
        pack([[1] * 14], row=14),
        PEagleObjective(),
    )
    torch.manual_seed(0)
    trained = objective.step(speculator.draft, batch, HEAD).metrics
    assert [trained[f"loss_{depth}"].count for depth in range(3)] == [12, int(11 * 0.7), int(10 * 0.49)]
    speculator.draft.eval()
    with torch.no_grad():
        outputs = [objective.step(speculator.draft, batch, HEAD) for _ in range(2)]
    assert outputs[0].metrics == outputs[1].metrics
    assert [outputs[0].metrics[f"loss_{depth}"].count for depth in range(8)] == [12 - depth for depth in range(8)]
    everything = PEagleObjective(down_sample_ratio=1.0).step(speculator.draft.train(), batch, HEAD)
    torch.testing.assert_close(everything.loss.detach(), outputs[0].loss, rtol=1e-5, atol=1e-6)


def test_under_autocast_gradients_are_float32_and_near() -> None:
    speculator, batch = random_speculator("peagle", num_layers=2), pack(MASKS, row=16)
    exact = EVERYTHING.step(speculator.draft, batch, HEAD).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = EVERYTHING.step(speculator.draft, batch, HEAD.to("cpu", torch.bfloat16)).loss
    rounded.backward()
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05)
    assert {gradient.dtype for gradient in gradients(speculator.draft).values()} == {torch.float32}


def test_every_loss_of_the_table_can_be_chosen() -> None:
    speculator, batch = random_speculator("peagle", num_layers=1), pack(MASKS, row=16)
    by_name = {
        name: PEagleObjective(num_depths=3, down_sample_ratio=1.0, loss={name: 1.0}).step(speculator.draft, batch, HEAD)
        for name in ("kl_div", "ce", "tv")
    }
    mixed = PEagleObjective(num_depths=3, down_sample_ratio=1.0, loss={"kl_div": 0.5, "ce": 0.1, "tv": 2.0})
    expected = 0.5 * by_name["kl_div"].loss + 0.1 * by_name["ce"].loss + 2.0 * by_name["tv"].loss
    torch.testing.assert_close(mixed.step(speculator.draft, batch, HEAD).loss, expected, rtol=1e-5, atol=1e-6)


def test_knobs_are_checked() -> None:
    with pytest.raises(ValidationError, match="num_depth\n"):
        PEagleObjective(num_depth=2)
    with pytest.raises((ValidationError, UsageError), match="unknown loss"):
        PEagleObjective(loss={"kl": 1.0})
    for knobs in ({"down_sample_ratio": 0.0}, {"down_sample_ratio": 1.5}, {"down_sample_ratio_min": -0.1}):
        with pytest.raises(ValidationError, match="down_sample_ratio"):
            PEagleObjective(**knobs)
