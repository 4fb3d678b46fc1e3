"""What is no block drafter of ours, is damaged, or can be read in two ways: refused by name, and nothing is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.errors import FormatError, UsageError
from tests.convert import layouts_block as layouts
from tests.convert.converting import converted
from tests.convert.foreign import ForeignCheckpoint

Change = Callable[[ForeignCheckpoint], None]


def put(**keys: Any) -> Change:
    return lambda case: case.config.update(keys)


def settle(**keys: Any) -> Change:
    return lambda case: case.config["dflash_config"].update(keys)


def forget(key: str) -> Change:
    return lambda case: (case.config.pop(key, None), case.config.get("dflash_config", {}).pop(key, None), None)[-1]


def respell(key: str, wrong: str) -> Change:
    return lambda case: case.config.update({wrong: case.config.pop(key)})


def without(*names: str) -> Change:
    return lambda case: [case.tensors.pop(name) for name in names].clear()


def add(name: str, *shape: int) -> Change:
    return lambda case: case.tensors.update({name: torch.ones(shape)})


def rename(old: str, new: str) -> Change:
    return lambda case: case.tensors.update({new: case.tensors.pop(old)})


def cut(name: str) -> Change:
    return lambda case: case.tensors.update({name: case.tensors[name][:-1].clone()})


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
REFUSED: dict[str, tuple[Callable[[], ForeignCheckpoint], Change, str]] = {
    "attention sinks": (layouts.zlab, settle(attention_sink_bias=True), "attention_sink_bias is True"),
    "sink tensors": (layouts.zlab, add("layers.0.self_attn.attention_sink_bias", 4), r"attention sinks"),
    "gated attention": (layouts.fused_projections, add("layers.1.self_attn.g_proj.weight", 4, 64), r"gated attention"),
    "norms of features": (layouts.zlab, add("aux_hidden_norms.0.weight", 64), "norms of single features"),
    "embedding scale": (layouts.zlab, settle(input_embedding_scale=8.0), "input_embedding_scale is 8.0"),
    "output multiplier": (layouts.zlab_dflash2, settle(output_multiplier=0.5), "output_multiplier is 0.5"),
    "softcap": (layouts.zlab, settle(final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
    "last state alone": (layouts.zlab, settle(use_aux_hidden_state=False), "use_aux_hidden_state is False"),
    "learned state": (layouts.zlab, add("mask_hidden", 192), "learned state"),
    "domino": (layouts.zlab, settle(projector_type="domino"), "Domino draft runs a GRU"),
    "domino tensors": (layouts.zlab, add("prefix_gru.weight_ih_l0", 3, 64), "Domino draft runs a GRU"),
    "dflare": (layouts.zlab, add("layer_fusion_weights", 2, 8), "DFlare draft weighs layers"),
    "xpress": (layouts.deepspec_vanilla, put(architectures=["XPressDraftModel"]), "XPress draft has heads"),
    "gemma-4": (layouts.deepspec_vanilla, put(architectures=["Gemma4DSparkModel"]), "Gemma-4's layers"),
    "omni": (layouts.deepspec_vanilla, put(architectures=["Qwen3OmniDSparkModel"]), "positions of several axes"),
    "deepseek-v4": (
        layouts.deepspec_vanilla,
        put(model_type="deepseek_v4", dspark_target_layer_ids=[1]),
        "part of its verifier's checkpoint",
    ),
    "unknown setting": (
        layouts.zlab,
        settle(blok_size=4),
        r"blok_size is not a known key \(did you mean",
    ),
    "misspelt key": (
        layouts.zlab_windows,
        lambda case: put(layer_typs=case.config.pop("layer_types"))(case),
        "layer_typs",
    ),
    "two block sizes": (layouts.zlab, settle(block_size=7), "dflash_config.block_size is 7, block_size is 5"),
    "no block size": (layouts.zlab, forget("block_size"), "block_size is written neither"),
    "no mask token": (layouts.zlab, forget("mask_token_id"), "mask_token_id is written neither"),
    "mask token beyond": (layouts.zlab, settle(mask_token_id=384), "mask_token_id 384 has no embedding"),
    "no rope base": (layouts.zlab, forget("rope_theta"), "no rope_theta"),
    "another verifier": (layouts.zlab, put(num_target_layers=36), "num_target_layers is 36"),
    "another vocabulary": (layouts.zlab, put(vocab_size=400), "vocab_size is 400"),
    "last output": (layouts.zlab, settle(target_layer_ids=[1, 3, 7]), "after the final norm"),
    "beyond the last": (layouts.zlab, settle(target_layer_ids=[1, 3, 8]), "the verifier has 0..8"),
    "a layer twice": (layouts.zlab, settle(target_layer_ids=[1, 3, 3]), "one of them twice"),
    "too few layers": (layouts.zlab, settle(target_layer_ids=[1, 3]), r"has 2 layers; by its width fc.weight reads 3"),
    "odd width": (layouts.zlab, lambda case: case.tensors.update({"fc.weight": torch.ones(64, 100)}), "no multiple"),
    "two policies": (layouts.zlab, put(**MIXED), "some layers have a window"),
    "more layers than tensors": (
        layouts.modelopt_windows,
        lambda case: case.config.update(num_hidden_layers=10**15),
        "num_hidden_layers is 10{15}",
    ),
    "window of no width": (layouts.zlab, settle(use_swa=True), "swa_window_size None"),
    "windows of no layer": (layouts.zlab, put(use_sliding_window=True), "layer_types does not say"),
    "missing tensor": (layouts.zlab, without("layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight is missing"),
    "missing norm": (layouts.zlab, without("hidden_norm.weight"), "hidden_norm.weight is missing"),
    "extra tensor": (layouts.zlab, add("layers.0.mlp.extra.weight", 4), "layers.0.mlp.extra.weight .* has no place"),
    "renamed tensor": (layouts.zlab, rename("norm.weight", "final_norm.weight"), "final_norm.weight"),
    "cut tensor": (layouts.zlab, cut("layers.0.mlp.down_proj.weight"), "has shape"),
    "head without tensors": (layouts.deepspec_dflash, put(markov_rank=6), "markov_rank is above 0"),
    "another draft vocabulary": (layouts.reduced_vocabulary, put(draft_vocab_size=90), "the draft proposes 96 tokens"),
    "states of another width": (layouts.zlab, put(target_hidden_size=128), "target_hidden_size is 128"),
    "no map": (layouts.reduced_vocabulary, without("d2t"), "its map is lost"),
    "one head twice": (layouts.modelopt_vanilla, add("markov_head.markov_w1.weight", 384, 6), "markov_w1.weight"),
    "gate of a vanilla head": (layouts.modelopt_gated, settle(markov_head_type="vanilla"), "gate_proj"),
    "vanilla in place of gated": (layouts.modelopt_vanilla, settle(markov_head_type="gated"), "gate_proj"),
    "another rank": (layouts.deepspec_vanilla, put(markov_rank=5), "markov_w1.weight has shape"),
    "no confidence tensors": (
        layouts.deepspec_vanilla,
        without("confidence_head.proj.weight", "confidence_head.proj.bias"),
        "confidence_head.proj.weight is missing",
    ),
    "confidence switched off": (layouts.deepspec_vanilla, put(enable_confidence_head=False), "confidence_head"),
    "confidence without markov": (layouts.deepspec_vanilla, put(confidence_head_with_markov=False), "has shape"),
    "windows of both kinds": (layouts.deepspec_vanilla, put(**SLIDING, causal=False), "run a DSpark draft's causally"),
    "ModelOpt's windows": (layouts.modelopt_vanilla, settle(use_swa=True, swa_window_size=4), "run a DSpark"),
    "no candidates": (layouts.zlab_dflash2, forget("selector_top_k"), "selector_top_k is written neither"),
    "another group": (layouts.zlab_dflash2, settle(conv_group_size=32), "kernel_projection.weight has shape"),
    "no codebook": (
        layouts.zlab_dflash2,
        without("candidate_selector.predecessor_codebook"),
        "predecessor_codebook is missing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_named(name: str, tiny_verifier: Path, tmp_path: Path) -> None:
    make, change, text = REFUSED[name]
    case = make()
    change(case)
    with pytest.raises(FormatError, match=text):
        converted(case, tmp_path, tiny_verifier)


def test_a_drafter_inside_its_verifiers_checkpoint_is_named(tiny_verifier: Path, tmp_path: Path) -> None:
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dspark_target_layer_ids": [1, 3],
        "dspark_noise_token_id": 5,
    }
    case = ForeignCheckpoint("deepseek-v4", config, {"mtp.0.enorm.weight": torch.ones(64)})
    with pytest.raises(FormatError, match="part of its verifier's checkpoint"):
        converted(case, tmp_path, tiny_verifier)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"norm_before_fc": True}, "norm_before_fc cannot be given for a DFlash draft"),
        ({"markov_head_type": "rnn"}, "markov_head_type cannot be given for a DFlash draft"),
        ({"aux_layer_ids": [1, 2]}, "expected 3 depths"),
        ({"aux_layer_ids": [1, 2, 9]}, "within 0..8"),
    ],
)
def test_an_option_that_means_nothing_is_refused(
    options: dict[str, Any], text: str, tiny_verifier: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=text):
        converted(layouts.zlab(), tmp_path, tiny_verifier, **options)


def test_more_tokens_than_a_block_predicts_are_refused(tiny_verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="predicts 4 tokens"):
        converted(layouts.zlab(), tmp_path, tiny_verifier, speculative_tokens=5)
