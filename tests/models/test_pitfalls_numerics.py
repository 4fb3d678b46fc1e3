"""Faults 1 to 13 of `tests.models.pitfalls`, on every family that they touch: what is read, normed and rotated."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speculators.errors import FormatError, VerifierError
from speculators.formats.checkpoint import read_config
from speculators.formats.tensor_health import is_norm
from speculators.formats.verifier_weights import VerifierWeights
from speculators.models import FAMILIES
from speculators.models.attention_interface import ATTENTION_NAME
from speculators.models.family import VerifierShape
from speculators.models.speculator import Speculator
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.formats.families import faults_of
from tests.models.by_heart import tiny_verifier
from tests.models.contract import contract_of
from tests.models.drafts import (
    HIDDEN,
    VOCAB,
    config_of,
    draft_vocab,
    pack,
    random_speculator,
    verifier_head,
    verifier_shape,
    verifier_weights,
)
from tests.models.pitfalls import (
    auxiliary_families,
    block_families,
    draft_of,
    every_family,
    objective_of,
    options_of,
    rope_of,
    whole_vocabulary,
)

MASKS = [[0, 0, *[1] * 8], [1] * 6]


@every_family
def test_the_loss_reads_states_through_the_final_norm(family: str) -> None:
    """It takes away how long a state is, which a head without it would see, and its gain matters (pitfall 1)."""
    # An MLP speculator that scales its input takes the length away by itself.
    speculator = draft_of(family, **({"scale_input": False} if family == "mlp_speculator" else {}))
    batch, head = pack(MASKS, row=16, num_aux=len(speculator.draft.aux_layer_ids)), verifier_head()
    once = objective_of(family).step(speculator.draft, batch, head)
    other_gain = replace(head, norm_weight=head.norm_weight.flip(0))
    other = objective_of(family).step(speculator.draft, batch, other_gain)
    batch.last_hidden_states *= 7
    again = objective_of(family).step(speculator.draft, batch, head)
    assert once.loss.item() > 0
    assert other.loss.item() != pytest.approx(once.loss.item(), rel=1e-3)
    assert again.loss.item() == pytest.approx(once.loss.item(), rel=1e-4)
    for name, count in once.metrics.items():
        assert tuple(again.metrics[name]) == pytest.approx(tuple(count), rel=1e-3), name


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
# Families whose layers are this library's; an MTP block is a layer of its verifier's kind, which transformers rotates.
ROTATED = ("eagle3", "peagle", "dflash", "dflash2", "dspark", "eagle")
rotated_families = pytest.mark.parametrize("family", ROTATED)


def saved(family: str, verifier: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], Tensor, Tensor]:
    """What the config.json of a draft for this verifier says, and cos and |sin| [T, 8] of the draft read from there."""
    shape = VerifierShape.from_config_dict(LLAMA | dict(verifier), "org/tiny")
    config = config_of(family, shape, options_of(family, **whole_vocabulary(family)))
    Speculator.create(config, verifier_weights()).save_pretrained(folder)
    rotary: Any = Speculator.from_pretrained(folder).draft.rotary
    cos, sin = rotary.at(torch.arange(6), 6, torch.float32)
    return read_config(folder), cos, sin.abs()


@rotated_families
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    ],
    ids=["partial", "partial_flat", "mrope", "mrope_flat"],
)
def test_what_training_rotates_is_what_the_saved_config_says(family: str, rope: dict, tmp_path: Path) -> None:
    """A server that reads the config turns whole heads, by these angles (pitfall 4)."""
    written, cos, sin = saved(family, rope, tmp_path)
    assert rope_of(written) == {"rope_type": "default", "rope_theta": 1e4}
    layers = written.get("transformer_layer_config", written)
    assert not {"partial_rotary_factor", "mrope_section", "rope_scaling"} & layers.keys()
    server = LlamaRotaryEmbedding(LlamaConfig(**LLAMA, rope_parameters=rope_of(written)))
    expected = server(torch.zeros(1), torch.arange(6)[None])
    assert cos.shape == (6, 8)
    torch.testing.assert_close(cos, expected[0][0])
    torch.testing.assert_close(sin, expected[1][0].abs())


@rotated_families
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e4},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
    ],
    ids=["nested_first", "by_layer_type", "flat", "flat_null"],
)
def test_the_base_is_the_verifiers(family: str, rope: dict, tmp_path: Path) -> None:
    """Position 5 turns pair i by 5 / 1e6^(2i/8), not by a base of 10 000 that some class has (pitfall 5)."""
    written, cos, _ = saved(family, rope, tmp_path)
    assert rope_of(written)["rope_theta"] == 1e6
    torch.testing.assert_close(cos[5, :4], (5 * 1e6 ** (-2 * torch.arange(4) / 8)).cos())


@rotated_families
@pytest.mark.parametrize("layout", ["rope_parameters", "rope_scaling"])
def test_yarn_is_scaled_as_transformers_does(family: str, layout: str, tmp_path: Path) -> None:
    """Frequencies and the attention's factor, in both layouts (pitfall 5)."""
    written, cos, _ = saved(family, {layout: YARN}, tmp_path)
    assert rope_of(written) == YARN
    config = LlamaConfig(**{**LLAMA, "rope_parameters": dict(YARN)})
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert factor > 1.1
    torch.testing.assert_close(cos[5, :4], (5 * frequencies).cos() * factor)


