import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.errors import UsageError
from speculators.models.losses import TERMS, Head, TokenLoss, VerifierHead, argmax
from tests.models.drafts import verifier_weights

ROWS = torch.tensor([4, 0, 3, 3, 6, 4, 4, 1])  # verifier rows 2 and 5 are compared with nothing


def tensors(dtype: torch.dtype = torch.float32, vocab: int = 11) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(len(ROWS), 5), (vocab, 5), (7, 5), (vocab, 5)]
    return tuple(torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes)


def definition(name: str, q: Tensor, p: Tensor) -> Tensor:
    """The losses as sums over probabilities, row by row."""
    if name == "kl_div":
        return (p * (p.log() - q.log())).sum(-1)
    if name == "ce":
        return -q.log()[torch.arange(len(q)), p.argmax(-1)]
    return (p - q).abs().sum(-1) / 2


def dense(weights: dict[str, float], hidden: Tensor, draft: Tensor, teacher_hidden: Tensor, teacher: Tensor) -> Tensor:
    q = (hidden @ draft.T).softmax(-1)
    p = (teacher_hidden @ teacher.T).softmax(-1)[ROWS]
    return sum(weight * definition(name, q, p) for name, weight in weights.items())


MIXTURES = [{"kl_div": 1.0}, {"kl_div": 0.5}, {"ce": 1.0}, {"tv": 1.0}, {"ce": 0.1, "tv": 0.9, "kl_div": 2.0}]


@pytest.mark.parametrize("weights", MIXTURES, ids=lambda weights: "+".join(weights))
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_chunks_equal_the_dense_twin(weights: dict[str, float], chunk_rows: int) -> None:
    hidden, draft, teacher_hidden, teacher = tensors()
    hidden.requires_grad_()
    found = TokenLoss(weights, chunk_rows)(hidden, Head(draft), teacher_hidden, Head(teacher), ROWS)
    expected = dense(weights, hidden, draft, teacher_hidden, teacher)
    torch.testing.assert_close(found.loss, expected, atol=1e-6, rtol=1e-5)
    upstream = torch.linspace(-1, 2, len(ROWS))
    one, other = (torch.autograd.grad(loss, hidden, upstream)[0] for loss in (found.loss, expected))
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert torch.equal(found.draft_argmax, (hidden @ draft.T).argmax(-1))
    assert torch.equal(found.verifier_argmax, (teacher_hidden @ teacher.T).argmax(-1)[ROWS])


@pytest.mark.parametrize("name", TERMS)
def test_each_gradient_is_that_of_its_loss(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(4, 9, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    loss, gradient = TERMS[name](draft.detach().log_softmax(-1), teacher.log_softmax(-1))
    expected = definition(name, draft.softmax(-1), teacher.softmax(-1))
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), draft)[0])


def test_the_hidden_gradient_by_finite_differences() -> None:
    hidden, draft, teacher_hidden, teacher = tensors(torch.float64)
    loss = TokenLoss({"ce": 0.3, "tv": 1.0}, chunk_rows=3)
    heads = Head(draft, scale=0.7, softcap=2.0), Head(teacher)

    def of_hidden(value: Tensor) -> Tensor:
        return loss(value, heads[0], teacher_hidden, heads[1], ROWS).loss

    assert torch.autograd.gradcheck(of_hidden, hidden.requires_grad_())


def test_known_values() -> None:
    q, p = torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert TERMS["kl_div"](q, p)[0].item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert TERMS["tv"](q, p)[0].item() == pytest.approx(0.25)
    assert TERMS["ce"](q, torch.tensor([[0.4, 0.6]]).log())[0].item() == pytest.approx(-math.log(0.75))


def test_large_logits_stay_finite() -> None:
    hidden, draft, teacher_hidden, teacher = tensors()
    hidden = (1e4 * hidden).requires_grad_()
    for weights in MIXTURES:
        found = TokenLoss(weights)(hidden, Head(draft), teacher_hidden * 1e4, Head(teacher), ROWS).loss
        (gradient,) = torch.autograd.grad(found.sum(), hidden)
        assert found.isfinite().all()
        assert gradient.isfinite().all()


def test_under_autocast_products_are_bfloat16_and_the_loss_float32() -> None:
    hidden, draft, teacher_hidden, teacher = tensors(vocab=64)
    hidden.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = TokenLoss({"kl_div": 1.0})(hidden, Head(draft), teacher_hidden, Head(teacher), ROWS)
    found.loss.sum().backward()
    assert found.loss.dtype == hidden.grad.dtype == torch.float32
    expected = dense({"kl_div": 1.0}, hidden, draft, teacher_hidden, teacher)
    torch.testing.assert_close(found.loss, expected, atol=0.05, rtol=0.05)


def test_argmax_by_blocks_is_argmax() -> None:
    for vocab in (64, 640, 100):
        logits = torch.randn(20, vocab, generator=torch.Generator().manual_seed(vocab))
        logits[3] = -5.0
        logits[3, 0] = logits[4, vocab - 1] = 9.0
        assert torch.equal(argmax(logits), logits.argmax(-1))


def test_no_tokens_by_vocabulary_tensor_is_kept() -> None:
    """Peak memory of the loss grows with the chunk, not with the rows."""
    rows, vocab, size = 4096, 2048, 8
    hidden = torch.randn(rows, size).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        head = Head(torch.randn(vocab, size))
        TokenLoss({"kl_div": 1.0}, 64)(hidden, head, torch.randn(rows, size), head, torch.arange(rows)).loss.sum()
    assert max(tensor.numel() for tensor in saved) <= rows * size


def test_a_trained_head_or_an_unknown_loss_is_refused() -> None:
    hidden, draft, teacher_hidden, teacher = tensors()
    with pytest.raises(UsageError, match="freeze"):
        TokenLoss({"ce": 1.0})(hidden, Head(draft.requires_grad_()), teacher_hidden, Head(teacher), ROWS)
    with pytest.raises(UsageError, match="unknown loss klx; expected weights for kl_div, ce, tv"):
        TokenLoss({"klx": 1.0})
    with pytest.raises(UsageError, match="none"):
        TokenLoss({})


def test_verifier_head_is_final_norm_scale_and_softcap() -> None:
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
