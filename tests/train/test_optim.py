import math

import pytest
import torch
from torch import nn

from speculators.errors import TrainingError
from speculators.train.config import TrainConfig
from speculators.train.optim import (
    WholeMatrixMuon,
    build_optimizers,
    clip_gradients,
    learning_rate_at,
    schedule_factor,
    set_learning_rate,
)


def test_warm_up_reaches_the_peak_at_its_last_step() -> None:
    factors = [schedule_factor("constant", step, 20, warmup_ratio=0.2) for step in range(20)]
    assert factors == [0.25, 0.5, 0.75, 1.0] + [1.0] * 16


def test_linear_falls_to_zero_behind_the_last_step() -> None:
    factors = [schedule_factor("linear", step, 12, warmup_ratio=1 / 6) for step in range(13)]
    assert factors == pytest.approx([0.5, 1.0, *(1 - done / 10 for done in range(11))])


def test_cosine_is_half_a_period() -> None:
    factors = [schedule_factor("cosine", step, 8, warmup_ratio=0.0) for step in range(9)]
    assert factors == pytest.approx([(1 + math.cos(math.pi * step / 8)) / 2 for step in range(9)])
    assert factors[4] == pytest.approx(0.5)


def test_wsd_is_flat_then_falls_over_its_share_of_the_steps() -> None:
    factors = [schedule_factor("wsd", step, 20, warmup_ratio=0.1, decay_ratio=0.25) for step in range(20)]
    assert factors == pytest.approx([0.5, 1.0, *[1.0] * 13, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_the_rate_is_the_peak_times_the_factor() -> None:
    config = TrainConfig(learning_rate=3e-3, schedule="linear", warmup_ratio=0.0)
    assert learning_rate_at(config, 5, 10) == pytest.approx(1.5e-3)


def test_norms_and_vectors_get_no_weight_decay() -> None:
    layer = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    config = TrainConfig(learning_rate=0.1, weight_decay=0.5)
    optimizers = build_optimizers(layer.named_parameters(), config)
    assert list(optimizers) == ["adamw"]
    before = {name: value.detach().clone() for name, value in layer.named_parameters()}
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers["adamw"].step()
    after = dict(layer.named_parameters())
    torch.testing.assert_close(after["0.weight"].detach(), before["0.weight"] * (1 - 0.1 * 0.5))
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(after[name], before[name])


def test_a_frozen_parameter_is_left_out_and_nothing_to_train_is_an_error() -> None:
    layer = nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    optimizers = build_optimizers(layer.named_parameters(), TrainConfig())
    assert [len(group["params"]) for group in optimizers["adamw"].param_groups] == [1]
    layer.bias.requires_grad_(False)
    with pytest.raises(TrainingError, match="no trainable parameter"):
        build_optimizers(layer.named_parameters(), TrainConfig())


def test_parameters_in_bfloat16_are_refused() -> None:
    # A step below 2^-9 of a bfloat16 weight of 1 rounds back to 1, so that norms would never move.
    """Master weights are float32 and stay so (pitfall 6)."""
    layer = nn.Linear(3, 2).to(torch.bfloat16)
    with pytest.raises(TrainingError, match=r"weight is not float32"):
        build_optimizers(layer.named_parameters(), TrainConfig())


def test_a_norm_moves_at_a_small_rate() -> None:
    """Master weights are float32 and stay so (pitfall 6)."""
    norm = nn.RMSNorm(4)
    optimizers = build_optimizers(norm.named_parameters(), TrainConfig(learning_rate=1e-4))
    for _ in range(100):
        norm.weight.grad = torch.ones(4)
        optimizers["adamw"].step()
    torch.testing.assert_close(norm.weight.detach(), torch.full((4,), 1 - 100 * 1e-4), rtol=0, atol=1e-5)


def test_float32_muon_follows_torch_muon_up_to_its_bfloat16_rounding() -> None:
    torch.manual_seed(0)
    start = torch.randn(12, 20)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = [(ours, WholeMatrixMuon([ours], **options)), (theirs, torch.optim.Muon([theirs], **options))]
    for _ in range(4):
        gradient = torch.randn(12, 20)
        for parameter, optimizer in optimizers:
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved
    for (parameter, optimizer), (_, other) in zip(optimizers, reversed(optimizers), strict=True):
        assert set(optimizer.state[parameter]) == {"momentum_buffer"}
        assert set(optimizer.state_dict()["param_groups"][0]) == set(other.state_dict()["param_groups"][0])


@pytest.mark.parametrize("orthogonalisation", ["newton_schulz", "polar_express"])
def test_muon_orthogonalises_as_the_settings_say(orthogonalisation: str) -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(12, 20), torch.randn(12, 20)
    parameter = nn.Parameter(start.clone())
    settings = TrainConfig(optimizer="muon", ns_steps=3, orthogonalisation=orthogonalisation, learning_rate=0.01)
    optimizer = build_optimizers([("fc.weight", parameter)], settings)["muon"]
    parameter.grad = gradient
    optimizer.step()
    # The first step's momentum is a multiple of the gradient, which is scaled away.
    left, values, right = torch.linalg.svd(gradient, full_matrices=False)
    moved = left.T @ (start - parameter.detach()) @ right.T / (0.01 * 0.2 * 20**0.5)
    if orthogonalisation == "newton_schulz":
        expected = values / values.norm()
        for _ in range(3):
            expected = 3.4445 * expected - 4.775 * expected**3 + 2.0315 * expected**5
        torch.testing.assert_close(moved.diagonal(), expected, rtol=0, atol=0.05)
    else:
        assert 0.65 < moved.diagonal().min() <= moved.diagonal().max() < 1.35


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    class Draft(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(7, 4)
            self.fc = nn.Linear(4, 4)
            self.lm_head = nn.Linear(4, 7, bias=False)

    draft = Draft()
    config = TrainConfig(optimizer="muon", weight_decay=0.1, ns_steps=4)
    optimizers = build_optimizers(draft.named_parameters(), config, {"embed_tokens.weight", "lm_head.weight"})
    assert optimizers["muon"].param_groups[0]["ns_steps"] == 4
    names = {id(parameter): name for name, parameter in draft.named_parameters()}
    taken = {
        kind: {names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]}
        for kind, optimizer in optimizers.items()
    }
    assert taken == {"muon": {"fc.weight"}, "adamw": {"embed_tokens.weight", "lm_head.weight", "fc.bias"}}
    set_learning_rate(optimizers, 0.25)
    assert {group["lr"] for optimizer in optimizers.values() for group in optimizer.param_groups} == {0.25}


def test_muon_moves_a_matrix_by_the_rms_of_an_adamw_step() -> None:
    torch.manual_seed(1)
    parameter = nn.Parameter(torch.zeros(64, 96))
    optimizer = build_optimizers([("fc.weight", parameter)], TrainConfig(optimizer="muon", learning_rate=0.01))["muon"]
    parameter.grad = torch.randn(64, 96)
    optimizer.step()
    # 0.2 sqrt(96) times a semi-orthogonal 64 x 96 matrix, whose RMS is 1 / sqrt(96): 0.2 of the rate.
    assert parameter.pow(2).mean().sqrt().item() == pytest.approx(0.01 * 0.2, rel=0.15)


def test_clip_scales_to_the_norm_and_tells_what_it_was() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([3.0, 4.0, 0.0, 0.0])
    assert clip_gradients([parameter], 1.0) == pytest.approx(5.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8, 0.0, 0.0]), rtol=1e-5, atol=1e-6)


