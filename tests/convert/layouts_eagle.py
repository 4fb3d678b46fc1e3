"""EAGLE-1, HASS, EAGLE-3 and P-EAGLE drafts for `tests.tiny_models.make_verifier`, as each project writes its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.convert.foreign import Drawn, ForeignCheckpoint, prefixed

# Of the verifier: width, tokens, layers.
WIDTH, VOCAB, LAYERS = 64, 384, 8
HIDDEN, INNER, HEADS, KEY_HEADS, DRAFT_VOCAB = 64, 80, 4, 2, 96
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def llama_config(architecture: str, **keys: Any) -> dict[str, Any]:
    """A Llama configuration of one small layer."""
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
        "transformers_version": "4.46.2",
        **keys,
    }


def layer(drawn: Drawn, read: int, head_dim: int = HIDDEN // HEADS, hidden: int = HIDDEN) -> dict[str, Tensor]:
    """A decoder layer whose attention reads `read` numbers."""
    wide, narrow = HEADS * head_dim, KEY_HEADS * head_dim
    return {
        "self_attn.q_proj.weight": drawn.matrix(wide, read),
        "self_attn.k_proj.weight": drawn.matrix(narrow, read),
        "self_attn.v_proj.weight": drawn.matrix(narrow, read),
        "self_attn.o_proj.weight": drawn.matrix(hidden, wide),
        "mlp.gate_proj.weight": drawn.matrix(INNER, hidden),
        "mlp.up_proj.weight": drawn.matrix(INNER, hidden),
        "mlp.down_proj.weight": drawn.matrix(hidden, INNER),
        "post_attention_layernorm.weight": drawn.norm(hidden),
        "input_layernorm.weight": drawn.norm(hidden),
    }


def biases(drawn: Drawn, head_dim: int = HIDDEN // HEADS) -> dict[str, Tensor]:
    """Biases of queries, keys and values."""
    sizes = {"q": HEADS * head_dim, "k": KEY_HEADS * head_dim, "v": KEY_HEADS * head_dim}
    return {f"self_attn.{name}_proj.bias": drawn.bias(size) for name, size in sizes.items()}


def fused(drawn: Drawn, first: str, features: int = 3, head_dim: int = HIDDEN // HEADS) -> dict[str, Tensor]:
    """What every EAGLE-3 has but for its head and map."""
    return {
        "fc.weight": drawn.matrix(HIDDEN, features * WIDTH),
        "norm.weight": drawn.norm(HIDDEN),
        f"{first}.hidden_norm.weight": drawn.norm(HIDDEN),
        **prefixed(layer(drawn, 2 * HIDDEN, head_dim), f"{first}."),
    }


def reduced(drawn: Drawn) -> dict[str, Tensor]:
    """Head and map of a reduced vocabulary: offsets and flags."""
    ids = drawn.ids(DRAFT_VOCAB, VOCAB)
    return {
        "lm_head.weight": 2 * drawn.matrix(DRAFT_VOCAB, HIDDEN),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
    }


def safeailab_eagle3() -> ForeignCheckpoint:
    """`midlayer`, half precision in a pickle, no embeddings, no layer ids, rope by its code's defaults."""
    drawn = Drawn(1)
    tensors = {**fused(drawn, "midlayer"), **reduced(drawn)}
    halves = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    config = llama_config("LlamaForCausalLM", draft_vocab_size=DRAFT_VOCAB, pad_token_id=0, torch_dtype="float16")
    return ForeignCheckpoint("safeailab-eagle3", config, halves, container="bin")


def safeailab_eagle3_llama3() -> ForeignCheckpoint:
    """The same with Llama 3's rope, in a safetensors file, its rotary buffer stored."""
    drawn = Drawn(2)
    tensors = {**fused(drawn, "midlayer"), **reduced(drawn)}
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(HIDDEN // HEADS // 2)
    config = llama_config(
        "LlamaForCausalLM", draft_vocab_size=DRAFT_VOCAB, rope_theta=500000.0, rope_scaling=LLAMA3, pad_token_id=0
    )
    return ForeignCheckpoint("safeailab-eagle3-llama3", config, tensors)


def specforge() -> ForeignCheckpoint:
    """`eagle_config` with ids of outputs, embeddings saved, heads of their own size, two shards."""
    drawn = Drawn(3)
    tensors = {**fused(drawn, "midlayer", head_dim=24), **reduced(drawn)}
    tensors["embed_tokens.weight"] = drawn.matrix(VOCAB, HIDDEN)
    config = llama_config(
        "LlamaForCausalLMEagle3",
        draft_vocab_size=DRAFT_VOCAB,
        head_dim=24,
        rope_theta=1000000.0,
        norm_output=True,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 5], "use_aux_hidden_state": True},
    )
    return ForeignCheckpoint("specforge", config, tensors, container="sharded")


