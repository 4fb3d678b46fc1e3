"""Speculators directories of older versions: what they did not write, what they named otherwise, what is left out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from speculators.errors import SpeculatorsError
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.speculator import Speculator
from tests.convert import layouts_block, layouts_eagle, reference_block, reference_eagle, test_from_block_drafters
from tests.convert import layouts_speculators as layouts
from tests.convert.foreign import ForeignCheckpoint
from tests.convert.test_from_eagle_kin import converted, drafted

STEPS = 4
Spoken = tuple[Tensor, tuple[Tensor, ...]]


@pytest.fixture(scope="module")
def spoken(tiny_verifier: Path) -> Spoken:
    """Tokens [T] and the verifier's hidden states of them, as transformers counts them, each [T, H]."""
    model = LlamaForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    tokens = torch.randint(2, 380, (11,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = model(tokens[None], output_hidden_states=True).hidden_states
    return tokens, tuple(state[0] for state in states)


def agrees(case: ForeignCheckpoint, kind: str, meaning: reference_eagle.Meaning, verifier: Path, spoken: Spoken) -> Any:
    """A function that compares a converted directory with the reference of the EAGLE kin."""
    weights = load_verifier_weights(verifier)
    foreign = reference_eagle.Foreign(case, weights.embed_tokens, weights.lm_head)
    expected = getattr(reference_eagle, kind)(foreign, *spoken, meaning, STEPS)

    def compare(directory: Path) -> None:
        got = drafted(directory, verifier, *spoken, STEPS)
        assert got.tokens == expected.tokens
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-5, atol=1e-5)

    return compare


def flat(case: ForeignCheckpoint) -> ForeignCheckpoint:
    """The same with the layer's keys at the top level, as the reference reads them."""
    return ForeignCheckpoint(case.layout, case.config["transformer_layer_config"], case.tensors)


def test_version_0_2_of_eagle3(tiny_verifier: Path, spoken: Spoken, tmp_path: Path) -> None:
    case = layouts.old_eagle3()
    meaning = reference_eagle.Meaning((2, 4, 5), adds_normed=True)
    compare = agrees(flat(case), "eagle3", meaning, tiny_verifier, spoken)
    plan = converted(case, tmp_path, tiny_verifier).plan
    compare(tmp_path / "ours")
    assert plan.notes == (
        "no eagle_aux_hidden_state_layer_ids is written; taken as [2, 4, 5], what its producer's code and engines take",
        "no norm_before_fc is written; taken as False, as its producer's code does",
        "no fc_norm is written; taken as False, as its producer's code does",
        "no norm_output is written; taken as False, as its producer's code does",
        "no embed_requires_grad is written; taken as False, as its producer's code does",
        "no rope_theta is written; taken as 10000, as its producer's code does",
        f"the configuration names the verifier 'org/verifier'; {str(tiny_verifier)!r} is written",
    )
    own = "the verifier's own, which the writer's training kept beside the draft"
    assert plan.dropped == {
        "verifier_lm_head.weight": own,
        "verifier_norm.weight": own,
        "fc.bias": "a bias of zeros, which changes nothing",
    }
    assert plan.ids is not None
    assert (plan.ids.written, plan.ids.source) == ((2, 4, 5), "default")


def test_a_later_version_of_eagle3(tiny_verifier: Path, spoken: Spoken, tmp_path: Path) -> None:
    """Ids of the file, and for the flag that is not written the default of its class, which is no training's."""
    case = layouts.later_eagle3()
    meaning = reference_eagle.Meaning((1, 4, 6))
    compare = agrees(flat(case), "eagle3", meaning, tiny_verifier, spoken)
    plan = converted(case, tmp_path, tiny_verifier).plan
    compare(tmp_path / "ours")
    assert "no norm_before_residual is written; taken as False, as its producer's code does" in plan.notes
    assert "left out, since drafting reads none of it: enable_sp_ulysses" in plan.notes
    case.options = {"norm_before_residual": True}
    converted(case, tmp_path / "asked", tiny_verifier)
    asked = Speculator.from_pretrained(tmp_path / "asked" / "ours").config
    assert asked.norm_before_residual


def test_version_0_1_of_eagle(tiny_verifier: Path, spoken: Spoken, tmp_path: Path) -> None:
    """The names of its layer and projection, and its flags."""
    compare = agrees(layouts_eagle.hass(), "eagle", reference_eagle.Meaning(), tiny_verifier, spoken)
    plan = converted(layouts.old_eagle(), tmp_path, tiny_verifier).plan
    compare(tmp_path / "ours")
    assert plan.family == "eagle"
    assert "transformer.mlp.up_proj.weight" in plan.used


def test_dflash_before_it_said_who_sees_whom(tiny_verifier: Path, spoken: Spoken, tmp_path: Path) -> None:
    case = layouts.old_dflash()
    case.config["block_size"] = layouts_block.BLOCK
    case.options = {"speculative_tokens": layouts_block.BLOCK - 1}
    converted(case, tmp_path, tiny_verifier)
    wanted = test_from_block_drafters.expected(layouts_block.zlab(), tiny_verifier, spoken)
    got = test_from_block_drafters.drafted(tmp_path / "ours", tiny_verifier, *spoken)
    test_from_block_drafters.assert_same(got, wanted)
    assert isinstance(wanted, reference_block.Drafted)


def test_keys_that_were_not_written_take_their_writers_defaults(tiny_verifier: Path, tmp_path: Path) -> None:
    plan = converted(layouts.old_dflash(), tmp_path, tiny_verifier).plan
    config = Speculator.from_pretrained(tmp_path / "ours").config
    assert (config.block_size, config.sample_from_anchor, config.sliding_window_non_causal) == (8, False, True)
    left_out = "pure_draft_prefix_len, emb_dim, gru_hidden_dim, projector_type, shift_label"
    assert f"left out, since drafting reads none of it: {left_out}" in plan.notes


@pytest.mark.parametrize("make", layouts.CASES, ids=lambda make: make.__name__)
def test_every_tensor_is_accounted_for_and_a_second_time_changes_nothing(
    make: Any, tiny_verifier: Path, tmp_path: Path
) -> None:
    case = make()
    conversion = converted(case, tmp_path, tiny_verifier)
    assert sorted([*conversion.plan.used, *conversion.plan.dropped]) == sorted(case.tensors)
    ours = conversion.directory
    config = json.loads((ours / "config.json").read_text(encoding="utf-8"))
    tensors = Speculator.from_pretrained(ours).draft.state_dict()
    kept = {name: tensors[name] for name in conversion.plan.tensors}
    again = converted(ForeignCheckpoint("ours", config, kept), tmp_path / "again", tiny_verifier)
    assert again.plan.notes == ()
    assert (again.directory / "config.json").read_bytes() == (ours / "config.json").read_bytes()
    assert (again.directory / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (layouts.old_eagle3, {"speculators_model_type": "xpress"}, "speculators_model_type is 'xpress'; expected one"),
        (layouts.old_eagle3, {"speculators_config": None}, "speculators_config is missing"),
        (layouts.old_eagle3, {"unheard_of": 1}, "unheard_of is not a known key"),
        (layouts.old_eagle3, {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, r"expected depths within 0\.\.8"),
        (layouts.old_eagle3, {"eagle_aux_hidden_state_layer_ids": [2, 4]}, "fc.weight has shape .*expected"),
        (layouts.old_eagle3, {"draft_vocab_size": 95}, "d2t has 96 entries; the draft's head has 95 tokens"),
        (layouts.old_eagle, {"layernorms": True}, "layernorms is true, a norm before the layer"),
        (layouts.old_eagle, {"fusion_bias": False}, r"fc\.bias .*no place|fusion_fc\.bias"),
        (layouts.old_dflash, {"projector_type": "domino"}, "projector_type is 'domino', which no family here has"),
        (layouts.old_dflash, {"shift_label": True}, "shift_label is true; give sample_from_anchor"),
    ],
)
def test_what_has_no_place_is_refused(
    make: Any, changes: dict[str, Any], message: str, tiny_verifier: Path, tmp_path: Path
) -> None:
    case = make()
    case.config |= changes
    with pytest.raises(SpeculatorsError, match=message):
        converted(case, tmp_path, tiny_verifier)
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


def test_a_bias_that_no_family_has_is_refused(tiny_verifier: Path, tmp_path: Path) -> None:
    case = layouts.old_eagle3()
    case.tensors["fc.bias"][3] = 1.0
    with pytest.raises(SpeculatorsError, match=r"fc\.bias \[64\] has no place in a eagle3 speculator"):
        converted(case, tmp_path, tiny_verifier)


@pytest.mark.parametrize(
    ("place", "keys", "message"),
    [
        ((), {"fusion_bias": "yes"}, 'bias is "yes"'),
        (("transformer_layer_config",), {"attention_bias": "no"}, 'qkv_bias is "no"'),
        (("transformer_layer_config",), {"rope_theta": 0}, "rope_theta.* 0"),
    ],
)
def test_values_of_version_0_1_are_not_bent_into_shape(
    place: tuple[str, ...], keys: dict[str, Any], message: str, tiny_verifier: Path, tmp_path: Path
) -> None:
    case = layouts.old_eagle()
    told = case.config
    for key in place:
        told = told[key]
    told |= keys
    with pytest.raises(SpeculatorsError, match=message):
        converted(case, tmp_path, tiny_verifier)


def test_windows_leave_open_who_sees_whom(tiny_verifier: Path, tmp_path: Path) -> None:
    case = layouts.old_dflash()
    case.config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
    with pytest.raises(SpeculatorsError, match="sliding_window_non_causal is missing, and layers have windows"):
        converted(case, tmp_path, tiny_verifier)
    case.options = {"sliding_window_non_causal": True}
    converted(case, tmp_path / "said", tiny_verifier)
    assert Speculator.from_pretrained(tmp_path / "said" / "ours").config.sliding_window_non_causal


def test_another_verifiers_draft_is_refused(tied_verifier: Path, tmp_path: Path) -> None:
    case = layouts.old_eagle3()
    case.config["transformer_layer_config"]["vocab_size"] = 400
    case.config["draft_vocab_size"] = 96
    case.tensors["t2d"] = torch.cat((case.tensors["t2d"], torch.zeros(16, dtype=torch.bool)))
    with pytest.raises(SpeculatorsError, match=r"has vocabulary size 400; .* has 384: is it this verifier's draft"):
        converted(case, tmp_path, tied_verifier)
