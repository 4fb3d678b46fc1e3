"""FastMTP's training step against the same loss on documents one by one, made with transformers' own layers."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from speculators.models.draft_model import PackedBatch
from speculators.models.mtp.objective import MtpObjective, align
from tests.models.drafts import document_of, gradients, pack, random_speculator, verifier_head
from tests.models.mtp.contract import of_style
from tests.models.mtp.dense import DenseBlock
from tests.models.mtp.test_block import speculator_of

MASKS = [[0, 0, 1, 1, 0, 1, 1, 1, 0], [1] * 5, [0, 1, 1], [1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0]]


def reference_terms(twin: DenseBlock, batch: PackedBatch, num_steps: int, normed: bool) -> list[list[Tensor]]:
    """Per step, the cross entropy of every label that counts, document by document."""
    terms: list[list[Tensor]] = [[] for _ in range(num_steps)]
    for number in range(int(batch.document_ids.max()) + 1):
        document = document_of(batch, number)
        ids, mask, states = document.input_ids[0], document.loss_mask[0], document.last_hidden_states[0]
        if len(ids) <= num_steps + 1:
            continue
        states = verifier_head().norm(states) if normed else states
        for step, hidden in enumerate(twin.steps(ids, states, num_steps)):
            for place, state in enumerate(hidden):
                label = place + step + 2
                if mask[label]:
                    terms[step].append(F.cross_entropy(twin.lm_head @ state, ids[label]))
    return terms


@pytest.mark.parametrize("style", ["qwen3", "qwen3_next", "deepseek", "mimo"])
@pytest.mark.parametrize("normed", [True, False])
def test_loss_and_gradients_are_those_of_the_formula(style: str, normed: bool) -> None:
    speculator = speculator_of(style)
    batch = pack(MASKS, row=14)
    twin = DenseBlock(style, speculator.draft.state_dict())
    terms = reference_terms(twin, batch, 3, normed)
    assert [len(part) for part in terms] == [4 + 1 + 2, 4 + 1 + 2, 3 + 1 + 2]
    weights = [1 / 1.96, 0.6 / 1.96, 0.36 / 1.96]
    expected = sum(weight * torch.stack(part).mean() for weight, part in zip(weights, terms, strict=True))
    expected.backward()
    output = MtpObjective(normed_states=normed, chunk_rows=3).step(speculator.draft, batch, verifier_head())
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found = gradients(speculator.draft)
    assert found.keys() == twin.gradients().keys()
    for name, gradient in twin.gradients().items():
        torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=1e-4, msg=name)
    for step, part in enumerate(terms):
        assert tuple(output.metrics[f"loss_{step}"]) == (pytest.approx(sum(part).item(), rel=1e-5), len(part))
    weighted = sum(3 * weight * sum(part).item() for weight, part in zip(weights, terms, strict=True))
    assert tuple(output.metrics["loss"]) == (pytest.approx(weighted, rel=1e-5), sum(map(len, terms)))


def test_one_supervised_token_is_the_label_of_one_row_a_step() -> None:
    """Pitfall 14: with the mask on token 8 alone, step k counts position 8 - 2 - k and compares with token 8."""
    mask = [int(place == 8) for place in range(12)]
    batch = pack([mask], row=12)
    aligned = align(batch, 3)
    assert [row.nonzero().flatten().tolist() for row in aligned.counted_KC] == [[6], [5], [4]]
    assert aligned.labels_KC[aligned.counted_KC].tolist() == [int(batch.input_ids[0, 8])] * 3
    assert aligned.inputs.token_ids_KC[:, 4].tolist() == batch.input_ids[0, [5, 6, 7]].tolist()
    # Nothing after the last position that counts is computed.
    assert aligned.inputs.document_lengths == [7]


def test_no_gradient_crosses_documents() -> None:
    """Pitfall 17: the loss of one document does not depend on the states of another, supervised from its start."""
    speculator = random_speculator("mtp")
    batch = pack([[0] * 8, [1] * 8], row=16)
    batch.last_hidden_states.requires_grad_()
    MtpObjective().step(speculator.draft, batch, verifier_head()).loss.backward()
    touched = batch.last_hidden_states.grad[0].abs().sum(-1) > 0
    assert touched.tolist() == [False] * 8 + [True] * 4 + [False] * 4


@pytest.mark.parametrize("masks", [[[0] * 9], [[1] * 4], [[1, 1, 0, 0, 0, 0, 0, 0]]])
def test_a_batch_without_labels_has_a_loss_of_zero(masks: list[list[int]]) -> None:
    """Pitfall 23: a document of 4 tokens is too short for three steps; tokens 0 and 1 are never predicted."""
    speculator = random_speculator("mtp")
    output = MtpObjective().step(speculator.draft, pack(masks, row=10), verifier_head())
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert not any(gradient.any() for gradient in gradients(speculator.draft).values())
    assert all(tuple(count) == (0.0, 0) for count in output.metrics.values())


def test_a_step_without_labels_leaves_the_others_as_they_are() -> None:
    """The last token of all is a label of the last step alone (pitfall 14)."""
    speculator = random_speculator("mtp")
    output = MtpObjective().step(speculator.draft, pack([[0] * 7 + [1]], row=8), verifier_head())
    total, count = output.metrics["loss_2"]
    assert (count, output.metrics["loss_0"].count, output.metrics["loss_1"].count) == (1, 0, 0)
    assert output.loss.item() == pytest.approx(0.36 / 1.96 * total, rel=1e-5)


def test_knobs() -> None:
    speculator, batch, head = random_speculator("mtp"), pack([[1] * 12], row=12), verifier_head()
    for decay, weights in ((1.0, [1 / 2, 1 / 2]), (0.25, [0.8, 0.2])):
        output = MtpObjective(num_steps=2, step_decay=decay).step(speculator.draft, batch, head)
        means = [output.metrics[f"loss_{step}"].rate for step in range(2)]
        assert output.loss.item() == pytest.approx(sum(w * m for w, m in zip(weights, means, strict=True)), rel=1e-5)
        assert "loss_2" not in output.metrics
    given = MtpObjective(num_steps=2, step_weights=[1.0, 3.0]).step(speculator.draft, batch, head)
    assert given.loss.item() == pytest.approx(means[0] + 3 * means[1], rel=1e-5)
    with pytest.raises(ValidationError, match="step_weights has 1 entries; num_steps is 3"):
        MtpObjective(step_weights=[1.0])


def test_row_28_acceptance_is_counted_position_by_position() -> None:
    """The head says token 3 or token 5, by the sign of one direction, and the data hold nothing else (pitfall 28)."""
    speculator, batch = random_speculator("mtp"), pack([[1] * 24], row=24)
    batch.input_ids = torch.where(batch.input_ids > 15, 3, 5)
    head, direction = verifier_head(), torch.randn(32, generator=torch.Generator().manual_seed(1))
    weight = torch.zeros(40, 32)
    weight[3], weight[5] = direction, -direction
    head = replace(head, head=replace(head.head, weight=weight))
    aligned = align(batch, 3)
    aligned.inputs.states_CH = head.norm(aligned.inputs.states_CH)
    with torch.no_grad():
        said = torch.stack([torch.where(state @ direction > 0, 3, 5) for state in speculator.draft(aligned.inputs)])
    right = (said == aligned.labels_KC).cumprod(0).sum(1).tolist()
    assert 20 > right[0] > right[1] > right[2] > 0
    metrics = MtpObjective().step(speculator.draft, batch, head).metrics
    assert [tuple(metrics[f"full_acc_{k}"]) for k in range(3)] == [(count, 20) for count in right]
    assert [tuple(metrics[f"cond_acc_{k}"]) for k in range(3)] == list(zip(right, [20, *right[:2]], strict=True))
    assert MtpObjective().acceptance_length(metrics) == pytest.approx(1 + sum(right) / 20)


@pytest.mark.parametrize(
    ("frozen", "names"),
    [
        (["router"], {"mlp.gate.weight"}),
        (["experts"], {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
        (["router", "experts"], {"mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
    ],
)
def test_router_and_experts_can_be_frozen(frozen: list, names: set[str]) -> None:
    """Also in an optimizer that was made before, and that decays weights."""
    speculator, batch = random_speculator("mtp", **of_style("qwen3_next")), pack([[1] * 12], row=12)
    before = {name: parameter.detach().clone() for name, parameter in speculator.draft.named_parameters()}
    optimizer = torch.optim.AdamW(list(speculator.draft.trained_parameters()), lr=1e-2, weight_decay=0.1)
    MtpObjective(frozen=frozen).step(speculator.draft, batch, verifier_head()).loss.backward()
    optimizer.step()
    same = {name for name, parameter in speculator.draft.named_parameters() if torch.equal(parameter, before[name])}
    assert same == {f"mtp_layers.0.{name}" for name in names} | {"embed_tokens.weight", "lm_head.weight"}
