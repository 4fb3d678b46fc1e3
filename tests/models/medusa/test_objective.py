import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from speculators.models.draft_model import PackedBatch
from speculators.models.family import Count
from speculators.models.medusa.objective import MedusaObjective
from speculators.models.speculator import Speculator
from tests.models.drafts import gradients, pack, random_speculator, verifier_head

HEAD = verifier_head()
# A prompt with an answer, one that starts supervised, a hole, an answer at the very end, nothing to learn, two tokens.
MASKS = [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0], [1, 1]]
VARIANTS = {
    "truncated": {},
    "full": {"draft_vocab_size": None},
    "shared": {"draft_vocab_size": None, "shared_lm_head": True},
    "two_layers": {"num_layers": 2, "bias": False},
}


def dense_loss(speculator: Speculator, batch: PackedBatch, decay: float) -> tuple[Tensor, dict[str, tuple[int, int]]]:
    """Every head at every position of every document, from the checkpoint's tensors."""
    config, w = speculator.config, dict(speculator.draft.named_parameters())
    heads, ids = config.medusa_num_heads, speculator.draft.verifier_ids_D
    ids = list(range(config.vocab_size)) if ids is None else ids.tolist()
    losses: list[list[Tensor]] = [[] for _ in range(heads)]
    counts = {f"{kind}_{k}": [0, 0] for kind in ("full_acc", "cond_acc") for k in range(heads)}
    for number in range(int(batch.document_ids.max()) + 1):
        chosen = batch.document_ids == number
        tokens, mask = batch.input_ids[chosen].tolist(), batch.loss_mask[chosen].tolist()
        states = batch.last_hidden_states[chosen]
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + HEAD.norm_eps) * HEAD.norm_weight
        for t, state in enumerate(states):
            right = known = True
            for k in range(heads):
                label = t + 2 + k
                if label >= len(tokens) or not mask[label]:
                    known = False
                    continue
                x = state
                for layer in range(config.medusa_num_layers):
                    name = f"blocks.{k}.layers.{layer}"
                    x = x + F.silu(F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias")))
                log_q = (w["lm_head.weight" if config.original_lm_head else f"lm_heads.{k}.weight"] @ x).log_softmax(0)
                if tokens[label] in ids:
                    losses[k].append(-log_q[ids.index(tokens[label])])
                counts[f"cond_acc_{k}"][1] += right and known
                right = right and ids[int(log_q.argmax())] == tokens[label]
                counts[f"full_acc_{k}"][1] += known
                for kind in ("full_acc", "cond_acc"):
                    counts[f"{kind}_{k}"][0] += right and known
    total = sum((decay**k * sum(rows, torch.zeros(())) for k, rows in enumerate(losses)), torch.zeros(()))
    return total / max(len(losses[0]), 1), {name: (a, b) for name, (a, b) in counts.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_gradients_and_counts_equal_the_dense_twin(variant: str) -> None:
    speculator, batch = random_speculator("medusa", num_heads=3, **VARIANTS[variant]), pack(MASKS, row=16)
    # Tokens that a truncated vocabulary lacks, one of them supervised by all three heads.
    batch.input_ids[0, 5] = batch.input_ids[1, 1] = 0
    found = MedusaObjective(head_decay=0.7, chunk_rows=4).step(speculator.draft, batch, HEAD)
    found.loss.backward()
    found_gradients = gradients(speculator.draft)
    expected, counts = dense_loss(speculator, batch, 0.7)
    expected.backward()
    expected_gradients = gradients(speculator.draft)
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-6)
    assert found_gradients.keys() == expected_gradients.keys()
    assert ("lm_heads.0.weight" in found_gradients) is (variant != "shared")
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert {name: tuple(found.metrics[name]) for name in counts} == counts


def test_counts_of_the_loss_are_those_of_the_supervised_labels() -> None:
    metrics = MedusaObjective().step(random_speculator("medusa", num_heads=3).draft, pack(MASKS, row=16), HEAD).metrics
    # Labels at index 2 + k and later: head 0 counts 4 + 3 + 3 + 1, head 1 has 4 + 2 + 2 + 1, head 2 has 3 + 1 + 2 + 1.
    assert [metrics[f"loss_{k}"].count for k in range(3)] == [11, 9, 7]
    assert metrics["loss"].count == 11
    assert metrics["loss"].sum == pytest.approx(sum(0.8**k * metrics[f"loss_{k}"].sum for k in range(3)), rel=1e-6)


@pytest.mark.parametrize("supervised", range(2, 7))
def test_a_single_supervised_token_trains_every_head_from_its_own_distance(supervised: int) -> None:
    """Pitfall 14: head k gets a gradient from the state k + 2 positions before the token, and from no other."""
    batch = pack([[int(index == supervised) for index in range(7)]], row=7)
    speculator = random_speculator("medusa", num_heads=3)
    for head in range(3):
        states = batch.last_hidden_states.clone().requires_grad_()
        batch.last_hidden_states = states
        output = MedusaObjective().step(speculator.draft, batch, HEAD)
        chosen = speculator.draft.blocks[head].layers[0].weight
        (gradient,) = torch.autograd.grad(output.loss, chosen, allow_unused=False)
        assert (gradient.abs().max() > 0).item() is (supervised - 2 - head >= 0)
        (by_state,) = torch.autograd.grad(MedusaObjective().step(speculator.draft, batch, HEAD).loss, states)
        touched = torch.nonzero(by_state[0].abs().sum(-1)).flatten().tolist()
        assert touched == [place for place in range(7) if 0 <= supervised - 2 - place <= 2]


@pytest.mark.parametrize("masks", [[[0, 0, 0]], [[1, 1]], [[1]]])
def test_a_batch_with_nothing_to_learn_is_a_zero_that_can_be_differentiated(masks: list[list[int]]) -> None:
    """Nothing to learn is a zero and no NaN (pitfall 23)."""
    speculator = random_speculator("medusa", num_heads=2)
    output = MedusaObjective().step(speculator.draft, pack(masks, row=5), HEAD)
    output.loss.backward()
    assert output.loss.item() == 0
    assert set(output.metrics.values()) == {Count(0, 0)}
    assert all((gradient == 0).all() for gradient in gradients(speculator.draft).values())


def test_validation_under_no_grad_gives_the_same_numbers() -> None:
    speculator, batch = random_speculator("medusa"), pack(MASKS, row=16)
    training = MedusaObjective().step(speculator.draft, batch, HEAD)
    with torch.no_grad():
        validation = MedusaObjective().step(speculator.draft, batch, HEAD)
    assert not validation.loss.requires_grad
    assert validation.loss.item() == pytest.approx(training.loss.item(), rel=1e-5)


def test_under_autocast_gradients_are_float32_and_near() -> None:
    speculator, batch = random_speculator("medusa", num_heads=3), pack(MASKS, row=16)
    exact = MedusaObjective().step(speculator.draft, batch, HEAD).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = MedusaObjective().step(speculator.draft, batch, HEAD.to("cpu", torch.bfloat16)).loss
    rounded.backward()
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05)
    assert {gradient.dtype for gradient in gradients(speculator.draft).values()} == {torch.float32}


def test_knobs_are_checked() -> None:
    with pytest.raises(ValidationError, match="head_decay"):
        MedusaObjective(head_decay=0.0)
    with pytest.raises(ValidationError, match="decay\n"):
        MedusaObjective(decay=0.5)