def specforge_eagle31() -> ForeignCheckpoint:
    """EAGLE-3.1: a norm a feature before `fc`, and normed states handed on; linear rope."""
    drawn = Drawn(4)
    tensors = {**fused(drawn, "midlayer"), **reduced(drawn)}
    tensors |= {f"fc_norm.{index}.weight": drawn.norm(WIDTH) for index in range(3)}
    config = llama_config(
        "LlamaForCausalLMEagle3",
        draft_vocab_size=DRAFT_VOCAB,
        rope_theta=10000.0,
        rope_scaling={"type": "linear", "factor": 4.0},
        fc_norm=True,
        norm_output=True,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    )
    return ForeignCheckpoint("specforge-eagle3.1", config, tensors)


def specforge_other_width() -> ForeignCheckpoint:
    """A draft of another width than the verifier's, with embeddings of its own."""
    drawn, hidden = Drawn(5), 48
    tensors = {
        "fc.weight": drawn.matrix(hidden, 3 * WIDTH),
        "norm.weight": drawn.norm(hidden),
        "midlayer.hidden_norm.weight": drawn.norm(hidden),
        **prefixed(layer(drawn, 2 * hidden, 16, hidden), "midlayer."),
        "embed_tokens.weight": drawn.matrix(VOCAB, hidden),
        **reduced(drawn),
        "lm_head.weight": drawn.matrix(DRAFT_VOCAB, hidden),
    }
    config = llama_config(
        "LlamaForCausalLMEagle3",
        hidden_size=hidden,
        head_dim=16,
        target_hidden_size=WIDTH,
        draft_vocab_size=DRAFT_VOCAB,
        rope_theta=10000.0,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    )
    return ForeignCheckpoint("specforge-other-width", config, tensors)


def angelslim() -> ForeignCheckpoint:
    """An architecture name of its own, ids of outputs in a key of its own, everything behind a wrapper's prefix."""
    drawn = Drawn(6)
    tensors = prefixed({**fused(drawn, "midlayer", head_dim=24), **reduced(drawn)}, "module.")
    config = llama_config(
        "Eagle3LlamaForCausalLM",
        target_model_type="qwen3",
        draft_vocab_size=DRAFT_VOCAB,
        head_dim=24,
        rope_theta=1000000.0,
        aux_hidden_states_layer_ids=[1, 4, 6],
    )
    return ForeignCheckpoint("angelslim", config, tensors)


MODELOPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 0,
}


def modelopt() -> ForeignCheckpoint:
    """`layers.0` and a regular `layers.1`, `d2t` alone, nested rope settings."""
    drawn = Drawn(7)
    tensors = {**fused(drawn, "layers.0"), **prefixed(layer(drawn, HIDDEN), "layers.1."), **reduced(drawn)}
    del tensors["t2d"]
    config = llama_config(
        "LlamaForCausalLMEagle3",
        num_hidden_layers=2,
        draft_vocab_size=DRAFT_VOCAB,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        eagle_config={**MODELOPT, "eagle_aux_hidden_state_layer_ids": [1, 2, 5]},
    )
    return ForeignCheckpoint("modelopt-eagle3", config, tensors)


