"""Triton's kernels, in its interpreter, against autograd on dense logits."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from speculators.models.execution import Execution
from speculators.models.loss_choice import LossChoice, LossKind
from speculators.models.losses import Head, TokenLoss, TokenLosses, data_cross_entropy
from tests.models.dense_losses import dense, logits_of
from tests.models.drafts import gradients, pack, verifier_head
from tests.models.pitfalls import draft_of, every_family, objective_of

TRITON = LossChoice("triton")
# One column, less than the smallest block, whole ones, and more than a program handles at a time.
VOCABULARIES = [1, 13, 64, 5001]
ROWS = torch.tensor([4, 0, 3, 3, 6, 4, 4, 1])
FUSED = [{"kl_div": 1.0}, {"ce": 1.0}]
IDS = ["kl_div", "ce"]
trained_or_frozen = pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])


def tensors(vocab: int, rows: int = len(ROWS), size: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft states, draft weight, verifier states, verifier weight."""
    generator = torch.Generator().manual_seed(vocab + rows)
    shapes = [(rows, size), (vocab, size), (7, size), (vocab, size)]
    return tuple(torch.randn(*shape, generator=generator) for shape in shapes)


def require_equal_gradients(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """By rows that weigh differently."""
    upstream = torch.linspace(-1, 2, len(found))
    pairs = (torch.autograd.grad(loss, inputs, upstream) for loss in (found, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weights", FUSED, ids=IDS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@trained_or_frozen
def test_losses_and_gradients_are_those_of_dense_logits(
    weights: dict[str, float], vocab: int, chunk_rows: int, trained: bool
) -> None:
    hidden, weight, teacher_hidden, teacher_weight = tensors(vocab)
    draft, teacher = Head(weight.requires_grad_(trained), 1.3), Head(teacher_weight, 0.8)
    loss = TokenLoss(weights, chunk_rows, choice=TRITON)
    found = loss(hidden.requires_grad_(), draft, teacher_hidden, teacher, ROWS)
    expected = dense(weights, hidden, draft, teacher_hidden, teacher, ROWS)
    torch.testing.assert_close(found.loss, expected, atol=1e-5, rtol=1e-5)
    require_equal_gradients(found.loss, expected, [hidden] + [weight] * trained)
    assert torch.equal(found.draft_argmax, logits_of(hidden, draft).argmax(-1))
    assert torch.equal(found.verifier_argmax, logits_of(teacher_hidden, teacher).argmax(-1)[ROWS])
    assert (found.total_variation, found.cross_entropy) == (None, None)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@trained_or_frozen
def test_the_datas_cross_entropy_is_torchs(vocab: int, chunk_rows: int, trained: bool) -> None:
    hidden, weight, *_ = tensors(vocab)
    draft = Head(weight.requires_grad_(trained), 1.3)
    labels = torch.tensor([vocab - 1, 0, 3, 3, 7, 1, 0, 12]) % vocab
    loss, best = data_cross_entropy(hidden.requires_grad_(), draft, labels, chunk_rows, TRITON)
    expected = F.cross_entropy(logits_of(hidden, draft), labels, reduction="none")
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    require_equal_gradients(loss, expected, [hidden] + [weight] * trained)
    assert torch.equal(best, logits_of(hidden, draft).argmax(-1))


def test_labels_may_be_a_column_of_others() -> None:
    """Next to each label lies another one, which is not read; one token for all rows lies in memory once."""
    hidden, weight, *_ = tensors(13)
    columns = torch.stack((torch.arange(8), torch.arange(8) + 5), 1)
    for labels in (columns[:, 0], columns[:, 1], torch.tensor([3]).expand(8)):
        loss, _ = data_cross_entropy(hidden, Head(weight), labels, 3, TRITON)
        torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, labels, reduction="none"))


@pytest.mark.parametrize("vocab", [13, 64])
@trained_or_frozen
def test_heads_with_a_softcap(vocab: int, trained: bool) -> None:
    """Draft and verifier have different ones, which many logits come near."""
    hidden, weight, teacher_hidden, teacher_weight = tensors(vocab)
    draft, teacher = Head(weight.requires_grad_(trained), 1.3, 2.0), Head(teacher_weight, 0.8, 3.0)
    inputs = [hidden.requires_grad_()] + [weight] * trained
    for weights in FUSED:
        found = TokenLoss(weights, 3, choice=TRITON)(hidden, draft, teacher_hidden, teacher, ROWS).loss
        expected = dense(weights, hidden, draft, teacher_hidden, teacher, ROWS)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        require_equal_gradients(found, expected, inputs)
    labels = ROWS + 6
    found, _ = data_cross_entropy(hidden, draft, labels, 3, TRITON)
    expected = F.cross_entropy(logits_of(hidden, draft), labels, reduction="none")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    require_equal_gradients(found, expected, inputs)


@pytest.mark.parametrize("weights", FUSED, ids=IDS)
def test_heads_of_two_weights_train_either(weights: dict[str, float]) -> None:
    hidden, main, teacher_hidden, teacher_weight = tensors(13)
    generator = torch.Generator().manual_seed(1)
    extra = torch.randn(len(main), 3, generator=generator).requires_grad_()
    states = torch.cat((hidden, torch.randn(len(hidden), 3, generator=generator)), 1).requires_grad_()
    for frozen in (False, True):
        joined = Head(torch.cat((main, extra), 1), 0.7)
        expected = dense(weights, states, joined, teacher_hidden, Head(teacher_weight), ROWS)
        draft = Head(main, 0.7, low_rank=extra.detach() if frozen else extra)
        loss = TokenLoss(weights, 2, choice=TRITON)
        found = loss(states, draft, teacher_hidden, Head(teacher_weight), ROWS).loss
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        require_equal_gradients(found, expected, [states] if frozen else [states, extra])


@pytest.mark.parametrize("weights", FUSED, ids=IDS)
@trained_or_frozen
def test_draft_rows_in_any_order_and_many_of_one_verifier_row(weights: dict[str, float], trained: bool) -> None:
    """One verifier row has more draft rows than a chunk holds."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.cat((torch.full((23,), 5), torch.randint(0, 7, (20,), generator=generator)))
    rows = rows[torch.randperm(len(rows), generator=generator)]
    hidden, weight, teacher_hidden, teacher_weight = tensors(13, len(rows))
    draft, teacher = Head(weight.requires_grad_(trained)), Head(teacher_weight)
    loss = TokenLoss(weights, 2, choice=TRITON)
    found = loss(hidden.requires_grad_(), draft, teacher_hidden, teacher, rows)
    expected = dense(weights, hidden, draft, teacher_hidden, teacher, rows)
    torch.testing.assert_close(found.loss, expected, atol=1e-5, rtol=1e-5)
    require_equal_gradients(found.loss, expected, [hidden] + [weight] * trained)
    assert torch.equal(found.draft_argmax, logits_of(hidden, draft).argmax(-1))


@pytest.mark.parametrize("count", [0, 1])
@trained_or_frozen
def test_no_rows_and_a_single_one(count: int, trained: bool) -> None:
    hidden, weight, teacher_hidden, teacher_weight = tensors(13, count)
    draft, teacher = Head(weight.requires_grad_(trained)), Head(teacher_weight)
    rows = ROWS[:count]
    for weights in FUSED:
        loss = TokenLoss(weights, with_cross_entropy=True, choice=TRITON)
        found = loss(hidden.requires_grad_(), draft, teacher_hidden, teacher, rows)
        expected = dense(weights, hidden, draft, teacher_hidden, teacher, rows)
        assert found.loss.shape == found.draft_argmax.shape == found.cross_entropy.shape == (count,)
        torch.testing.assert_close(found.loss, expected, atol=1e-5, rtol=1e-5)
        require_equal_gradients(found.loss, expected, [hidden] + [weight] * trained)
    loss_N, best_N = data_cross_entropy(hidden, draft, rows, choice=TRITON)
    torch.testing.assert_close(loss_N, F.cross_entropy(hidden @ weight.T, rows, reduction="none"))
    assert best_N.shape == (count,)


@trained_or_frozen
def test_what_is_reported_besides(trained: bool) -> None:
    hidden, weight, teacher_hidden, teacher_weight = tensors(64)
    draft, teacher = Head(weight.requires_grad_(trained)), Head(teacher_weight)
    arguments = hidden.requires_grad_(), draft, teacher_hidden, teacher, ROWS
    both = TokenLoss({"kl_div": 1.0}, 3, with_total_variation=True, with_cross_entropy=True, choice=TRITON)(*arguments)
    label = TokenLoss({"ce": 1.0}, 3, with_cross_entropy=True, choice=TRITON)(*arguments)
    expected = {name: dense({name: 1.0}, *arguments).detach() for name in ("tv", "ce")}
    torch.testing.assert_close(both.total_variation, expected["tv"], atol=1e-5, rtol=1e-5)
    for found in (both, label):
        torch.testing.assert_close(found.cross_entropy, expected["ce"], atol=1e-5, rtol=1e-5)
        assert not found.cross_entropy.requires_grad
    assert label.total_variation is None


@pytest.mark.parametrize("name", ["kl_div", "ce", "labels"])
def test_of_bfloat16_logits_the_loss_is_exact_and_the_gradient_rounded_once(name: str) -> None:
    """By a logit it is off by 2^-7 of itself at most (a GPU rounds to 2^-8, the interpreter cuts off)."""
    hidden, weight, teacher_hidden, teacher_weight = (tensor.bfloat16() for tensor in tensors(150))
    draft, teacher = Head(weight), Head(teacher_weight)
    logits, teacher_logits = (hidden @ weight.T).float().requires_grad_(), (teacher_hidden @ teacher_weight.T).float()
    if name == "labels":
        found, best = data_cross_entropy(hidden.requires_grad_(), draft, ROWS, 3, TRITON)
        expected = F.cross_entropy(logits, ROWS, reduction="none")
    else:
        made = TokenLoss({name: 1.0}, 3, choice=TRITON)(hidden.requires_grad_(), draft, teacher_hidden, teacher, ROWS)
        found, best = made.loss, made.draft_argmax
        # Identity matrices for heads: the hidden states are the logits themselves.
        eye = Head(torch.eye(150))
        expected = dense({name: 1.0}, logits, eye, teacher_logits, eye, ROWS)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(best, logits.argmax(-1))
    (by_logits,) = torch.autograd.grad(expected.sum(), logits)
    (by_states,) = torch.autograd.grad(found.sum(), hidden)
    exact = by_logits @ weight.float()
    bound = 2**-7 * (by_logits.abs() @ weight.float().abs()) + 2**-8 * exact.abs() + 1e-5
    assert ((by_states.float() - exact).abs() <= bound).all()


@pytest.mark.parametrize("weights", FUSED, ids=IDS)
def test_under_autocast_products_are_bfloat16_and_the_loss_float32(weights: dict[str, float]) -> None:
    hidden, weight, teacher_hidden, teacher_weight = tensors(64)
    draft, teacher = Head(weight.requires_grad_()), Head(teacher_weight)
    results: list[tuple[TokenLosses, tuple[Tensor, ...]]] = []
    for choice in (LossChoice("torch"), TRITON):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = TokenLoss(weights, 3, choice=choice)(hidden.requires_grad_(), draft, teacher_hidden, teacher, ROWS)
        assert made.loss.dtype is torch.float32
        results.append((made, torch.autograd.grad(made.loss.sum(), (hidden, weight))))
    (plain, expected), (fused, found) = results
    torch.testing.assert_close(fused.loss, plain.loss, atol=1e-5, rtol=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("weights", FUSED, ids=IDS)
def test_large_logits_stay_finite_and_what_is_no_number_is_not_hidden(weights: dict[str, float]) -> None:
    hidden, weight, teacher_hidden, teacher_weight = tensors(13)
    loss = TokenLoss(weights, 3, choice=TRITON)
    large = (1e4 * hidden).requires_grad_()
    found = loss(large, Head(weight), 1e4 * teacher_hidden, Head(teacher_weight), ROWS).loss
    expected = TokenLoss(weights, 3)(large, Head(weight), 1e4 * teacher_hidden, Head(teacher_weight), ROWS).loss
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.autograd.grad(found.sum(), large)[0].isfinite().all()
    broken = hidden.clone()
    broken[2] = torch.nan
    broken.requires_grad_()
    made = loss(broken, Head(weight), teacher_hidden, Head(teacher_weight), ROWS)
    (gradient,) = torch.autograd.grad(made.loss.sum(), broken)
    others = torch.arange(len(ROWS)) != 2
    assert made.loss.isnan().tolist() == gradient.isnan().all(-1).tolist() == (~others).tolist()
    assert made.loss[others].isfinite().all()
    assert gradient[others].isfinite().all()
    assert ((made.draft_argmax >= 0) & (made.draft_argmax < 13)).all()


class LargeTensors(TorchDispatchMode):
    """Counts, by operation, results that are as large as a chunk's logits and have memory of their own."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            large = isinstance(tensor, Tensor) and tensor.numel() >= self.elements
            if large and tensor.untyped_storage().data_ptr() not in given:
                self.found.append(func.__name__)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_rows_by_vocabulary_but_the_products(dtype: torch.dtype) -> None:
    vocab, rows = 256, 32
    hidden, weight, *_ = (tensor.to(dtype) for tensor in tensors(vocab, rows, size=4))
    hidden.requires_grad_()
    with LargeTensors(rows * vocab) as large:
        TokenLoss({"kl_div": 1.0}, rows, choice=TRITON)(
            hidden, Head(weight), hidden.detach(), Head(weight), torch.arange(rows)
        ).loss.sum().backward()
        assert large.found == ["mm.default", "mm.default"]
        data_cross_entropy(hidden, Head(weight), torch.arange(rows), rows, TRITON)[0].sum().backward()
        assert large.found == ["mm.default"] * 3


class Products(TorchDispatchMode):
    """Counts products of matrices, and the most of them that lie in memory at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            # Triton's interpreter leaves cycles behind that hold what kernels were given.
            gc.collect()
            self.made.append(StorageWeakRef(out.untyped_storage()))
            self.most = max(self.most, sum(not product.expired() for product in self.made))
        return out


@pytest.mark.parametrize(("name", "together"), [("kl_div", 2), ("ce", 1)])
def test_products_are_kept_as_long_as_they_are_compared(name: str, together: int) -> None:
    """Of a verifier whose likeliest token is the label, none lie beside the draft's."""
    hidden, weight, *_ = tensors(256, 32)
    with torch.no_grad(), Products() as products:
        TokenLoss({name: 1.0}, 32, choice=TRITON)(hidden, Head(weight), hidden, Head(weight), torch.arange(32))
    assert (len(products.made), products.most) == (2, together)


# What of an objective's knobs gives every family a loss that has kernels.
KNOBS = {"eagle": {"loss": {"kl_div": 1.0}}}


class Counting(LossChoice):
    """Says how often it was asked."""

    asked_for = 0

    def is_fused(self, kind: LossKind, run: Callable[[bool], object]) -> bool:
        self.asked_for += 1
        return super().is_fused(kind, run)


@every_family
def test_a_training_step_by_triton_is_the_one_by_torch(family: str) -> None:
    speculator, results = draft_of(family), []
    batch = pack([[1] * 13, [0, 0, 0, *[1] * 10]], row=26, num_aux=len(speculator.draft.aux_layer_ids))
    objective = objective_of(family, **KNOBS.get(family, {}))
    for losses in ("torch", "triton"):
        speculator.draft.execute(Execution(losses=losses))
        objective.require_possible(speculator.draft.execution)
        speculator.draft.loss_choice = choice = Counting(losses)
        torch.manual_seed(0)
        output = objective.step(speculator.draft.train(), batch, verifier_head())
        output.loss.backward()
        results.append((output, gradients(speculator.draft)))
        assert choice.asked_for > 0
    (plain, expected), (fused, found) = results
    assert plain.metrics["loss"].count > 0
    torch.testing.assert_close(fused.loss, plain.loss, atol=1e-5, rtol=1e-5)
    assert fused.metrics.keys() == plain.metrics.keys()
    for name, (total, count) in fused.metrics.items():
        assert (total, count) == pytest.approx(tuple(plain.metrics[name]), rel=1e-5, abs=1e-5), name
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """To machine code of two generations, which needs none of them here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.models.compile_kernels"]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3 * 3
    assert {line[-1] for line in lines} == {"cubin"}
