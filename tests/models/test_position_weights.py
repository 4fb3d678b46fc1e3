import math

import pytest
import torch

from speculators.models.losses import Head, TokenLoss
from speculators.models.position_weights import dpace, exponential_decay, step_decay


def test_step_decay_is_a_power_of_the_step() -> None:
    torch.testing.assert_close(step_decay(4, 0.8), torch.tensor([1.0, 0.8, 0.64, 0.512]))
    assert step_decay(3, 1.0).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("first", "gamma"), [(0, 4.0), (1, 7.0), (2, 0.5)])
def test_exponential_decay_starts_at_its_first_slot(first: int, gamma: float) -> None:
    expected = [0.0 if slot < first else math.exp(-(slot - first) / gamma) for slot in range(6)]
    assert exponential_decay(6, gamma, first).tolist() == pytest.approx(expected)


def dpace_by_loops(cross_entropy: list[float], mask: list[bool], alpha: float) -> list[float]:
    """The published sums, one slot at a time."""
    weights = []
    for slot, counted in enumerate(mask):
        total = 0.0
        for end in range(slot, len(mask)):
            product = 1.0
            for before in range(end + 1):
                product *= (1 - alpha) * math.exp(-cross_entropy[before]) + alpha if mask[before] else 1.0
            total += product if mask[end] else 0.0
        weights.append(total if counted else 0.0)
    return weights


@pytest.mark.parametrize("alpha", [0.3, 0.5, 1.0])
def test_dpace_is_its_sum_of_products(alpha: float) -> None:
    """Over blocks that are whole, that end early, that have holes and that count nothing."""
    generator = torch.Generator().manual_seed(0)
    cross_entropy = (3 * torch.rand(6, 8, generator=generator)).requires_grad_()
    mask = torch.rand(6, 8, generator=generator) < 0.7
    mask[0], mask[1, 5:], mask[2] = True, False, False
    mask[:, 0] &= torch.arange(6) < 3
    found = dpace(cross_entropy, mask, alpha)
    rows = zip(cross_entropy.tolist(), mask.tolist(), strict=True)
    expected = torch.tensor([dpace_by_loops(*row, alpha) for row in rows])
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad


def test_dpace_of_two_slots_by_hand() -> None:
    """Confidences 1/2 and 1/4, smoothed by half to 3/4 and 5/8."""
    cross_entropy = torch.tensor([[math.log(2), math.log(4)]])
    both, second = torch.tensor([[True, True]]), torch.tensor([[False, True]])
    assert dpace(cross_entropy, both).tolist()[0] == pytest.approx([3 / 4 + 15 / 32, 15 / 32])
    assert dpace(cross_entropy, second).tolist()[0] == pytest.approx([0.0, 5 / 8])


def test_dpace_is_the_slope_of_the_expected_accepted_length() -> None:
    """With alpha near 0, the weight of slot j is the derivative of sum over m of c_0 ... c_m by log c_j."""
    cross_entropy = torch.tensor([[0.3, 1.0, 0.1, 2.0]], dtype=torch.float64).requires_grad_()
    length = torch.exp(-cross_entropy).cumprod(-1).sum()
    (slope,) = torch.autograd.grad(length, cross_entropy)
    found = dpace(cross_entropy, torch.ones(1, 4, dtype=torch.bool), alpha=1e-9)
    torch.testing.assert_close(found.double(), -slope, atol=1e-6, rtol=1e-6)


def test_cross_entropies_of_a_token_loss_feed_dpace() -> None:
    """Whatever the loss is, the confidences are q of the verifier's likeliest token."""
    generator = torch.Generator().manual_seed(0)
    draft, states = torch.randn(9, 4, generator=generator), torch.randn(6, 4, generator=generator)
    loss = TokenLoss({"kl_div": 1.0}, with_cross_entropy=True)
    found = loss(states, Head(draft), states.flip(0), Head(draft), torch.arange(6)).cross_entropy
    labels = (states.flip(0) @ draft.T).argmax(-1)
    expected = -(states @ draft.T).log_softmax(-1)[torch.arange(6), labels]
    rows = [dpace_by_loops(row, [True] * 3, 0.5) for row in expected.view(2, 3).tolist()]
    weights = dpace(found.view(2, 3), torch.ones(2, 3, dtype=torch.bool))
    torch.testing.assert_close(weights, torch.tensor(rows))