def modelopt_megatron() -> ForeignCheckpoint:
    """`midlayer`, `d2t` alone; its layer adds the normed state, which only its user knows."""
    drawn = Drawn(8)
    tensors = {**fused(drawn, "midlayer"), **reduced(drawn)}
    del tensors["t2d"]
    config = llama_config(
        "LlamaForCausalLMEagle3",
        draft_vocab_size=DRAFT_VOCAB,
        rope_theta=10000.0,
        eagle_config={**MODELOPT, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    )
    return ForeignCheckpoint("modelopt-megatron", config, tensors, {"norm_before_residual": True})


def modelopt_float8() -> ForeignCheckpoint:
    """Every matrix of the layer in float8, with a scale a tensor, or a row for `down_proj`."""
    drawn = Drawn(9)
    tensors = {**fused(drawn, "layers.0"), **reduced(drawn)}
    del tensors["t2d"]
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        matrix = tensors[name]
        whole = not name.endswith("down_proj.weight")
        scale = (matrix.abs().max() if whole else matrix.abs().amax(1, keepdim=True)) / 448
        tensors[name] = (matrix / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        tensors[f"{name.removesuffix('.weight')}.input_scale"] = torch.tensor(0.5)
    config = llama_config(
        "LlamaForCausalLMEagle3",
        draft_vocab_size=DRAFT_VOCAB,
        rope_theta=10000.0,
        eagle_config={**MODELOPT, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        quantization_config={"quant_algo": "FP8", "quant_method": "modelopt"},
    )
    return ForeignCheckpoint("modelopt-float8", config, tensors)


def deepspec_eagle3() -> ForeignCheckpoint:
    """Qwen3 layers, five features by top-level ids of outputs, the whole vocabulary, embeddings and head of its own."""
    drawn, head_dim = Drawn(10), 24
    tensors = {
        **fused(drawn, "layers.0", 5, head_dim),
        "layers.0.self_attn.q_norm.weight": drawn.norm(head_dim),
        "layers.0.self_attn.k_norm.weight": drawn.norm(head_dim),
        "embed_tokens.weight": drawn.matrix(VOCAB, HIDDEN),
        "lm_head.weight": 2 * drawn.matrix(VOCAB, HIDDEN),
    }
    config = llama_config(
        "Qwen3Eagle3Model",
        model_type="qwen3",
        head_dim=head_dim,
        rope_theta=1000000.0,
        layer_types=["full_attention"] * LAYERS,
        sliding_window=None,
        use_sliding_window=False,
        tie_word_embeddings=False,
        target_layer_ids=[-1, 1, 3, 4, 6],
        num_target_layers=LAYERS,
        ttt_length=7,
    )
    return ForeignCheckpoint("deepspec-eagle3", config, tensors)


def nebius() -> ForeignCheckpoint:
    """Maps in int32 and uint8, matrices in bfloat16 beside norms in float32."""
    drawn = Drawn(11)
    tensors = {**fused(drawn, "midlayer"), **reduced(drawn)}
    tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items() if tensor.dim() == 2}
    tensors |= {"d2t": tensors["d2t"].int(), "t2d": tensors["t2d"].to(torch.uint8)}
    config = llama_config("LlamaForCausalLMEagle3", draft_vocab_size=DRAFT_VOCAB, rope_theta=10000.0)
    return ForeignCheckpoint("nebius", config, tensors)


def absolute_map() -> ForeignCheckpoint:
    """`d2t` holds the verifier's ids, which `t2d` gives away."""
    drawn = Drawn(12)
    tensors = {**fused(drawn, "midlayer"), **reduced(drawn)}
    tensors["d2t"] = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    config = llama_config("LlamaForCausalLMEagle3", draft_vocab_size=DRAFT_VOCAB, rope_theta=10000.0)
    return ForeignCheckpoint("absolute-map", config, tensors)


def flags_alone() -> ForeignCheckpoint:
    """`t2d` without `d2t`."""
    drawn = Drawn(13)
    tensors = {**fused(drawn, "midlayer"), **reduced(drawn)}
    del tensors["d2t"]
    config = llama_config("LlamaForCausalLMEagle3", draft_vocab_size=DRAFT_VOCAB, rope_theta=10000.0)
    return ForeignCheckpoint("flags-alone", config, tensors)


def depth_ids() -> ForeignCheckpoint:
    """Keys that vLLM reads: depths at the top level, a norm over all features, biases but for the output's."""
    drawn = Drawn(14)
    tensors = {**fused(drawn, "layers.0"), **prefixed(biases(drawn), "layers.0."), **reduced(drawn)}
    tensors["input_norm.weight"] = drawn.norm(3 * WIDTH)
    config = llama_config(
        "Eagle3LlamaForCausalLM",
        draft_vocab_size=DRAFT_VOCAB,
        rope_theta=10000.0,
        qkv_bias=True,
        norm_before_fc=True,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[1, 3, 7],
    )
    return ForeignCheckpoint("depth-ids", config, tensors)


def peagle() -> ForeignCheckpoint:
    """Four layers, the last three regular, `mask_hidden` in one row, trained embeddings."""
    drawn = Drawn(15)
    tensors = {**fused(drawn, "layers.0"), **reduced(drawn)}
    for index in (1, 2, 3):
        tensors |= prefixed(layer(drawn, HIDDEN), f"layers.{index}.")
    tensors |= {"mask_hidden": drawn.bias(3 * WIDTH), "embed_tokens.weight": drawn.matrix(VOCAB, HIDDEN)}
    config = llama_config(
        "PEagleDraftModel",
        num_hidden_layers=4,
        draft_vocab_size=DRAFT_VOCAB,
        rope_theta=10000.0,
        ptd_token_id=VOCAB - 2,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 5]},
    )
    return ForeignCheckpoint("peagle", config, tensors, {"speculative_tokens": 4})


