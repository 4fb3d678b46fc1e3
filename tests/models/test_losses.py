import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from speculators.errors import UsageError
from speculators.models.loss_terms import Distributions
from speculators.models.losses import TERMS, Head, TokenLoss, VerifierHead, argmax, data_cross_entropy
from tests.models.dense_losses import DEFINITIONS, ROWS, dense, logits_of
from tests.models.drafts import verifier_weights

MIXTURES = [{name: 1.0} for name in TERMS] + [{"kl_div": 0.5}, {"ce": 0.1, "tv": 0.9}, {"nla": 2.0, "js": 1.0, "ce": 3}]
MIXTURE_IDS = ["+".join(f"{weight}{name}" for name, weight in weights.items()) for weights in MIXTURES]


def tensors(dtype: torch.dtype = torch.float32, vocab: int = 13) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft states, draft weight, verifier states, verifier weight."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(len(ROWS), 5), (vocab, 5), (7, 5), (vocab, 5)]
    return tuple(torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes)


class Products(TorchDispatchMode):
    """Counts products of matrices, as the operations that they come to."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weights", MIXTURES, ids=MIXTURE_IDS)
def test_no_gradient_is_made_where_none_is_wanted(weights: dict[str, float]) -> None:
    """Both sides' logits are all the products there are; a softcap's gradient would need the draft's once more."""
    hidden, weight, teacher_hidden, teacher_weight = tensors()
    draft, teacher = Head(weight, softcap=5.0), Head(teacher_weight)
    with torch.no_grad(), Products() as products:
        TokenLoss(weights)(hidden, draft, teacher_hidden, teacher, ROWS)
    assert products.count == 2


def test_every_term_has_a_definition_here() -> None:
    assert DEFINITIONS.keys() == TERMS.keys()


@pytest.mark.parametrize("weights", MIXTURES, ids=MIXTURE_IDS)
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_chunks_equal_the_dense_twin(weights: dict[str, float], chunk_rows: int, trained: bool) -> None:
    hidden, weight, teacher_hidden, teacher_weight = tensors()
    draft, teacher = Head(weight.requires_grad_(trained), 1.3, 4.0), Head(teacher_weight, 0.8)
    inputs = [hidden.requires_grad_()] + [weight] * trained
    found = TokenLoss(weights, chunk_rows)(hidden, draft, teacher_hidden, teacher, ROWS)
    expected = dense(weights, hidden, draft, teacher_hidden, teacher)
    torch.testing.assert_close(found.loss, expected, atol=1e-6, rtol=1e-5)
    upstream = torch.linspace(-1, 2, len(ROWS))
    gradients = (torch.autograd.grad(loss, inputs, upstream) for loss in (found.loss, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=3e-6, rtol=1e-5)
    assert torch.equal(found.draft_argmax, logits_of(hidden, draft).argmax(-1))
    assert torch.equal(found.verifier_argmax, logits_of(teacher_hidden, teacher).argmax(-1)[ROWS])
    assert found.total_variation is None
    assert found.cross_entropy is None


@pytest.mark.parametrize("name", TERMS)
def test_each_gradient_is_that_of_its_loss(name: str) -> None:
    """Gradients and modes of training are what they seem (pitfall 27)."""
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(4, 14, generator=generator, dtype=torch.float64).requires_grad_()
    verifier = torch.randn(4, 14, generator=generator, dtype=torch.float64)
    pair = Distributions(draft.detach().log_softmax(-1), verifier.log_softmax(-1), verifier.argmax(-1))
    expected = DEFINITIONS[name](draft.softmax(-1), verifier.softmax(-1))
    torch.testing.assert_close(TERMS[name].loss(pair), expected.detach())
    torch.testing.assert_close(TERMS[name].gradient(pair), torch.autograd.grad(expected.sum(), draft)[0])


# lk_hybrid is left out: its blend is held constant in the gradient, which no difference of losses can do.
@pytest.mark.parametrize("name", [name for name in TERMS if name != "lk_hybrid"])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_row_27_gradients_by_finite_differences(name: str, trained: bool) -> None:
    """Gradients and modes of training are what they seem (pitfall 27)."""
    hidden, weight, teacher_hidden, teacher_weight = tensors(torch.float64)
    loss = TokenLoss({name: 0.7}, chunk_rows=3)
    low_rank = torch.randn(len(weight), 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    wide = torch.cat((hidden, hidden[:, :2].flip(0)), 1).requires_grad_()

    def of_inputs(states: Tensor, main: Tensor, extra: Tensor) -> Tensor:
        draft = Head(main, 0.7, 2.0, low_rank=extra)
        return loss(states, draft, teacher_hidden, Head(teacher_weight), ROWS).loss

    assert torch.autograd.gradcheck(of_inputs, (wide, weight.requires_grad_(trained), low_rank.requires_grad_(trained)))


def test_known_values() -> None:
    pair = Distributions(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[0.5, 0.5]]).log(), torch.tensor([1]))
    expected = {
        "kl_div": 0.5 * math.log(2) + 0.5 * math.log(2 / 3),
        "reverse_kl": 0.25 * math.log(0.5) + 0.75 * math.log(1.5),
        "js": (0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5) + 0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)) / 2,
        "ce": -math.log(0.75),
        "tv": 0.25,
        "nla": -math.log(0.75),
        "soft_ce": -0.5 * math.log(0.25 * 0.75),
    }
    share = math.exp(-3 * 0.75)
    expected["lk_hybrid"] = share * expected["kl_div"] + (1 - share) * 0.25
    assert {name: TERMS[name].loss(pair).item() for name in expected} == pytest.approx(expected)


