"""The heads against loops over blocks, slots and single numbers, written from the paper's formulas."""

import math

import pytest
import torch
from torch import Tensor

from speculators.models.dspark.heads import MARKOV_HEADS, ConfidenceHead, MarkovHead

BLOCKS, SLOTS, HIDDEN, RANK, VOCAB, DRAFT = 3, 5, 6, 4, 11, 7


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def product(weight: list[list[float]], vector: list[float], bias: list[float] | None = None) -> list[float]:
    rows = [sum(w * x for w, x in zip(row, vector, strict=True)) for row in weight]
    return rows if bias is None else [row + shift for row, shift in zip(rows, bias, strict=True)]


def naive_bias(head: MarkovHead, kind: str, hidden_KH: Tensor, previous_K: list[int]) -> list[list[float]]:
    """The bias of every slot of one block; the input of the gate is [h ; e], that of the recurrence [s ; e ; h]."""
    weights = {name: tensor.tolist() for name, tensor in head.state_dict().items()}
    state, out = [0.0] * RANK, []
    for hidden, token in zip(hidden_KH.tolist(), previous_K, strict=True):
        embedding = weights["markov_w1.weight"][token]
        vector = embedding
        if kind == "gated":
            gate = product(weights["gate_proj.weight"], hidden + embedding, weights["gate_proj.bias"])
            vector = [sigmoid(g) * e for g, e in zip(gate, embedding, strict=True)]
        if kind == "rnn":
            joint = product(weights["joint_proj.weight"], state + embedding + hidden, weights["joint_proj.bias"])
            gate, candidate, output = joint[:RANK], joint[RANK : 2 * RANK], joint[2 * RANK :]
            state = [
                sigmoid(g) * s + (1 - sigmoid(g)) * math.tanh(c) for g, s, c in zip(gate, state, candidate, strict=True)
            ]
            vector = [math.tanh(o) for o in output]
        out.append(product(weights["markov_w2.weight"], vector))
    return out


def random_head(kind: str) -> MarkovHead:
    generator = torch.Generator().manual_seed(3)
    head = MARKOV_HEADS[kind](VOCAB, DRAFT, RANK, HIDDEN).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return head


def random_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator, dtype=torch.float64)
    return hidden, torch.randint(VOCAB, (BLOCKS, SLOTS), generator=generator)


@pytest.mark.parametrize("kind", MARKOV_HEADS)
def test_whole_blocks_and_single_steps_are_the_formula(kind: str) -> None:
    head, (hidden_NKH, previous_NK) = random_head(kind), random_inputs()
    expected = torch.tensor(
        [naive_bias(head, kind, hidden_NKH[n], previous_NK[n].tolist()) for n in range(BLOCKS)], dtype=torch.float64
    )
    found = head.bias(head(hidden_NKH, head.embed(previous_NK)))
    torch.testing.assert_close(found, expected)
    state = None
    for slot in range(SLOTS):
        vector, state = head.step(hidden_NKH[:, slot], head.embed(previous_NK[:, slot]), state)
        torch.testing.assert_close(head.bias(vector), expected[:, slot])


@pytest.mark.parametrize(("kind", "reads_state"), [("vanilla", False), ("gated", False), ("rnn", True)])
def test_only_the_recurrent_head_remembers_the_slots_before(kind: str, reads_state: bool) -> None:
    head, (hidden_NKH, previous_NK) = random_head(kind), random_inputs()
    before = head(hidden_NKH, head.embed(previous_NK))
    previous_NK[:, 0] = (previous_NK[:, 0] + 1) % VOCAB
    after = head(hidden_NKH, head.embed(previous_NK))
    assert not torch.equal(before[:, 0], after[:, 0])
    assert torch.equal(before[:, 1:], after[:, 1:]) is not reads_state


@pytest.mark.parametrize("kind", MARKOV_HEADS)
def test_a_fresh_head_adds_nothing_and_learns_from_the_first_step(kind: str) -> None:
    head, (hidden_NKH, previous_NK) = MARKOV_HEADS[kind](VOCAB, DRAFT, RANK, HIDDEN).double(), random_inputs()
    head.reset_parameters(0.02, torch.Generator().manual_seed(0))
    bias = head.bias(head(hidden_NKH, head.embed(previous_NK)))
    assert torch.equal(bias, torch.zeros(BLOCKS, SLOTS, DRAFT, dtype=torch.float64))
    assert head.markov_w1.weight.std().item() == pytest.approx(0.02, rel=0.3)
    (bias - 1).square().sum().backward()
    assert head.markov_w2.weight.grad.abs().max() > 0


@pytest.mark.parametrize("with_markov", [False, True])
def test_confidence_is_a_linear_form_of_state_and_token(with_markov: bool) -> None:
    head = ConfidenceHead(HIDDEN, RANK if with_markov else None)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator)
    embeds = torch.randn(BLOCKS, SLOTS, RANK, generator=generator)
    found = head(hidden, embeds)
    assert found.shape == (BLOCKS, SLOTS)
    weight, bias = head.proj.weight[0].tolist(), head.proj.bias.item()
    for block in range(BLOCKS):
        for slot in range(SLOTS):
            inputs = hidden[block, slot].tolist() + (embeds[block, slot].tolist() if with_markov else [])
            expected = sum(w * x for w, x in zip(weight, inputs, strict=True)) + bias
            assert found[block, slot].item() == pytest.approx(expected, abs=1e-5)


def test_confidences_of_a_half_precision_draft_are_made_in_float32() -> None:
    head = ConfidenceHead(HIDDEN, None)
    hidden = torch.randn(BLOCKS, HIDDEN, generator=torch.Generator().manual_seed(6)).bfloat16()
    expected = head.bfloat16().float()(hidden.float(), hidden.float())
    found = head.bfloat16()(hidden, hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
