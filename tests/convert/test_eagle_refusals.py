"""What is no EAGLE draft of ours, is damaged, or can be read in two ways: refused by its name, and nothing is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.errors import FormatError, UsageError
from tests.convert import layouts_eagle as layouts
from tests.convert.converting import converted
from tests.convert.foreign import Drawn, ForeignCheckpoint
from tests.tiny_models import make_verifier

Change = Callable[[ForeignCheckpoint], None]


def put(**keys: Any) -> Change:
    return lambda case: case.config.update(keys)


def leave_out(key: str) -> Change:
    def change(case: ForeignCheckpoint) -> None:
        del case.config[key]

    return change


def switch(**keys: Any) -> Change:
    return lambda case: case.config["eagle_config"].update(keys)


def without(*names: str) -> Change:
    def change(case: ForeignCheckpoint) -> None:
        for name in names:
            del case.tensors[name]

    return change


def add(name: str, *shape: int) -> Change:
    return lambda case: case.tensors.update({name: torch.ones(shape)})


def replace(name: str, changed: Callable[[Tensor], Tensor]) -> Change:
    return lambda case: case.tensors.update({name: changed(case.tensors[name])})


def as_latent(case: ForeignCheckpoint) -> None:
    case.config["architectures"] = ["Eagle3DeepseekV2ForCausalLM"]
    drawn = Drawn(0)
    for name in ("q", "k", "v"):
        del case.tensors[f"layers.0.self_attn.{name}_proj.weight"]
    case.tensors["layers.0.self_attn.kv_a_proj_with_mqa.weight"] = drawn.matrix(24, 2 * layouts.HIDDEN)
    case.tensors["layers.0.self_attn.kv_b_proj.weight"] = drawn.matrix(64, 16)


def as_four_bits(case: ForeignCheckpoint) -> None:
    case.tensors["layers.0.mlp.up_proj.weight_scale_2"] = torch.tensor(1.0)


Q = "midlayer.self_attn.q_proj"
# maker of a sound checkpoint, what is done to it, and what the refusal has to say
REFUSED: dict[str, tuple[Callable[[], ForeignCheckpoint], Change, str]] = {
    "last state instead of features": (layouts.modelopt, switch(use_aux_hidden_state=False), "use_aux_hidden_state"),
    "no last norm": (layouts.modelopt, switch(use_last_layernorm=False), "use_last_layernorm"),
    "norms of an MTP block": (layouts.modelopt, switch(use_mtp_layernorm=True), "use_mtp_layernorm"),
    "irregular later layers": (layouts.modelopt, switch(next_layer_regular=False), "next_layer_regular"),
    "parallel heads": (layouts.modelopt, add("parallel_draft_heads.0.medusa_layers.0.linear.weight", 2), "parallel"),
    "parallel heads by number": (layouts.modelopt, switch(parallel_draft_heads_num_layers=1), "parallel draft heads"),
    "latent attention": (layouts.modelopt, as_latent, "latent attention"),
    "four bits": (layouts.modelopt, as_four_bits, "NVFP4"),
    "float8 without scale": (
        layouts.modelopt_float8,
        without("layers.0.mlp.up_proj.weight_scale"),
        "up_proj.weight is stored in 8 bits without a scale",
    ),
    "unread norm": (layouts.specforge, put(norm_output=False), "norm_output is false"),
    "id beyond the verifier": (layouts.specforge, switch(eagle_aux_hidden_state_layer_ids=[1, 3, 8]), "layer-ids"),
    "too few ids": (layouts.specforge, switch(eagle_aux_hidden_state_layer_ids=[1, 3]), "reads 3 layers"),
    "ids not ascending": (layouts.specforge, switch(eagle_aux_hidden_state_layer_ids=[5, 3, 0]), "layer-ids"),
    "two lists of ids": (layouts.specforge, put(target_layer_ids=[1, 3, 4]), "give aux_layer_ids"),
    "five features without ids": (layouts.deepspec_eagle3, leave_out("target_layer_ids"), "reads 5 layers"),
    "features of another width": (layouts.specforge, replace("fc.weight", lambda w: w[:, :-1]), "fc-width"),
    "number of features": (layouts.specforge, put(num_aux_hidden_states=4), "num_aux_hidden_states"),
    "another verifier": (layouts.specforge, put(vocab_size=400), "verifier-mismatch"),
    "another verifier's width": (layouts.specforge_other_width, put(target_hidden_size=48), "verifier-mismatch"),
    "more heads": (layouts.safeailab_eagle3, put(num_attention_heads=5), "num_attention_heads 5"),
    "wrong head size": (layouts.specforge, put(head_dim=16), "head_dim is 16"),
    "wrong key heads": (layouts.specforge, put(num_key_value_heads=4), "num_key_value_heads is 4"),
    "wrong inner width": (layouts.specforge, put(intermediate_size=96), "intermediate_size is 96"),
    "number of layers": (layouts.modelopt, put(num_hidden_layers=3), "num_hidden_layers is 3"),
    "layers with a gap": (layouts.peagle, without(*(f"layers.1.{n}" for n in layouts.layer(Drawn(0), 1))), "layers.1"),
    "biases that are lost": (layouts.specforge, put(attention_bias=True), f"{Q}.bias is missing"),
    "another activation": (layouts.specforge, put(hidden_act="gelu"), "hidden_act"),
    "rope by length": (layouts.specforge, put(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_type"),
    "scaled logits": (layouts.specforge, put(logit_scale=0.5), "logit_scale"),
    "a tensor too many": (layouts.specforge, add("midlayer.mlp.gate.weight", 4), "midlayer.mlp.gate.weight"),
    "a tensor too few": (layouts.specforge, without("midlayer.mlp.up_proj.weight"), "up_proj.weight is missing"),
    "no norm": (layouts.specforge, without("norm.weight"), "norm.weight is missing"),
    "a shape": (layouts.specforge, replace("norm.weight", lambda w: w[:-1]), "norm.weight has shape"),
    "two of one tensor": (layouts.modelopt, add("model.layers.0.hidden_norm.weight", layouts.HIDDEN), "are both"),
    "a promised norm": (layouts.specforge, put(norm_before_fc=True), "input_norm.weight is missing"),
    "a silent norm": (layouts.specforge_eagle31, put(fc_norm=False), "fc_norm.0.weight is there"),
    "head and size": (layouts.specforge, put(draft_vocab_size=97), "draft_vocab_size is 97"),
    "architectures of another kind": (layouts.specforge, put(architectures=5), "architectures is 5; expected a list"),
    "architectures in one word": (layouts.hass, put(architectures="LlamaForCausalLM"), "expected a list of names"),
    "parallel heads that are no number": (
        layouts.modelopt, switch(parallel_draft_heads_num_layers="two"), "has parallel draft heads"
    ),
    "a number beyond all": (layouts.specforge, put(rms_norm_eps=10**400), "integer 10000000000000000000... is larger"),
    "no head": (layouts.specforge, without("lm_head.weight"), "lm_head.weight is missing"),
    "no map": (layouts.modelopt, without("d2t"), "no-d2t"),
    "a map of another length": (layouts.modelopt, replace("d2t", lambda m: m[:-1]), "d2t has 95 entries"),
    "maps that disagree": (layouts.specforge, replace("d2t", lambda m: m + 1), "d2t-invalid"),
    "map that was never filled": (layouts.specforge, replace("t2d", torch.ones_like), "before it was filled"),
    "map in floats": (layouts.modelopt, replace("d2t", lambda m: m.float()), "whole numbers"),
    "flags besides 0 and 1": (layouts.nebius, replace("t2d", lambda m: m * 2), "besides 0 and 1"),
    "map of ids or offsets": (
        layouts.modelopt,
        replace("d2t", lambda m: m + torch.arange(len(m))),
        "either offsets .* or the verifier's ids themselves",
    ),
    "map of a whole vocabulary": (
        layouts.deepspec_eagle3,
        lambda case: case.tensors.update(d2t=torch.ones(layouts.VOCAB, dtype=torch.int64)),
        "moves tokens",
    ),
    "no mask token": (layouts.peagle, leave_out("ptd_token_id"), "give mask_token_id"),
    "two mask tokens": (layouts.peagle, put(pard_token=3), "expected one token id"),
    "mask token beyond the table": (layouts.peagle, put(ptd_token_id=layouts.VOCAB), "mask-token-id"),
    "a mask of another width": (layouts.peagle, replace("mask_hidden", lambda m: m[:-1]), "mask_hidden is"),
    "norms a feature in parallel": (
        layouts.peagle,
        lambda case: case.tensors.update({f"fc_norm.{i}.weight": torch.ones(layouts.WIDTH) for i in range(3)}),
        "fc-norm-not-read",
    ),
    "lost bias of fc": (layouts.safeailab_eagle, without("fc.bias"), "takes bias as true"),
    "bias against its flag": (layouts.hass, put(bias=False), "fc.bias is there"),
    "lost attention biases": (
        layouts.hass,
        without(*(f"layers.0.self_attn.{name}_proj.bias" for name in "qkv")),
        "qkv_bias is true",
    ),
    "a bias of the output": (layouts.hass, add("layers.0.self_attn.o_proj.bias", layouts.HIDDEN), "is not zero"),
    "a head of its own": (layouts.hass, add("lm_head.weight", layouts.VOCAB, layouts.HIDDEN), "lm_head.weight"),
    "normalised queries": (
        layouts.hass,
        add("layers.0.self_attn.q_norm.weight", layouts.HIDDEN // layouts.HEADS),
        "normalises queries",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name_and_nothing_is_left(name: str, tiny_verifier: Path, tmp_path: Path) -> None:
    make, change, words = REFUSED[name]
    case = make()
    change(case)
    with pytest.raises(FormatError, match=words):
        converted(case, tmp_path, tiny_verifier)


def test_options_that_mean_nothing_are_refused(tiny_verifier: Path, tmp_path: Path) -> None:
    given: list[tuple[Callable[[], ForeignCheckpoint], dict[str, Any], str]] = [
        (layouts.hass, {"norm_before_residual": True}, "norm_before_residual cannot be given"),
        (layouts.specforge, {"markov_head_type": "rnn"}, "markov_head_type cannot be given"),
        (layouts.specforge, {"norm_before_fc": True}, "input_norm.weight is not there"),
        (layouts.specforge, {"aux_layer_ids": [1, 2]}, "expected 3 depths"),
        (layouts.safeailab_eagle3, {"layer_ids_mean": "depth"}, "layer_ids_mean"),
        (layouts.deepspec_eagle3, {"d2t_holds": "ids"}, "no d2t"),
    ]
    for number, (make, options, words) in enumerate(given):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(UsageError, match=words):
            converted(make(), folder, tiny_verifier, **options)


def test_what_the_file_leaves_open_is_named_and_can_be_said(tiny_verifier: Path, tmp_path: Path) -> None:
    silent = converted(layouts.safeailab_eagle3(), tmp_path, tiny_verifier)
    told = " ".join(silent.plan.notes)
    for words in (
        "depths [2, 4, 5]",
        "norm_before_residual is not written",
        "rope_theta",
        "taken as 3",
        "no embeddings",
    ):
        assert words in told
    (tmp_path / "again").mkdir()
    said = converted(
        layouts.safeailab_eagle3(),
        tmp_path / "again",
        tiny_verifier,
        aux_layer_ids=[1, 4, 8],
        norm_before_residual=True,
        norm_output=True,
        speculative_tokens=7,
    ).plan
    assert said.config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 8]
    assert (said.config["norm_before_residual"], said.config["norm_output"]) == (True, True)
    assert said.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert not any("depths" in note or "norm_before_residual" in note for note in said.notes)


def test_a_default_that_its_verifier_is_too_small_for_is_refused(tmp_path: Path) -> None:
    verifier = make_verifier(tmp_path / "verifier", num_layers=4)
    (tmp_path / "draft").mkdir()
    with pytest.raises(FormatError, match=r"depths \[2, 2, 1\], does not fit a verifier of 4 layers"):
        converted(layouts.safeailab_eagle3(), tmp_path / "draft", verifier)


def test_ids_are_read_as_their_place_or_the_user_means_them(tiny_verifier: Path, tmp_path: Path) -> None:
    ids = converted(layouts.specforge(), tmp_path, tiny_verifier).plan.ids
    assert ids is not None
    assert (ids.read, ids.written, ids.shift) == ((0, 3, 5), (1, 4, 6), 1)
    assert ids.source == "eagle_config.eagle_aux_hidden_state_layer_ids"
    (tmp_path / "again").mkdir()
    ids = converted(layouts.specforge(), tmp_path / "again", tiny_verifier, layer_ids_mean="depth").plan.ids
    assert ids is not None
    assert ids.written == (0, 3, 5)


def test_a_map_of_ids_is_told_by_its_flags_or_by_the_user(tiny_verifier: Path, tmp_path: Path) -> None:
    sound = layouts.absolute_map()
    ids = sound.tensors["d2t"]
    told_by_flags = converted(sound, tmp_path, tiny_verifier)
    assert any("holds the verifier's ids" in note for note in told_by_flags.plan.notes)
    alone = layouts.absolute_map()
    del alone.tensors["t2d"]
    (tmp_path / "again").mkdir()
    told_by_user = converted(alone, tmp_path / "again", tiny_verifier, d2t_holds="ids")
    for conversion in (told_by_flags, told_by_user):
        written = load_file(conversion.directory / "model.safetensors")
        assert torch.equal(written["d2t"], ids - torch.arange(len(ids)))
        assert torch.equal(torch.nonzero(written["t2d"]).flatten(), ids)
    assert told_by_user.plan.derived == {"t2d": "d2t"}


def test_an_empty_map_is_told(tiny_verifier: Path, tmp_path: Path) -> None:
    case = layouts.modelopt()
    case.tensors["d2t"].zero_()
    notes = converted(case, tmp_path, tiny_verifier).plan.notes
    assert any("was the map ever filled" in note for note in notes)


def test_dtypes_become_one_without_loss_or_the_one_that_is_asked_for(tiny_verifier: Path, tmp_path: Path) -> None:
    mixed = converted(layouts.nebius(), tmp_path, tiny_verifier)
    written = load_file(mixed.directory / "model.safetensors")
    foreign = layouts.nebius().tensors
    assert mixed.plan.config["dtype"] == "float32"
    assert {tensor.dtype for tensor in written.values()} == {torch.float32, torch.int64, torch.bool}
    assert torch.equal(written["layers.0.mlp.up_proj.weight"], foreign["midlayer.mlp.up_proj.weight"].float())
    assert torch.equal(written["norm.weight"], foreign["norm.weight"])
    (tmp_path / "again").mkdir()
    asked = converted(layouts.nebius(), tmp_path / "again", tiny_verifier, dtype="bfloat16")
    written = load_file(asked.directory / "model.safetensors")
    assert asked.plan.config["dtype"] == "bfloat16"
    assert torch.equal(written["norm.weight"], foreign["norm.weight"].bfloat16())
    assert any("as asked for" in note for note in asked.plan.notes)


def test_weights_beside_those_that_are_read_are_named(tiny_verifier: Path, tmp_path: Path) -> None:
    case = layouts.modelopt()
    source = case.write(tmp_path / "foreign")
    save_file({"lora_A.weight": torch.ones(2)}, source / "adapter_model.safetensors")
    plan = converted(case, tmp_path, tiny_verifier).plan
    assert any("an adapter of the verifier lies beside the draft" in note for note in plan.notes)
    assert "adapter_model.safetensors" in plan.dropped
