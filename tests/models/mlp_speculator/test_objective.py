import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from speculators.models.draft_model import PackedBatch
from speculators.models.family import Count
from speculators.models.mlp_speculator.objective import MlpSpeculatorObjective
from speculators.models.speculator import Speculator
from tests.models.drafts import gradients, pack, random_speculator, verifier_head
from tests.models.mlp_speculator.formula import logits_of

HEAD = verifier_head()
# A prompt with an answer, one that starts supervised, a hole, an answer at the very end, nothing to learn, two tokens.
MASKS = [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0], [1, 1]]


def dense_loss(speculator: Speculator, batch: PackedBatch) -> tuple[Tensor, dict[str, tuple[int, int]]]:
    """Every step at every position of every document, given the data's tokens."""
    config, w = speculator.config, dict(speculator.draft.named_parameters())
    losses: list[list[Tensor]] = [[] for _ in range(config.n_predict)]
    counts = {f"{kind}_{k}": [0, 0] for kind in ("full_acc", "cond_acc") for k in range(config.n_predict)}
    for number in range(int(batch.document_ids.max()) + 1):
        chosen = batch.document_ids == number
        tokens, mask = batch.input_ids[chosen].tolist(), batch.loss_mask[chosen].tolist()
        states = batch.last_hidden_states[chosen]
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + HEAD.norm_eps) * HEAD.norm_weight
        for t, state in enumerate(states):
            right = known = True
            found = logits_of(config, w, state, tokens[t + 1 : t + 1 + config.n_predict])
            for k in range(config.n_predict):
                label = t + 2 + k
                if label >= len(tokens) or not mask[label]:
                    known = False
                    continue
                log_q = found[k].log_softmax(0)
                losses[k].append(-log_q[tokens[label]])
                counts[f"cond_acc_{k}"][1] += right and known
                right = right and int(log_q.argmax()) == tokens[label]
                counts[f"full_acc_{k}"][1] += known
                for kind in ("full_acc", "cond_acc"):
                    counts[f"{kind}_{k}"][0] += right and known
    total = sum((sum(rows, torch.zeros(())) for rows in losses), torch.zeros(()))
    return total / max(len(losses[0]), 1), {name: (a, b) for name, (a, b) in counts.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_loss_gradients_and_counts_equal_the_dense_twin(tied: bool, scaled: bool) -> None:
    speculator = random_speculator("mlp_speculator", tie_weights=tied, scale_input=scaled, inner_dim=24)
    batch = pack(MASKS, row=16)
    found = MlpSpeculatorObjective(chunk_rows=4).step(speculator.draft, batch, HEAD)
    found.loss.backward()
    found_gradients = gradients(speculator.draft)
    expected, counts = dense_loss(speculator, batch)
    expected.backward()
    expected_gradients = gradients(speculator.draft)
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-6)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert {name: tuple(found.metrics[name]) for name in counts} == counts


def test_counts_of_the_loss_are_those_of_the_supervised_labels() -> None:
    metrics = (
        MlpSpeculatorObjective().step(random_speculator("mlp_speculator").draft, pack(MASKS, row=16), HEAD).metrics
    )
    # Labels at index 2 + k and later: step 0 counts 4 + 3 + 3 + 1, step 1 has 4 + 2 + 2 + 1, step 2 has 3 + 1 + 2 + 1.
    assert [metrics[f"loss_{k}"].count for k in range(3)] == [11, 9, 7]
    assert metrics["loss"].count == 11
    assert metrics["loss"].sum == pytest.approx(sum(metrics[f"loss_{k}"].sum for k in range(3)), rel=1e-6)


@pytest.mark.parametrize("supervised", range(2, 7))
def test_a_single_supervised_token_is_predicted_from_the_states_before_it(supervised: int) -> None:
    """Pitfall 14: step k reads the state k + 2 positions before the token, and no other counts."""
    batch = pack([[int(index == supervised) for index in range(7)]], row=7)
    batch.last_hidden_states.requires_grad_()
    draft = random_speculator("mlp_speculator").draft
    (gradient,) = torch.autograd.grad(MlpSpeculatorObjective().step(draft, batch, HEAD).loss, batch.last_hidden_states)
    touched = torch.nonzero(gradient[0].abs().sum(-1)).flatten().tolist()
    assert touched == [place for place in range(7) if 0 <= supervised - 2 - place <= 2]


@pytest.mark.parametrize("masks", [[[0, 0, 0]], [[1, 1]], [[1]]])
def test_a_batch_with_nothing_to_learn_is_a_zero_that_can_be_differentiated(masks: list[list[int]]) -> None:
    """Nothing to learn is a zero and no NaN (pitfall 23)."""
    speculator = random_speculator("mlp_speculator")
    output = MlpSpeculatorObjective().step(speculator.draft, pack(masks, row=5), HEAD)
    output.loss.backward()
    assert output.loss.item() == 0
    assert set(output.metrics.values()) == {Count(0, 0)}
    assert all((gradient == 0).all() for gradient in gradients(speculator.draft).values())


def test_under_autocast_gradients_are_float32_and_near() -> None:
    speculator, batch = random_speculator("mlp_speculator"), pack(MASKS, row=16)
    exact = MlpSpeculatorObjective().step(speculator.draft, batch, HEAD).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = MlpSpeculatorObjective().step(speculator.draft, batch, HEAD.to("cpu", torch.bfloat16)).loss
    rounded.backward()
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05)
    assert {gradient.dtype for gradient in gradients(speculator.draft).values()} == {torch.float32}


def test_knobs_are_checked() -> None:
    with pytest.raises(ValidationError, match="chunk_rows"):
        MlpSpeculatorObjective(chunk_rows=0)