def test_large_logits_stay_finite() -> None:
    """Nothing to learn is a zero and no NaN (pitfall 23)."""
    hidden, draft, teacher_hidden, teacher = tensors()
    hidden = (1e4 * hidden).requires_grad_()
    for weights in MIXTURES:
        found = TokenLoss(weights)(hidden, Head(draft), teacher_hidden * 1e4, Head(teacher), ROWS).loss
        (gradient,) = torch.autograd.grad(found.sum(), hidden)
        assert found.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("weights", [{"kl_div": 1.0}, {"ce": 1.0}, {"ce": 0.1, "tv": 0.9}, {"js": 1.0}])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_total_variation_and_cross_entropy_beside_any_loss(weights: dict[str, float], trained: bool) -> None:
    hidden, weight, teacher_hidden, teacher_weight = tensors()
    draft, teacher = Head(weight.requires_grad_(trained)), Head(teacher_weight)
    arguments = hidden.requires_grad_(), draft, teacher_hidden, teacher, ROWS
    for asked in ({"with_total_variation": True}, {"with_cross_entropy": True}):
        found = TokenLoss(weights, 3, **asked)(*arguments)
        torch.testing.assert_close(found.loss, TokenLoss(weights, 3)(*arguments).loss)
        for key, name in (("total_variation", "tv"), ("cross_entropy", "ce")):
            value = getattr(found, key)
            if f"with_{key}" in asked:
                expected = dense({name: 1.0}, hidden, draft, teacher_hidden, teacher).detach()
                torch.testing.assert_close(value, expected)
                assert not value.requires_grad
            else:
                assert value is None


def test_a_frozen_and_a_trained_weight_side_by_side() -> None:
    """A head of concatenated weights, as one tensor or as two, trains the one that is not frozen."""
    hidden, main, teacher_hidden, teacher_weight = tensors()
    generator = torch.Generator().manual_seed(1)
    extra = torch.randn(len(main), 3, generator=generator).requires_grad_()
    states = torch.cat((hidden, torch.randn(len(hidden), 3, generator=generator)), 1).requires_grad_()
    upstream = torch.linspace(-1, 2, len(ROWS))
    expected = dense({"tv": 1.0}, states, Head(torch.cat((main, extra), 1)), teacher_hidden, Head(teacher_weight))
    wanted = torch.autograd.grad(expected, (states, extra), upstream)
    for draft in (Head(torch.cat((main, extra), 1)), Head(main, low_rank=extra)):
        torch.testing.assert_close(draft.logits(states), states @ torch.cat((main, extra), 1).T)
        found = TokenLoss({"tv": 1.0}, 2)(states, draft, teacher_hidden, Head(teacher_weight), ROWS).loss
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, (states, extra), upstream), wanted)


