"""The training step against a dense twin, and against what independent software computes from the same checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.errors import UsageError
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.draft_model import PackedBatch
from speculators.models.dspark.calibration import calibrate, expected_calibration_error, survival
from speculators.models.dspark.objective import DSparkObjective
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from tests.golden.cases_dspark import compute
from tests.golden.settings import read_case
from tests.models.drafts import gradients, pack, random_speculator, verifier_head
from tests.models.dspark.contract import BLOCK
from tests.models.dspark.dense import dense

GOLDEN = Path(__file__).parent.parent.parent / "golden"
# Loss, gradient norms and counts that PyPI's speculators 0.9.0 computes from the directories of `variant_directory`.
NUMBERS = json.loads((Path(__file__).parent / "variants.json").read_text(encoding="utf-8"))
# Documents with holes in their masks, one that starts supervised, one too short for a block, and padding.
MASKS = [[1] * 9, [0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1, 1]]


def batch_for(speculator: Speculator, masks: list[list[int]] = MASKS) -> PackedBatch:
    return pack(masks, row=22, num_aux=len(speculator.draft.aux_layer_ids))


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_loss_gradients_and_counts_are_those_of_the_dense_twin(kind: str, from_anchor: bool) -> None:
    """What a slot is compared with, by which mask, only in its document (pitfall 14, pitfall 15 and pitfall 17)."""
    speculator = random_speculator("dspark", **BLOCK, markov_head_type=kind, sample_from_anchor=from_anchor)
    batch, terms, gamma = batch_for(speculator), {"kl_div": 0.5, "ce": 0.3, "tv": 0.7}, 3.0
    objective = DSparkObjective(loss=terms, decay_gamma=gamma, confidence_weight=0.6, chunk_rows=5)
    output = objective.step(speculator.draft, batch, verifier_head())
    output.loss.backward()
    found = gradients(speculator.draft)
    twin = dense(speculator, batch, verifier_head())
    token, confidence = twin.token_loss(terms, gamma), twin.confidence_loss(gamma)
    expected = token + 0.6 * confidence
    expected.backward()
    assert len(twin.blocks) == 5 + 4 + 2
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = gradients(speculator.draft)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    for name, (total, count) in twin.metrics().items():
        assert output.metrics[name].sum == pytest.approx(total, rel=1e-4, abs=1e-4), name
        assert output.metrics[name].count == count, name
    assert output.metrics["confidence_loss"].rate == pytest.approx(confidence.item(), rel=1e-5)
    for term in ("ce", "tv"):
        assert output.metrics[f"{term}_loss"].rate == pytest.approx(
            twin.token_loss({term: 1.0}, gamma).item(), rel=1e-5
        )
    prefixes = [twin.prefixes(slot) for slot in range(speculator.config.max_speculative_tokens)]
    expected_length = 1 + sum(right / count for right, count in prefixes if count)
    assert objective.acceptance_length(output.metrics) == pytest.approx(expected_length)


def test_without_a_confidence_head_only_tokens_count() -> None:
    speculator = random_speculator("dspark", **BLOCK, enable_confidence_head=False)
    output = DSparkObjective().step(speculator.draft, batch_for(speculator), verifier_head())
    assert not [name for name in output.metrics if "confidence" in name]
    assert output.loss.item() == pytest.approx(output.metrics["loss"].rate)


def test_the_confidence_target_gives_no_gradient_but_the_head_teaches_the_backbone() -> None:
    speculator = random_speculator("dspark", **BLOCK)
    batch, names = batch_for(speculator), {}
    for weight in (0.0, 1.0):
        DSparkObjective(confidence_weight=weight).step(speculator.draft, batch, verifier_head()).loss.backward()
        names[weight] = gradients(speculator.draft)
    changed = {name for name in names[1.0] if not torch.equal(names[0.0][name], names[1.0][name])}
    assert {"confidence_head.proj.weight", "markov_head.markov_w1.weight", "fc.weight"} <= changed
    # W2 makes the target alone, which is taken as it is.
    torch.testing.assert_close(names[0.0]["markov_head.markov_w2.weight"], names[1.0]["markov_head.markov_w2.weight"])


@pytest.mark.parametrize("masks", [[[0] * 12], [[1] * 4, [1] * 3], [[0] * 11 + [1]]])
def test_a_batch_in_which_nothing_counts_gives_zero_and_finite_gradients(masks: list[list[int]]) -> None:
    """Pitfall 23: documents without supervised tokens or too short for a block, and padding, in one batch."""
    speculator = random_speculator("dspark", **BLOCK, markov_head_type="rnn", sliding_window=5)
    output = DSparkObjective().step(speculator.draft, batch_for(speculator, masks), verifier_head())
    output.loss.backward()
    assert output.loss.item() == 0
    assert all(gradient.isfinite().all() for gradient in gradients(speculator.draft).values())
    assert output.metrics["confidence_abs_error"].count == 0


def test_more_layers_stay_finite() -> None:
    """Pitfall 23 again: five layers, half of them with windows smaller than what lies before."""
    options = {**BLOCK, "num_layers": 5, "sliding_window": 3}
    speculator = random_speculator("dspark", **options, layer_types=["full_attention", *["sliding_attention"] * 4])
    output = DSparkObjective().step(speculator.draft, batch_for(speculator), verifier_head())
    output.loss.backward()
    assert output.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(speculator.draft).values())


def test_calibration_makes_the_training_confidences_mean_what_they_say() -> None:
    speculator = random_speculator("dspark", **BLOCK)
    with torch.no_grad():
        speculator.draft.confidence_head.proj.weight.mul_(4)
    objective, batches = DSparkObjective(), [batch_for(speculator), batch_for(speculator, [[1] * 20])]
    result = calibrate(speculator, objective, batches, verifier_head())
    temperatures = result.config.confidence_temperatures
    assert len(temperatures) == 4
    before, after = [], []
    for position in range(4):
        parts = [objective.confidences(speculator.draft, batch, verifier_head()) for batch in batches]
        logits = torch.cat([part.logits_AJ for part in parts])
        survived = torch.cat([part.survived_AJ for part in parts])
        rows = torch.cat([part.counted_AJ for part in parts]).long().cumprod(-1).bool()[:, position]
        for errors, chosen in ((before, None), (after, temperatures)):
            predicted = survival(logits.double(), chosen)[rows, position]
            errors.append(expected_calibration_error(predicted, survived[rows, position]))
    assert all(new <= old for old, new in zip(before, after, strict=True))
    assert sum(after) < 0.7 * sum(before)


def test_calibration_needs_a_head_and_data() -> None:
    speculator = random_speculator("dspark", **BLOCK, enable_confidence_head=False)
    with pytest.raises(UsageError, match="no confidence head"):
        calibrate(speculator, DSparkObjective(), [batch_for(speculator)], verifier_head())
    with pytest.raises(UsageError, match="no batches"):
        calibrate(random_speculator("dspark", **BLOCK), DSparkObjective(), [], verifier_head())


RANK = 12


def head_tensors(config: dict[str, Any], hidden: int, vocab: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    tensors = {
        "markov_head.markov_w1.weight": draw(vocab, RANK),
        "markov_head.markov_w2.weight": draw(config["draft_vocab_size"], RANK),
    }
    if config["markov_head_type"] == "gated":
        tensors["markov_head.gate_proj.weight"] = draw(RANK, hidden + RANK)
        tensors["markov_head.gate_proj.bias"] = draw(RANK)
    if config["markov_head_type"] == "rnn":
        tensors["markov_head.joint_proj.weight"] = draw(3 * RANK, 2 * RANK + hidden)
        tensors["markov_head.joint_proj.bias"] = draw(3 * RANK)
    if config["enable_confidence_head"]:
        width = hidden + (RANK if config["confidence_head_with_markov"] else 0)
        tensors["confidence_head.proj.weight"] = draw(1, width)
        tensors["confidence_head.proj.bias"] = draw(1)
    return tensors


def variant_directory(folder: Path, changes: dict[str, Any]) -> Path:
    """The golden directory with heads of another kind, another layout, vocabulary or kind of layers."""
    config = json.loads((GOLDEN / "dspark" / "config.json").read_text(encoding="utf-8"))
    changes = dict(changes)
    config["transformer_layer_config"]["layer_types"] = changes.pop("layer_types", ["sliding_attention"] * 2)
    config |= {**changes, "markov_rank": RANK}
    block = config["speculators_config"]["proposal_methods"][0]
    block["speculative_tokens"] = 8 if config["sample_from_anchor"] else 7
    stored = load_file(GOLDEN / "dspark" / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if not name.startswith(("markov", "confidence"))}
    if config["draft_vocab_size"] == 128:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    folder.mkdir()
    save_file(tensors | head_tensors(config, 64, 128), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("case", NUMBERS, ids=lambda case: f"{case['variant']}-{case['settings']['loss_fn']}")
def test_variants_of_the_golden_directory(case: dict[str, Any], tmp_path: Path) -> None:
    """Loss within 1e-5 relative, every gradient norm within 1e-4, and the counts."""
    weights = load_verifier_weights(GOLDEN / "verifier")
    folder = variant_directory(tmp_path / "variant", case["changes"])
    speculator = Speculator.from_pretrained(folder, dtype=torch.float32).attach_verifier(weights)
    head = VerifierHead.from_weights(weights).to("cpu", torch.float32)
    settings = read_case(f"variant|{json.dumps(case['settings'])}", "dspark")
    output = compute(speculator, head, load_file(GOLDEN / "golden_inputs.safetensors"), settings)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-5)
    norms = {name: gradient.norm().item() for name, gradient in gradients(speculator.draft).items()}
    assert norms == pytest.approx(case["grad_norms"], rel=1e-4)
    for name, (total, count) in case["metrics"].items():
        # Here, full_acc is of prefixes.
        found = output.metrics["position_acc" if name == "full_acc" else name]
        assert found.sum == pytest.approx(total, rel=1e-4, abs=1e-3), name
        assert found.count == count, name
