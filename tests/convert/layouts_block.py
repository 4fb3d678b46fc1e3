"""DFlash, DFlash 2 and DSpark drafts for `tests.tiny_models.make_verifier`, as each project writes its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.convert.foreign import Drawn, ForeignCheckpoint, prefixed

# Of the verifier: width, tokens, layers.
WIDTH, VOCAB, LAYERS = 64, 384, 8
INNER, HEADS, KEY_HEADS, SIZE, RANK = 80, 4, 2, 16, 6
MASK, BLOCK = 380, 5
IDS = [1, 3, 6]


def qwen3_config(architecture: str, layers: int = 2, **keys: Any) -> dict[str, Any]:
    """What a block drafter's configuration has at its top level, whoever writes it."""
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": SIZE,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "num_target_layers": LAYERS,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.57.1",
        **keys,
    }


def zlab_config(settings: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """z-lab's, with the code that its files name."""
    nested = {"mask_token_id": MASK, "target_layer_ids": IDS, **settings}
    code = {"AutoModel": "dflash.DFlashDraftModel"}
    return qwen3_config("DFlashDraftModel", auto_map=code, dflash_config=nested, **keys)


def backbone(drawn: Drawn, layers: int = 2, features: int = 3, width: int = WIDTH) -> dict[str, Tensor]:
    """DFlash's tensors, under the names that all of its writers use."""
    tensors = {
        "fc.weight": drawn.matrix(width, features * WIDTH),
        "hidden_norm.weight": drawn.norm(width),
        "norm.weight": drawn.norm(width),
    }
    for index in range(layers):
        tensors |= prefixed(_layer(drawn, width), f"layers.{index}.")
    return tensors


def _layer(drawn: Drawn, width: int) -> dict[str, Tensor]:
    return {
        "input_layernorm.weight": drawn.norm(width),
        "post_attention_layernorm.weight": drawn.norm(width),
        "self_attn.q_proj.weight": drawn.matrix(HEADS * SIZE, width),
        "self_attn.k_proj.weight": drawn.matrix(KEY_HEADS * SIZE, width),
        "self_attn.v_proj.weight": drawn.matrix(KEY_HEADS * SIZE, width),
        "self_attn.o_proj.weight": drawn.matrix(width, HEADS * SIZE),
        "self_attn.q_norm.weight": drawn.norm(SIZE),
        "self_attn.k_norm.weight": drawn.norm(SIZE),
        "mlp.gate_proj.weight": drawn.matrix(INNER, width),
        "mlp.up_proj.weight": drawn.matrix(INNER, width),
        "mlp.down_proj.weight": drawn.matrix(width, INNER),
    }


def own_vocabulary(drawn: Drawn, drafted: int = VOCAB, width: int = WIDTH) -> dict[str, Tensor]:
    """Embeddings and head of a draft's own."""
    return {"embed_tokens.weight": drawn.matrix(VOCAB, width) * 4, "lm_head.weight": drawn.matrix(drafted, width) * 2}


def zlab() -> ForeignCheckpoint:
    return ForeignCheckpoint("z-lab-dflash", zlab_config({}, block_size=BLOCK), backbone(Drawn(1)))


def zlab_later() -> ForeignCheckpoint:
    """Everything about blocks in `dflash_config`, in two files."""
    config = zlab_config({"block_size": BLOCK, "use_aux_hidden_state": True, "causal": False}, layers=3)
    return ForeignCheckpoint("z-lab-dflash-nested", config, backbone(Drawn(2), layers=3), container="sharded")


def zlab_causal() -> ForeignCheckpoint:
    config = zlab_config({"causal": True}, block_size=BLOCK)
    return ForeignCheckpoint("z-lab-dflash-causal", config, backbone(Drawn(3)))


def zlab_windows() -> ForeignCheckpoint:
    """Windows in all layers and nothing about causality, which engines then take for causal."""
    types = ["sliding_attention", "sliding_attention"]
    config = zlab_config({}, block_size=BLOCK, layer_types=types, sliding_window=4, use_sliding_window=True)
    return ForeignCheckpoint("z-lab-dflash-windows", config, backbone(Drawn(4)))


def zlab_mixed_windows() -> ForeignCheckpoint:
    types = ["sliding_attention", "full_attention"]
    config = zlab_config({"causal": False}, block_size=BLOCK, layer_types=types, sliding_window=4)
    return ForeignCheckpoint("z-lab-dflash-mixed", config, backbone(Drawn(5)))


def zlab_unordered() -> ForeignCheckpoint:
    config = zlab_config({"target_layer_ids": [6, 1, 3]}, block_size=BLOCK)
    return ForeignCheckpoint("z-lab-dflash-unordered", config, backbone(Drawn(6)))


def zlab_default_ids() -> ForeignCheckpoint:
    config = zlab_config({}, block_size=BLOCK)
    del config["dflash_config"]["target_layer_ids"]
    return ForeignCheckpoint("z-lab-dflash-no-ids", config, backbone(Drawn(7)))


def zlab_yarn() -> ForeignCheckpoint:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = zlab_config({}, block_size=BLOCK, rope_scaling=scaling)
    return ForeignCheckpoint("z-lab-dflash-yarn", config, backbone(Drawn(8)))


def specforge_dflash() -> ForeignCheckpoint:
    """Under the name that its training has for the model."""
    config = qwen3_config(
        "DFlashDraftModel", block_size=BLOCK, dflash_config={"mask_token_id": MASK, "target_layer_ids": IDS}
    )
    return ForeignCheckpoint("specforge-dflash", config, prefixed(backbone(Drawn(9)), "draft_model."), container="bin")


def modelopt_dflash() -> ForeignCheckpoint:
    config = qwen3_config(
        "DFlashDraftModel", block_size=BLOCK, dflash_config={"mask_token_id": MASK, "target_layer_ids": IDS}
    )
    return ForeignCheckpoint("modelopt-dflash", config, prefixed(backbone(Drawn(10)), "dflash_module."))


def modelopt_windows() -> ForeignCheckpoint:
    settings = {"use_swa": True, "swa_window_size": 4, "causal": False}
    nested = {"mask_token_id": MASK, "target_layer_ids": IDS, **settings}
    config = qwen3_config("DFlashDraftModel", block_size=BLOCK, dflash_config=nested)
    return ForeignCheckpoint("modelopt-dflash-windows", config, backbone(Drawn(11)))


def encoder_names() -> ForeignCheckpoint:
    """Features are combined by an `encoder`, as engines take from Glimmer's files."""
    tensors = backbone(Drawn(12))
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    return ForeignCheckpoint("encoder-dflash", zlab_config({}, block_size=BLOCK), tensors)


def fused_projections() -> ForeignCheckpoint:
    tensors = backbone(Drawn(13))
    for index in range(2):
        parts = [tensors.pop(f"layers.{index}.self_attn.{name}_proj.weight") for name in "qkv"]
        tensors[f"layers.{index}.self_attn.qkv_proj.weight"] = torch.cat(parts)
    return ForeignCheckpoint("fused-dflash", zlab_config({}, block_size=BLOCK), tensors)


def reduced_vocabulary() -> ForeignCheckpoint:
    drawn = Drawn(14)
    ids = drawn.ids(96, VOCAB)
    tensors = backbone(drawn) | {"lm_head.weight": 2 * drawn.matrix(96, WIDTH), "d2t": ids - torch.arange(96)}
    config = zlab_config({}, block_size=BLOCK, draft_vocab_size=96)
    return ForeignCheckpoint("reduced-dflash", config, tensors)


def other_width() -> ForeignCheckpoint:
    drawn = Drawn(15)
    tensors = backbone(drawn, width=48) | own_vocabulary(drawn, width=48)
    return ForeignCheckpoint("other-width-dflash", zlab_config({}, block_size=BLOCK, hidden_size=48), tensors)


def deepspec_dflash() -> ForeignCheckpoint:
    """DSpark's code without its heads: every slot predicts the token after its own."""
    drawn = Drawn(16)
    config = deepspec_config(markov_rank=0, enable_confidence_head=False)
    return ForeignCheckpoint("deepspec-dflash", config, backbone(drawn) | own_vocabulary(drawn))


def deepspec_config(**keys: Any) -> dict[str, Any]:
    """DeepSpec's, the verifier's own with all settings at the top level."""
    return qwen3_config(
        "Qwen3DSparkModel",
        **{
            "block_size": BLOCK,
            "mask_token_id": MASK,
            "target_layer_ids": IDS,
            "num_anchors": 512,
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "layer_types": ["full_attention"] * 2,
            **keys,
        },
    )


def markov(drawn: Drawn, kind: str, drafted: int = VOCAB) -> dict[str, Tensor]:
    """A Markov head's tensors, as DeepSpec names them below `markov_head`."""
    tensors = {"markov_w1.weight": 2 * drawn.matrix(VOCAB, RANK), "markov_w2.weight": drawn.matrix(drafted, RANK)}
    if kind == "gated":
        return tensors | {"gate_proj.weight": drawn.matrix(RANK, WIDTH + RANK), "gate_proj.bias": drawn.bias(RANK)}
    if kind == "rnn":
        joint = {"joint_proj.weight": drawn.matrix(3 * RANK, 2 * RANK + WIDTH), "joint_proj.bias": drawn.bias(3 * RANK)}
        return tensors | joint
    return tensors


def confidence(drawn: Drawn, width: int) -> dict[str, Tensor]:
    """A confidence head's weight and bias."""
    return {"weight": drawn.matrix(1, width), "bias": drawn.bias(1)}


def _deepspec(kind: str, seed: int, *, with_markov: bool = True) -> ForeignCheckpoint:
    drawn = Drawn(seed)
    tensors = {
        **backbone(drawn),
        **own_vocabulary(drawn),
        **prefixed(markov(drawn, kind), "markov_head."),
        **prefixed(confidence(drawn, WIDTH + RANK * with_markov), "confidence_head.proj."),
    }
    config = deepspec_config(markov_head_type=kind, confidence_head_with_markov=with_markov)
    return ForeignCheckpoint(f"deepspec-dspark-{kind}", config, tensors)


def deepspec_vanilla() -> ForeignCheckpoint:
    return _deepspec("vanilla", 20)


def deepspec_gated() -> ForeignCheckpoint:
    return _deepspec("gated", 21, with_markov=False)


def deepspec_rnn() -> ForeignCheckpoint:
    return _deepspec("rnn", 22)


def deepspec_embeddings_as_feature() -> ForeignCheckpoint:
    """Its id -1 is the verifier's embeddings; the confidence head is left out."""
    drawn = Drawn(23)
    tensors = backbone(drawn) | own_vocabulary(drawn) | prefixed(markov(drawn, "vanilla"), "markov_head.")
    config = deepspec_config(target_layer_ids=[-1, 2, 6], enable_confidence_head=False)
    return ForeignCheckpoint("deepspec-dspark-embeddings", config, tensors)


def specforge_dspark() -> ForeignCheckpoint:
    drawn = Drawn(24)
    nested = {
        "mask_token_id": MASK,
        "target_layer_ids": IDS,
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "markov_rank": RANK,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    tensors = {
        **backbone(drawn),
        **prefixed(markov(drawn, "gated"), "markov_head."),
        **prefixed(confidence(drawn, WIDTH + RANK), "confidence_head.proj."),
    }
    config = qwen3_config("DSparkDraftModel", block_size=BLOCK, dflash_config=nested)
    return ForeignCheckpoint("specforge-dspark", config, tensors)


def _modelopt(kind: str, seed: int) -> ForeignCheckpoint:
    """Heads without prefixes, beside layers whose MLP has a `gate_proj` too."""
    drawn = Drawn(seed)
    nested = {
        "mask_token_id": MASK,
        "target_layer_ids": IDS,
        "projector_type": "dspark",
        "shift_label": True,
        "markov_rank": RANK,
        "markov_head_type": kind,
        "use_confidence_head": True,
    }
    tensors = {
        **backbone(drawn),
        **markov(drawn, kind),
        **prefixed(confidence(drawn, WIDTH + RANK), "confidence_proj."),
    }
    config = qwen3_config("DFlashDraftModel", block_size=BLOCK, dflash_config=nested)
    return ForeignCheckpoint(f"modelopt-dspark-{kind}", config, tensors)


def modelopt_vanilla() -> ForeignCheckpoint:
    return _modelopt("vanilla", 25)


def modelopt_gated() -> ForeignCheckpoint:
    return _modelopt("gated", 26)


def modelopt_rnn() -> ForeignCheckpoint:
    return _modelopt("rnn", 27)


def zlab_dflash2() -> ForeignCheckpoint:
    """Two taps, groups of 16 channels, and a selector among 7 candidates."""
    drawn = Drawn(30)
    tensors = backbone(drawn)
    for index in range(2):
        for name in ("attention_conv", "mlp_conv"):
            place = f"layers.{index}.{name}"
            kernel = drawn.matrix(2 * 2, WIDTH).view(2, 2, WIDTH)
            kernel[:, 0] += 1
            tensors[f"{place}.base_kernel"] = kernel
            tensors[f"{place}.kernel_projection.weight"] = 0.2 * drawn.matrix(2 * 2 * (WIDTH // 16), WIDTH)
    tensors |= {
        "candidate_selector.predecessor_codebook": 3 * drawn.matrix(VOCAB, RANK),
        "candidate_selector.successor_codebook": 3 * drawn.matrix(VOCAB, RANK),
        "candidate_selector.hidden_projection.weight": drawn.matrix(RANK, WIDTH),
    }
    sizes = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 7}
    config = zlab_config({**sizes, "causal": False}, block_size=BLOCK) | {"architectures": ["DFlash2DraftModel"]}
    return ForeignCheckpoint("z-lab-dflash2", config, tensors)


CASES: list[Callable[[], ForeignCheckpoint]] = [
    *(zlab, zlab_later, zlab_causal, zlab_windows, zlab_mixed_windows, zlab_unordered, zlab_default_ids, zlab_yarn),
    *(specforge_dflash, modelopt_dflash, modelopt_windows, encoder_names, fused_projections, reduced_vocabulary),
    *(other_width, deepspec_dflash, deepspec_vanilla, deepspec_gated, deepspec_rnn, deepspec_embeddings_as_feature),
    *(specforge_dspark, modelopt_vanilla, modelopt_gated, modelopt_rnn, zlab_dflash2),
]
