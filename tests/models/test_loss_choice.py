"""What chooses between torch and Triton for a loss: what is asked for, what there is, and what was measured."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from speculators.errors import UsageError
from speculators.models.chunked_loss import RowLosses
from speculators.models.eagle.objective import EagleObjective
from speculators.models.execution import Execution
from speculators.models.loss_choice import LossChoice, LossKind, Measurement
from speculators.models.losses import Head, TokenLoss, data_cross_entropy
from tests.models.pitfalls import objective_of
from tests.models.test_fused_losses import ROWS, TRITON, tensors


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        ({"js": 1.0}, "1.0 js"),
        ({"kl_div": 0.5}, "0.5 kl_div"),
        ({"kl_div": 1.0, "ce": 1.0}, r"1.0 kl_div \+ 1.0 ce"),
        ({"ce": 1.0}, "1.0 ce"),
    ],
)
def test_kernels_asked_for_a_loss_without_one_are_refused(weights: dict[str, float], name: str) -> None:
    """With the total variation, which the kernel of labels cannot tell."""
    message = f"the loss {name} has no Triton kernel; .*train.losses"
    with pytest.raises(UsageError, match=message):
        TokenLoss(weights, with_total_variation=True, choice=TRITON)
    for asked in ("auto", "torch"):
        assert TokenLoss(weights, with_total_variation=True, choice=LossChoice(asked)).fused is None


def test_an_objective_says_so_before_its_first_step() -> None:
    with pytest.raises(UsageError, match=r"0\.1 soft_ce has no Triton kernel"):
        EagleObjective().require_possible(Execution(losses="triton"))
    mixed = objective_of("dflash", loss={"kl_div": 1.0, "ce": 1.0}, position_weights="dpace")
    with pytest.raises(UsageError, match=r"1\.0 ce has no Triton kernel"):
        mixed.require_possible(Execution(losses="triton"))
    apart = objective_of("dflash", loss={"kl_div": 0.5}, position_weights="dpace")
    apart.require_possible(Execution(losses="triton"))
    for family in ("medusa", "mlp_speculator", "mtp", "eagle3", "peagle", "dflash", "dflash2", "dspark"):
        objective_of(family).require_possible(Execution(losses="triton"))


def test_kernels_compute_in_float32_alone() -> None:
    hidden, weight, *_ = (tensor.double() for tensor in tensors(13))
    with pytest.raises(UsageError, match=r"'triton' of torch\.float64; its kernels compute in float32"):
        data_cross_entropy(hidden, Head(weight), ROWS, choice=TRITON)


def test_auto_keeps_what_is_measured_to_be_faster_on_a_gpu(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind once; the stopwatch here runs what it is given, and says what the test wants to hear."""
    times, runs = iter([3.0, 1.0, 1.0, 3.0]), []

    def stopwatch(run: Callable[[], object]) -> float:
        run()
        return next(times)

    monkeypatch.setenv("CC", sys.executable)
    caplog.set_level(logging.INFO)
    choice = LossChoice("auto", stopwatch)
    kind = LossKind("kl_div", torch.device("cuda"), torch.bfloat16, 150_000)
    assert [choice.is_fused(kind, runs.append) for _ in range(3)] == [True] * 3
    assert runs == [False, True]
    other = replace(kind, vocabulary=100)
    assert [choice.is_fused(other, runs.append) for _ in range(2)] == [False, False]
    assert choice.is_fused(kind, runs.append)
    assert len(runs) == 4
    expected = Measurement("kl_div", 150_000, "bfloat16", 3.0, 1.0), Measurement("kl_div", 100, "bfloat16", 1.0, 3.0)
    assert choice.news() == list(expected)
    assert choice.news() == []
    assert (
        "kl_div over 150000 tokens in bfloat16 takes 3.000 ms by torch and 1.000 ms by Triton; taken: triton"
        in (caplog.messages[0])
    )
    assert caplog.messages[1].endswith("taken: torch")


def test_nothing_is_measured_where_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(run: Callable[..., object]) -> float:
        raise AssertionError

    gpu = LossKind("kl_div", torch.device("cuda"), torch.bfloat16, 100)
    assert not LossChoice("auto", never).is_fused(replace(gpu, device=torch.device("cpu")), never)
    assert not LossChoice("auto", never).is_fused(replace(gpu, dtype=torch.float64), never)
    # Without a C compiler Triton launches nothing.
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not LossChoice("auto", never).is_fused(gpu, never)
    assert not LossChoice("torch", never).is_fused(gpu, never)
    assert LossChoice("triton", never).is_fused(gpu, never)
    # Without a choice to remember it, a measurement would be made at every call.
    assert TokenLoss({"kl_div": 1.0}).choice.asked == "torch"
    hidden, weight, *_ = tensors(13)
    made = TokenLoss({"kl_div": 1.0}, choice=LossChoice("auto", never))
    made(hidden, Head(weight), hidden, Head(weight), torch.arange(8))


class Sampling(LossChoice):
    """Takes torch's operations after it has seen both do the sample of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[LossKind, RowLosses, RowLosses]] = []

    def is_fused(self, kind: LossKind, run: Callable[[bool], Any]) -> bool:
        self.seen.append((kind, run(False), run(True)))
        return False


def test_what_is_measured_is_the_first_chunk_with_its_gradient() -> None:
    hidden, weight, teacher_hidden, teacher_weight = tensors(13)
    arguments = hidden.requires_grad_(), Head(weight, 1.3), teacher_hidden, Head(teacher_weight), ROWS
    choice = Sampling()
    found = TokenLoss({"kl_div": 1.0}, 2, with_total_variation=True, choice=choice)(*arguments)
    expected = TokenLoss({"kl_div": 1.0}, 2, with_total_variation=True)(*arguments)
    assert torch.equal(found.loss, expected.loss)
    ((kind, plain, fused),) = choice.seen
    assert kind == LossKind("kl_div", torch.device("cpu"), torch.float32, 13)
    # Five verifier rows are compared with something; the first chunk has one of them, with one draft row.
    first = ROWS == 0
    torch.testing.assert_close(plain.loss_R, expected.loss[first].detach())
    for one, other in ((plain.loss_R, fused.loss_R), (plain.gradient_RD, fused.gradient_RD)):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert plain.found.keys() == fused.found.keys() == {"draft_argmax", "verifier_argmax", "total_variation"}