@pytest.mark.parametrize("family", [*ROTATED, "mtp"])
def test_no_rotation_is_guessed(family: str) -> None:
    """Neither where the base is absent nor where the type is unknown (pitfall 5)."""
    with pytest.raises(VerifierError, match="names no rope_theta"):
        VerifierShape.from_config_dict(LLAMA, "org/tiny")
    unknown = LLAMA | {"rope_parameters": {**YARN, "rope_type": "longrope"}}
    with pytest.raises(FormatError, match=r"rope_type.*longrope"):
        FAMILIES[family].draft(**options_of(family)).resolve(VerifierShape.from_config_dict(unknown, "org/tiny"))


def counting_verifier() -> Verifier:
    """A Llama of 6 layers whose layer k adds 10^k to every state and nothing else: id i is the number of i ones."""
    sizes = {key: value for key, value in LLAMA.items() if key not in ("architectures", "model_type")}
    config = LlamaConfig(
        **sizes | {"num_hidden_layers": 6},
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        mlp_bias=True,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=ATTENTION_NAME,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for index, layer in enumerate(model.model.layers):
            layer.mlp.down_proj.bias.fill_(10.0**index)
    return Verifier(model, None)


@auxiliary_families
def test_ids_are_how_many_layers_ran_for_extraction_and_in_serving(family: str) -> None:
    """0 is the embeddings, 3 the middle, 6 the last output before the final norm; none is off by one (pitfall 7)."""
    verifier, ids = counting_verifier(), [0, 3, 6]
    expected = [0.0, 111.0, 111111.0]
    assert verifier.capture([[1, 2, 3]], ids)[0][:, :, 0].tolist() == [expected] * 3
    raw = {**verifier.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    plain = {"norm_before_fc": False} if family in ("eagle3", "peagle") else {}
    options = options_of(family, aux_layer_ids=ids, **whole_vocabulary(family), **plain)
    speculator = random_speculator(family, **options, verifier={"num_hidden_layers": 6, "raw": raw})
    seen: list[Tensor] = []
    speculator.draft.fc.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    llm = LLM.from_parts(verifier, speculator, num_speculative_tokens=2)
    llm.generate([[1, 2, 3, 4]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    # Besides the states of a request, [1, T, 3 H], P-EAGLE's projection reads its mask slot.
    states_TAH = torch.cat([states.unflatten(-1, (3, HIDDEN))[0] for states in seen if states.dim() == 3])
    assert len(states_TAH) > 4
    assert torch.equal(states_TAH, torch.tensor(expected)[:, None].expand(3, HIDDEN).expand_as(states_TAH))


@auxiliary_families
@pytest.mark.parametrize("left_out", [True, False])
def test_layer_ids_that_are_absent_are_not_guessed(family: str, left_out: bool) -> None:
    """An engine would take 2, n/2 and n-3 without a word (pitfall 8)."""
    written = draft_of(family).config.to_json()
    key = "eagle_aux_hidden_state_layer_ids" if family in ("eagle3", "peagle") else "aux_hidden_state_layer_ids"
    assert written[key]
    changed = {name: value for name, value in written.items() if name != key} | ({} if left_out else {key: None})
    with pytest.raises(FormatError, match=key):
        FAMILIES[family].config.from_json(changed)


@auxiliary_families
@pytest.mark.parametrize("ids", [[3], [0, 2, 5, 8]], ids=len)
def test_any_number_of_layers_is_saved_loaded_and_served(family: str, ids: list[int], tmp_path: Path) -> None:
    """`fc` reads as many states as there are ids; the teacher's last state is none of them (pitfall 9)."""
    verifier = tiny_verifier()
    options = {**contract_of(family).overfit.options, "aux_layer_ids": ids, **whole_vocabulary(family)}
    raw = {**verifier.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    config = config_of(family, VerifierShape.from_config_dict(raw, "random"), options)
    weights = VerifierWeights.from_model(verifier.model)
    Speculator.create(config, weights).save_pretrained(tmp_path, torch.float32)
    loaded = Speculator.from_pretrained(tmp_path).attach_verifier(weights)
    assert loaded.config.aux_layer_ids == ids
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].shape == (HIDDEN, len(ids) * HIDDEN)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    prompts = [[7, 21, 3, 15, 9], [4]]
    llm = LLM.from_parts(verifier, loaded, num_speculative_tokens=3)
    found = llm.generate(prompts, params, use_tqdm=False)
    plain = LLM.from_parts(verifier).generate(prompts, params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in plain]
    assert llm.stats.num_draft_tokens > 0


# What a boolean means where an older file leaves it out; None where readers disagree, so that it must be there.
ABSENT: dict[str, dict[str, bool | None]] = {
    "eagle3": {
        "norm_before_residual": None,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
    },
    "peagle": {
        "norm_before_residual": None,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": True,
    },
    "dflash": {"sample_from_anchor": False, "sliding_window_non_causal": None},
    "dflash2": {"sample_from_anchor": False, "sliding_window_non_causal": True},
    "dspark": {
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "mtp": {},
    "eagle": {"bias": None, "qkv_bias": False, "embed_layernorm": False, "post_embedding_layernorm": False},
    "medusa": {"medusa_fc_bias": None, "original_lm_head": None},
    "mlp_speculator": {"tie_weights": None, "scale_input": None},
}


def is_boolean(annotation: Any) -> bool:
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    return annotation is bool or (bool(choices) and all(isinstance(choice, bool) for choice in choices))


@every_family
def test_what_an_older_config_leaves_out_is_pinned(family: str) -> None:
    """That a flag changes the logits, and that an unknown key is refused, is in the family contract (pitfall 10)."""
    config, written = FAMILIES[family].config, draft_of(family).config.to_json()
    fields = {name for name, field in config.model_fields.items() if is_boolean(field.annotation)}
    assert fields - {"tie_word_embeddings"} == ABSENT[family].keys()
    for name, meant in ABSENT[family].items():
        assert name in written
        old = {key: value for key, value in written.items() if key != name}
        if meant is None:
            with pytest.raises(FormatError, match=f"{name} is missing"):
                config.from_json(old)
        else:
            assert getattr(config.from_json(old), name) is meant, name


@block_families
@pytest.mark.parametrize("window", [{}, {"sliding_window": 3}], ids=["full", "window"])
def test_the_kind_of_mask_that_a_file_says_is_the_one_that_is_used(family: str, window: dict, tmp_path: Path) -> None:
    """Of a block of four after eight tokens, each predicting slot sees others when the flag is flipped (pitfall 12)."""
    speculator = draft_of(family, **window)
    document = pack([[1] * 12], row=12, num_aux=len(speculator.draft.aux_layer_ids))
    speculator.save_pretrained(tmp_path, torch.float32)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    if family != "dspark":
        written["sliding_window_non_causal"] = not written["sliding_window_non_causal"]
    elif window:
        # Its layers with a window are causal; without one they are not.
        written["transformer_layer_config"] |= {"layer_types": ["full_attention"] * 2, "use_sliding_window": False}
    else:
        written["transformer_layer_config"]["is_causal"] = True
    (tmp_path / "config.json").write_text(json.dumps(written), encoding="utf-8")
    flipped = Speculator.from_pretrained(tmp_path).attach_verifier(verifier_weights())
    causal = [[one.config.is_causal(layer) for layer in range(2)] for one in (speculator, flipped)]
    assert causal[0] == [not kind for kind in causal[1]]
    training_logits = contract_of(family).training_logits
    pairs = list(zip(training_logits(speculator, document), training_logits(flipped, document), strict=True))
    assert len(pairs) == speculator.config.max_speculative_tokens
    for slot, (one, other) in enumerate(pairs):
        # Row 7 is the block whose anchor is token 8; tokens that are no candidates have the logit -inf.
        difference = one[7].nan_to_num(neginf=0.0) - other[7].nan_to_num(neginf=0.0)
        assert difference.abs().max() > 1e-3, slot


@every_family
def test_what_was_never_trained_or_is_broken_is_named(family: str, tmp_path: Path) -> None:
    """Norms of exactly one, a tensor of zeros, a single NaN (pitfall 13)."""
    options = options_of(family)
    config = config_of(family, verifier_shape(), options)
    vocab = draft_vocab(config.num_draft_ids) if config.num_draft_ids < VOCAB else None
    Speculator.create(config, verifier_weights(), vocab).save_pretrained(tmp_path, torch.float32)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gains = {name for name, tensor in tensors.items() if tensor.dim() == 1 and name.endswith("weight")}
    assert {name for name in tensors if is_norm(name)} == gains
    said = [fault.message for fault in faults_of(tmp_path) if fault.slug == "norms-all-ones"]
    assert len(said) == bool(gains)
    assert all(name in message for message in said for name in gains)
    draft_of(family).save_pretrained(tmp_path, torch.float32)
    sound = load_file(file)
    before = {(fault.slug, fault.message) for fault in faults_of(tmp_path)}
    name = next(name for name, tensor in sorted(sound.items()) if tensor.dim() > 1 and name.endswith("weight"))
    spoilt = sound[name].clone()
    spoilt.view(-1)[-1] = float("nan")
    for value, slug in ((torch.zeros_like(spoilt), "all-zero"), (spoilt, "not-finite")):
        save_file(sound | {name: value}, file)
        (found,) = [fault for fault in faults_of(tmp_path) if (fault.slug, fault.message) not in before]
        assert (found.slug, name in found.message) == (slug, True)
