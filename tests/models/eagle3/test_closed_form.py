"""The regression that training starts from, against numpy and on data whose law is known."""

import numpy as np
import torch

from speculators.formats.verifier_weights import VerifierWeights
from speculators.models.draft_model import Sample
from speculators.models.eagle3.closed_form import RIDGE, closed_form_start
from speculators.models.eagle3.model import Eagle3Model
from speculators.models.losses import VerifierHead
from tests.runtime.parts import random_speculator, random_verifier

HIDDEN = 32


def linear_samples(count: int, seed: int) -> tuple[list[Sample], torch.Tensor]:
    """Samples whose last state at t+1 is a linear map of the normed features of t, which have unequal variances."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3 * HIDDEN, HIDDEN, generator=generator)
    spread = torch.rand(3 * HIDDEN, generator=generator) * 3 + 0.05
    samples = []
    for number in range(count):
        length = 20 + number
        features = torch.randn(length, 3 * HIDDEN, generator=generator) * spread
        normed = features * torch.rsqrt(features.square().mean(-1, keepdim=True) + 1e-5)
        last = torch.randn(length, HIDDEN, generator=generator)
        last[1:] = normed[:-1] @ weight
        mask = torch.arange(length) >= 5
        samples.append(Sample(torch.zeros(length, dtype=torch.int64), mask, features.view(length, 3, HIDDEN), last))
    return samples, weight


def fresh_model(**options: object) -> tuple[Eagle3Model, VerifierHead]:
    verifier = random_verifier(64, hidden_size=HIDDEN)
    draft = random_speculator(verifier, draft_vocab_size=20, **options).draft
    assert isinstance(draft, Eagle3Model)
    return draft, VerifierHead.from_weights(VerifierWeights.from_model(verifier.model))


def first_step_logits(model: Eagle3Model, sample: Sample) -> torch.Tensor:
    """Draft logits of layers that add nothing: the residual goes straight to the final norm and the head."""
    states = model.combine(sample.aux_hidden_states.flatten(1))
    residual = torch.nn.functional.rms_norm(states, (HIDDEN,), model.first_layer.hidden_norm.weight, 1e-5)
    logits: torch.Tensor = model.lm_head(model.norm(residual))
    return logits


def test_a_linear_law_is_found() -> None:
    model, head = fresh_model()
    with torch.no_grad():
        model.first_layer.hidden_norm.weight.fill_(1.0)
    *samples, unseen = linear_samples(61, seed=1)[0]
    assert closed_form_start(model, samples, head, 1_000_000) == sum(int(s.loss_mask[2:].sum()) for s in samples)
    assert model.verifier_ids_D is not None
    teacher = head.restricted(model.verifier_ids_D).logits(unseen.last_hidden_states[1:]).argmax(-1)
    with torch.no_grad():
        hits = first_step_logits(model, unseen)[:-1].argmax(-1) == teacher
    # One of 20 by chance; the target's normalisation keeps the law from being exactly linear.
    assert hits.float().mean() > 0.7
    for layer in model.blocks():
        assert layer.self_attn.o_proj.weight.abs().max() == layer.mlp.down_proj.weight.abs().max() == 0


def test_the_map_is_the_ridge_solution() -> None:
    """fc times the norm's gain equals numpy's solution of the regularised normal equations."""
    model, head = fresh_model()
    samples, _ = linear_samples(12, seed=2)
    closed_form_start(model, samples, head, 1_000_000)
    kept = [s.loss_mask[2:].numpy() for s in samples]
    rows = [s.aux_hidden_states[:-2].flatten(1).double().numpy()[k] for s, k in zip(samples, kept, strict=True)]
    x = np.concatenate([row / np.sqrt((row**2).mean(-1, keepdims=True) + 1e-5) for row in rows])
    y = np.concatenate([s.last_hidden_states[1:-1].double().numpy()[k] for s, k in zip(samples, kept, strict=True)])
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + head.norm_eps)
    gain = 1 / x.std(0)
    scaled = x * gain
    expected = np.linalg.solve(scaled.T @ scaled + RIDGE * len(x) * np.eye(x.shape[1]), scaled.T @ y)
    assert model.input_norm is not None
    np.testing.assert_allclose(model.input_norm.weight.detach(), gain, rtol=1e-4)
    np.testing.assert_allclose(model.fc.weight.detach().T, expected, atol=1e-4)


def test_without_a_norm_the_features_are_taken_as_they_are() -> None:
    model, head = fresh_model(norm_before_fc=False)
    before = model.fc.weight.detach().clone()
    assert closed_form_start(model, linear_samples(5, seed=3)[0], head, 1_000_000) > 0
    assert not torch.equal(model.fc.weight, before)


def test_no_supervised_row_leaves_the_draft_alone() -> None:
    model, head = fresh_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sample = linear_samples(1, seed=4)[0][0]
    sample.loss_mask[:] = False
    assert closed_form_start(model, [sample], head, 100) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_rows_are_bounded() -> None:
    model, head = fresh_model()
    samples, _ = linear_samples(30, seed=5)
    used = closed_form_start(model, samples, head, 40)
    assert 40 <= used < 40 + len(samples[-1].input_ids)