def test_the_weight_is_trained_where_the_states_are_not() -> None:
    hidden, weight, teacher_hidden, teacher_weight = tensors()
    draft, teacher = Head(weight.requires_grad_()), Head(teacher_weight)
    found = TokenLoss({"kl_div": 1.0}, 2)(hidden, draft, teacher_hidden, teacher, ROWS).loss
    expected = dense({"kl_div": 1.0}, hidden, draft, teacher_hidden, teacher)
    one, other = (torch.autograd.grad(loss.sum(), weight)[0] for loss in (found, expected))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_draft_rows_in_any_order_and_many_of_one_verifier_row(trained: bool) -> None:
    """One verifier row has more draft rows than a chunk holds."""
    _, weight, teacher_hidden, teacher_weight = tensors()
    generator = torch.Generator().manual_seed(2)
    rows = torch.cat((torch.full((23,), 5), torch.randint(0, 7, (20,), generator=generator)))
    rows = rows[torch.randperm(len(rows), generator=generator)]
    hidden = torch.randn(len(rows), 5, generator=generator).requires_grad_()
    draft, teacher = Head(weight.requires_grad_(trained)), Head(teacher_weight)
    upstream = torch.randn(len(rows), generator=generator)
    inputs = [hidden] + [weight] * trained
    for weights in ({"kl_div": 1.0}, {"ce": 1.0}, {"reverse_kl": 1.0}):
        found = TokenLoss(weights, 2)(hidden, draft, teacher_hidden, teacher, rows)
        expected = dense(weights, hidden, draft, teacher_hidden, teacher, rows)
        torch.testing.assert_close(found.loss, expected)
        gradients = (torch.autograd.grad(loss, inputs, upstream) for loss in (found.loss, expected))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, atol=3e-6, rtol=1e-5)
        assert torch.equal(found.draft_argmax, logits_of(hidden, draft).argmax(-1))


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_nothing_to_compare(trained: bool) -> None:
    """Nothing to learn is a zero and no NaN (pitfall 23)."""
    _, weight, teacher_hidden, teacher_weight = tensors()
    draft, hidden = Head(weight.requires_grad_(trained)), torch.empty(0, 5).requires_grad_()
    none = torch.empty(0, dtype=torch.int64)
    for states in (teacher_hidden, teacher_hidden[:0]):
        found = TokenLoss({"kl_div": 1.0}, with_total_variation=True)(hidden, draft, states, Head(teacher_weight), none)
        assert found.loss.shape == found.draft_argmax.shape == found.total_variation.shape == (0,)
        losses = found.loss, data_cross_entropy(hidden, draft, none)[0]
        for loss in losses:
            gradients = torch.autograd.grad(loss.sum(), [hidden] + [weight] * trained)
            assert gradients[0].shape == (0, 5)
            assert all(torch.equal(gradient, torch.zeros_like(weight)) for gradient in gradients[1:])


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_data_cross_entropy_is_torchs(chunk_rows: int, trained: bool) -> None:
    hidden, weight, *_ = tensors()
    draft = Head(weight.requires_grad_(trained), 1.3, 4.0)
    labels = torch.tensor([12, 0, 3, 3, 7, 1, 0, 12])
    loss, best = data_cross_entropy(hidden.requires_grad_(), draft, labels, chunk_rows)
    expected = F.cross_entropy(logits_of(hidden, draft), labels, reduction="none")
    torch.testing.assert_close(loss, expected)
    assert torch.equal(best, logits_of(hidden, draft).argmax(-1))
    upstream = torch.linspace(-1, 2, len(labels))
    for one, other in zip(
        *(torch.autograd.grad(value, [hidden] + [weight] * trained, upstream) for value in (loss, expected)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_data_cross_entropy_by_finite_differences() -> None:
    """Gradients and modes of training are what they seem (pitfall 27)."""
    hidden, weight, *_ = tensors(torch.float64)
    labels = torch.tensor([12, 0, 3, 3, 7, 1, 0, 12])

    def of_inputs(states: Tensor, main: Tensor) -> Tensor:
        return data_cross_entropy(states, Head(main, 0.7, 2.0), labels, 3)[0]

    assert torch.autograd.gradcheck(of_inputs, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("weights", [{"kl_div": 1.0}, {"ce": 1.0}, {"nla": 1.0, "reverse_kl": 0.5}])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_under_autocast_products_are_bfloat16_and_the_loss_float32(weights: dict[str, float], trained: bool) -> None:
    hidden, weight, teacher_hidden, teacher_weight = tensors(vocab=64)
    draft, teacher = Head(weight.requires_grad_(trained)), Head(teacher_weight)
    inputs = [hidden.requires_grad_()] + [weight] * trained
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = TokenLoss(weights, 3)(hidden, draft, teacher_hidden, teacher, ROWS)
    expected = dense(weights, hidden, draft, teacher_hidden, teacher)
    torch.testing.assert_close(found.loss, expected, atol=0.05, rtol=0.05)
    gradients = (torch.autograd.grad(loss.sum(), inputs) for loss in (found.loss, expected))
    for one, other in zip(*gradients, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=0.1, rtol=0.1)
    exact = TokenLoss(weights)(hidden, draft, teacher_hidden, teacher, ROWS).loss
    assert not torch.equal(found.loss, exact)


def test_bfloat16_tensors_keep_their_dtype() -> None:
    hidden, weight, teacher_hidden, teacher_weight = (tensor.bfloat16() for tensor in tensors(vocab=64))
    draft, teacher = Head(weight.requires_grad_()), Head(teacher_weight)
    found = TokenLoss({"js": 1.0}, 2, with_total_variation=True)(
        hidden.requires_grad_(), draft, teacher_hidden, teacher, ROWS
    )
    found.loss.sum().backward()
    assert found.loss.dtype == found.total_variation.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    wide = [tensor.detach().float() for tensor in (hidden, weight, teacher_hidden, teacher_weight)]
    for tensor in wide[:2]:
        tensor.requires_grad_()
    dense({"js": 1.0}, wide[0], Head(wide[1]), wide[2], Head(wide[3])).sum().backward()
    torch.testing.assert_close(hidden.grad.float(), wide[0].grad, atol=0.02, rtol=0.05)
    torch.testing.assert_close(weight.grad.float(), wide[1].grad, atol=0.02, rtol=0.05)


def test_argmax_by_blocks_is_argmax() -> None:
    for vocab in (64, 640, 100):
        logits = torch.randn(20, vocab, generator=torch.Generator().manual_seed(vocab))
        logits[3] = -5.0
        logits[3, 0] = logits[4, vocab - 1] = 9.0
        assert torch.equal(argmax(logits), logits.argmax(-1))


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation's result had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("one_verifier_row", [False, True])
def test_no_tokens_by_vocabulary_tensor_ever_exists(trained: bool, one_verifier_row: bool) -> None:
    rows, vocab, size, chunk_rows = 2048, 512, 8, 16
    hidden = torch.randn(rows, size).requires_grad_()
    draft, teacher = Head(torch.randn(vocab, size).requires_grad_(trained)), Head(torch.randn(vocab, size))
    index = torch.zeros(rows, dtype=torch.int64) if one_verifier_row else torch.arange(rows)
    with LargestTensor() as largest:
        for weights in ({"kl_div": 1.0}, {"ce": 1.0}, {"js": 1.0, "tv": 1.0}):
            TokenLoss(weights, chunk_rows)(hidden, draft, torch.randn(rows, size), teacher, index).loss.sum().backward()
        data_cross_entropy(hidden, draft, torch.arange(rows) % vocab, chunk_rows)[0].sum().backward()
    assert chunk_rows * vocab <= largest.elements <= 4 * chunk_rows * vocab


def test_without_gradients_the_losses_are_the_same() -> None:
    hidden, weight, teacher_hidden, teacher_weight = tensors()
    for weights in ({"kl_div": 1.0}, {"ce": 1.0}, {"js": 1.0}):
        arguments = hidden.requires_grad_(), Head(weight), teacher_hidden, Head(teacher_weight), ROWS
        with torch.no_grad():
            found = TokenLoss(weights)(*arguments).loss
        assert not found.requires_grad
        assert torch.equal(found, TokenLoss(weights)(*arguments).loss)


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, teacher_hidden, teacher_weight = tensors()
    loss = TokenLoss({"ce": 1.0})(
        hidden.requires_grad_(), Head(weight), teacher_hidden, Head(teacher_weight), ROWS
    ).loss
    (gradient,) = torch.autograd.grad(loss.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"klx": 1.0}, "unknown loss klx; expected weights for kl_div, reverse_kl, js, ce, tv, lk_hybrid, nla"),
        ({}, "none"),
        ({"ce": 0.0}, "loss ce has weight 0.0; expected a positive number, or no ce at all"),
        ({"ce": -1.0}, "positive"),
        ({"tv": math.nan}, "positive"),
        ({"tv": math.inf}, "positive"),
    ],
)
def test_bad_loss_weights_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TokenLoss(weights)