class Whole(nn.Module):
    """A head, a linear map and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.norm = nn.RMSNorm(6)
        self.lm_head = nn.Linear(6, 9, bias=False)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_norms_and_heads_have_their_share_of_the_rate(optimizer: str) -> None:
    torch.manual_seed(0)
    moved: dict[float, dict[str, torch.Tensor]] = {}
    start = Whole().state_dict()
    for norms, heads in ((1.0, 1.0), (0.25, 3.0)):
        draft = Whole()
        draft.load_state_dict(start)
        settings = {"optimizer": optimizer, "norm_rate": norms, "head_rate": heads}
        optimizers = build_optimizers(draft.named_parameters(), TrainConfig(**settings), {"lm_head.weight"})
        set_learning_rate(optimizers, 0.01)
        torch.manual_seed(1)
        for parameter in draft.parameters():
            parameter.grad = torch.randn_like(parameter)
        for one in optimizers.values():
            one.step()
        moved[norms] = {name: value - start[name] for name, value in draft.state_dict().items()}
    shares = {"fc.weight": 1.0, "fc.bias": 0.25, "norm.weight": 0.25, "lm_head.weight": 3.0}
    for name, share in shares.items():
        torch.testing.assert_close(moved[0.25][name], moved[1.0][name] * share, rtol=1e-4, atol=1e-7)
        if name != "fc.weight":
            # The first step of AdamW is the rate in each direction.
            torch.testing.assert_close(moved[1.0][name].abs(), torch.full_like(moved[1.0][name], 0.01))


def test_a_rate_for_what_is_not_trained_is_refused() -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(TrainingError, match=r"head_rate is 2\.0, but the draft trains no heads and embeddings"):
        build_optimizers(layer.named_parameters(), TrainConfig(head_rate=2.0), {"lm_head.weight"})
    matrix = nn.Linear(3, 2, bias=False)
    with pytest.raises(TrainingError, match=r"norm_rate is 0\.5, but the draft trains no norms"):
        build_optimizers(matrix.named_parameters(), TrainConfig(norm_rate=0.5))