def unfused(drawn: Drawn, *, bias: bool) -> dict[str, Tensor]:
    """What every EAGLE-1 has: no norm on the layer's input, none at the end, no head."""
    made = layer(drawn, HIDDEN)
    del made["input_layernorm.weight"]
    return {
        "embed_tokens.weight": drawn.matrix(VOCAB, HIDDEN),
        "fc.weight": drawn.matrix(HIDDEN, 2 * HIDDEN),
        **({"fc.bias": drawn.bias(HIDDEN)} if bias else {}),
        **prefixed(made, "layers.0."),
    }


def safeailab_eagle() -> ForeignCheckpoint:
    """A pickle with a bias of `fc`, which its configuration leaves to a default."""
    config = llama_config("LlamaForCausalLM", pad_token_id=0)
    return ForeignCheckpoint("safeailab-eagle", config, unfused(Drawn(16), bias=True), container="bin")


def hass() -> ForeignCheckpoint:
    """The same from HASS, for a verifier whose attention has biases."""
    drawn = Drawn(17)
    tensors = {**unfused(drawn, bias=True), **prefixed(biases(drawn), "layers.0.")}
    config = llama_config("LlamaForCausalLM", bias=True, qkv_bias=True, rope_theta=1000000.0)
    return ForeignCheckpoint("hass", config, tensors, container="bin")


def eagle_with_norms() -> ForeignCheckpoint:
    """Norms on the embeddings and before the head, no bias."""
    drawn = Drawn(18)
    tensors = unfused(drawn, bias=False)
    tensors |= {
        "embed_layernorm.weight": drawn.norm(HIDDEN),
        "post_embedding_layernorm.weight": drawn.norm(HIDDEN),
    }
    config = llama_config("LlamaForCausalLM", bias=False, rope_theta=10000.0)
    return ForeignCheckpoint("eagle-with-norms", config, tensors)


def vllm_eagle() -> ForeignCheckpoint:
    """What vLLM serves: no bias, embeddings left to the verifier; two layers."""
    drawn = Drawn(19)
    tensors = {**unfused(drawn, bias=False), **prefixed(layer(drawn, HIDDEN), "layers.1.")}
    del tensors["embed_tokens.weight"]
    config = llama_config("LlamaForCausalLM", num_hidden_layers=2, bias=False, rope_theta=10000.0)
    return ForeignCheckpoint("vllm-eagle", config, tensors)


CASES: list[Callable[[], ForeignCheckpoint]] = [
    safeailab_eagle3,
    safeailab_eagle3_llama3,
    specforge,
    specforge_eagle31,
    specforge_other_width,
    angelslim,
    modelopt,
    modelopt_megatron,
    modelopt_float8,
    deepspec_eagle3,
    nebius,
    absolute_map,
    flags_alone,
    depth_ids,
    peagle,
    safeailab_eagle,
    hass,
    eagle_with_norms,
    vllm_eagle,
]