def test_tensors_that_do_not_fit_are_refused() -> None:
    hidden, weight, teacher_hidden, teacher_weight = tensors()
    draft, teacher, loss = Head(weight), Head(teacher_weight), TokenLoss({"ce": 1.0})
    with pytest.raises(UsageError, match="draft head over 13 tokens, verifier head over 12: restrict"):
        loss(hidden, draft, teacher_hidden, Head(teacher_weight[:12]), ROWS)
    with pytest.raises(UsageError, match=r"verifier rows 0\.\.6 asked for; there are 6"):
        loss(hidden, draft, teacher_hidden[:6], teacher, ROWS)
    with pytest.raises(UsageError, match=r"verifier rows -1\.\."):
        loss(hidden, draft, teacher_hidden, teacher, ROWS - 1)
    with pytest.raises(UsageError, match=r"hidden states \[7, 5\]; expected \[8, 5\]"):
        loss(hidden[:7], draft, teacher_hidden, teacher, ROWS)
    with pytest.raises(UsageError, match=r"hidden states \[8, 5\]; expected \[8, 7\]"):
        loss(hidden, Head(weight, low_rank=weight[:, :2]), teacher_hidden, teacher, ROWS)
    with pytest.raises(UsageError, match="chunks of 0 rows"):
        TokenLoss({"ce": 1.0}, 0)(hidden, draft, teacher_hidden, teacher, ROWS)
    for labels in (torch.full((8,), 13), torch.full((8,), -100)):
        with pytest.raises(UsageError, match="for a head over 13 tokens; leave out rows without a label"):
            data_cross_entropy(hidden, draft, labels)


def test_verifier_head_is_final_norm_scale_and_softcap() -> None:
    """States are those before the final norm, and say so (pitfall 1)."""
    weights = verifier_weights()
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + weights.norm_eps)
    plain = VerifierHead.from_weights(weights)
    torch.testing.assert_close(plain.logits(states), F.linear(normed * weights.final_norm, weights.lm_head))
    changed = vars(weights) | {"plus_one": True, "softcap": 3.0, "scale": 0.5}
    capped = VerifierHead.from_weights(type(weights)(**changed)).logits(states)
    raw = 0.5 * F.linear(normed * (1 + weights.final_norm), weights.lm_head)
    torch.testing.assert_close(capped, 3.0 * torch.tanh(raw / 3.0))
    ids = torch.tensor([7, 2, 30])
    torch.testing.assert_close(plain.restricted(ids).logits(states), plain.logits(states)[:, ids])
