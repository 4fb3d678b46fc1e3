"""Medusa heads, MLP speculators, native MTP blocks and older speculators directories, as each project writes its own.

Heads are for `tests.tiny_models.make_verifier`; an MTP block comes with the verifier that it is a part of.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.convert.foreign import Drawn, ForeignCheckpoint, prefixed
from tests.models.mtp.verifiers import RAW

# Of the verifier that heads are for.
WIDTH, VOCAB = 64, 384
HEADS, INNER = 3, 40


def medusa_head(drawn: Drawn, layers: int, rows: int = VOCAB) -> dict[str, Tensor]:
    """One head as Medusa's own code names it, without its number."""
    found: dict[str, Tensor] = {}
    for layer in range(layers):
        found[f"{layer}.linear.weight"] = drawn.matrix(WIDTH, WIDTH)
        found[f"{layer}.linear.bias"] = drawn.bias(WIDTH)
    return {**found, f"{layers}.weight": drawn.matrix(rows, WIDTH)}


def medusa_heads(drawn: Drawn, layers: int = 1, heads: int = HEADS) -> dict[str, Tensor]:
    """All heads with their numbers."""
    found: dict[str, Tensor] = {}
    for head in range(heads):
        found |= prefixed(medusa_head(drawn, layers), f"{head}.")
    return found


def medusa_config(**keys: Any) -> dict[str, Any]:
    """What Medusa's own files say: neither sizes nor a model type."""
    return {
        "medusa_num_heads": HEADS,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        **keys,
    }


def medusa() -> ForeignCheckpoint:
    """Medusa-1: a pickle in half precision, whose configuration names fewer heads than there are."""
    halves = {name: tensor.half() for name, tensor in medusa_heads(Drawn(1)).items()}
    return ForeignCheckpoint("medusa", medusa_config(medusa_num_heads=2), halves, container="bin")


def medusa_two_layers() -> ForeignCheckpoint:
    """Two layers a head, in safetensors."""
    return ForeignCheckpoint("medusa-2-layers", medusa_config(medusa_num_layers=2), medusa_heads(Drawn(2), 2))


def medusa_one_copy() -> ForeignCheckpoint:
    """Three layers a head that are one module in Medusa's code, saved once; the output matrix keeps its number."""
    tensors = {name.replace(".1.weight", ".3.weight"): tensor for name, tensor in medusa_heads(Drawn(3)).items()}
    return ForeignCheckpoint("medusa-one-copy", medusa_config(medusa_num_layers=3), tensors)


def medusa_whole_model() -> ForeignCheckpoint:
    """Medusa-2: the heads behind a prefix, among the weights of the model that was trained with them."""
    drawn = Drawn(4)
    rest = {"model.layers.0.mlp.up_proj.weight": drawn.matrix(WIDTH, WIDTH), "model.norm.weight": drawn.norm(WIDTH)}
    tensors = {**rest, **prefixed(medusa_heads(drawn), "medusa_head.")}
    config = medusa_config(model_type="llama", architectures=["MedusaLlamaForCausalLM"], hidden_size=WIDTH)
    return ForeignCheckpoint("medusa-whole-model", config, tensors, container="sharded")


def modelopt_medusa() -> ForeignCheckpoint:
    """ModelOpt: heads without output matrices, which share that of the model."""
    drawn = Drawn(5)
    heads = {name: tensor for name, tensor in medusa_heads(drawn).items() if not name.endswith(".1.weight")}
    tensors = {**prefixed(heads, "medusa_heads."), "lm_head.weight": drawn.matrix(VOCAB, WIDTH)}
    return ForeignCheckpoint("modelopt-medusa", medusa_config(), tensors)


def modelopt_parallel_heads() -> ForeignCheckpoint:
    """ModelOpt's parallel heads; the output matrix is left to the verifier."""
    heads = {name: tensor for name, tensor in medusa_heads(Drawn(6)).items() if not name.endswith(".1.weight")}
    tensors = {
        f"parallel_draft_heads.{name.replace('.', '.medusa_layers.', 1)}": value for name, value in heads.items()
    }
    return ForeignCheckpoint("modelopt-parallel-heads", medusa_config(), tensors)


def vllm_medusa() -> ForeignCheckpoint:
    """vLLM's names, without biases, with a part of the vocabulary whose map is not ascending."""
    drawn, rows = Drawn(7), 90
    tensors: dict[str, Tensor] = {"token_map": drawn.ids(rows, VOCAB).flip(0).int()}
    for head in range(HEADS):
        tensors[f"blocks.{head}.layers.0.weight"] = drawn.matrix(WIDTH, WIDTH)
        tensors[f"lm_heads.{head}.weight"] = drawn.matrix(rows, WIDTH)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": HEADS,
        "num_hidden_layers": 1,
        "hidden_size": WIDTH,
        "vocab_size": VOCAB,
        "truncated_vocab_size": rows,
        "medusa_fc_bias": False,
        "original_lm_head": False,
    }
    return ForeignCheckpoint("vllm-medusa", config, tensors)


def accelerator_config(**keys: Any) -> dict[str, Any]:
    """IBM's keys; there is no `num_attention_heads`."""
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": VOCAB,
        "emb_dim": WIDTH,
        "inner_dim": INNER,
        "n_predict": 3,
        "top_k_tokens_per_head": [4, 3, 2],
        "n_candidates": 7,
        "tie_weights": False,
        "scale_input": False,
        **keys,
    }


def accelerator_step(drawn: Drawn, step: int, inner: int) -> dict[str, Tensor]:
    """The tensors of one step."""
    return {
        f"emb.{step}.weight": drawn.matrix(VOCAB, inner),
        f"proj.{step}.weight": drawn.matrix(inner, inner if step else WIDTH),
        f"ln.{step}.weight": drawn.norm(inner),
        f"ln.{step}.bias": drawn.bias(inner),
        f"head.{step}.weight": drawn.matrix(VOCAB, inner),
    }


def accelerator() -> ForeignCheckpoint:
    """Three steps of their own, behind IBM's prefix, in two shards."""
    drawn, tensors = Drawn(8), {}
    for step in range(3):
        tensors |= prefixed(accelerator_step(drawn, step, INNER), "speculator.")
    return ForeignCheckpoint("ibm-accelerator", accelerator_config(), tensors, container="sharded")


def accelerator_wide() -> ForeignCheckpoint:
    """`inner_dim` 0 is the verifier's width; the input is scaled; flags that are false are not written."""
    drawn, tensors = Drawn(9), {}
    for step in range(2):
        tensors |= accelerator_step(drawn, step, WIDTH)
    config = accelerator_config(inner_dim=0, n_predict=2, top_k_tokens_per_head=[3, 2], scale_input=True)
    del config["tie_weights"]
    return ForeignCheckpoint("ibm-accelerator-wide", config, tensors)


def accelerator_tied(copies: bool = True) -> ForeignCheckpoint:
    """Steps that share everything but the first projection, stored once or under every step's name."""
    drawn = Drawn(10)
    tensors = {**accelerator_step(drawn, 0, INNER), "proj.1.weight": drawn.matrix(INNER, INNER)}
    if copies:
        for step in (1, 2):
            tensors |= {f"{name}.{step}.weight": tensors[f"{name}.0.weight"].clone() for name in ("emb", "ln", "head")}
            tensors[f"ln.{step}.bias"] = tensors["ln.0.bias"].clone()
        tensors["proj.2.weight"] = tensors["proj.1.weight"].clone()
    config = accelerator_config(tie_weights=True, scale_input=True)
    name = "ibm-accelerator-tied" if copies else "ibm-accelerator-tied-once"
    return ForeignCheckpoint(name, config, prefixed(tensors, "speculator."))


def accelerator_tied_once() -> ForeignCheckpoint:
    """The same with one copy of what is shared."""
    return accelerator_tied(copies=False)


def attention(drawn: Drawn, raw: dict[str, Any]) -> dict[str, Tensor]:
    """Projections of the three kinds of attention that these verifiers have."""
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if "kv_lora_rank" in raw:
        still, turned, values = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"]
        query, keys = raw["q_lora_rank"], raw["kv_lora_rank"]
        return {
            "q_a_proj.weight": drawn.matrix(query, hidden),
            "q_a_layernorm.weight": drawn.norm(query),
            "q_b_proj.weight": drawn.matrix(heads * (still + turned), query),
            "kv_a_proj_with_mqa.weight": drawn.matrix(keys + turned, hidden),
            "kv_a_layernorm.weight": drawn.norm(keys),
            "kv_b_proj.weight": drawn.matrix(heads * (still + values), keys),
            "o_proj.weight": drawn.matrix(hidden, heads * values),
        }
    wide, narrow = heads * raw["head_dim"], raw["num_key_value_heads"] * raw["head_dim"]
    gated = raw["model_type"].startswith(("qwen3_next", "qwen3_5"))
    found = {
        "q_proj.weight": drawn.matrix(2 * wide if gated else wide, hidden),
        "k_proj.weight": drawn.matrix(narrow, hidden),
        "v_proj.weight": drawn.matrix(narrow, hidden),
        "o_proj.weight": drawn.matrix(hidden, wide),
    }
    if raw["model_type"] in ("mimo", "glm4_moe"):
        found |= {f"{name}_proj.bias": drawn.bias(len(found[f"{name}_proj.weight"])) for name in "qkv"}
    if raw["model_type"] != "mimo":
        found |= {f"{name}_norm.weight": drawn.norm(raw["head_dim"]) for name in "qk"}
    return found


def mlp(drawn: Drawn, hidden: int, inner: int) -> dict[str, Tensor]:
    """Gate, up and down."""
    return {
        "gate_proj.weight": drawn.matrix(inner, hidden),
        "up_proj.weight": drawn.matrix(inner, hidden),
        "down_proj.weight": drawn.matrix(hidden, inner),
    }


def experts(drawn: Drawn, raw: dict[str, Any]) -> dict[str, Tensor]:
    """A router, its experts one by one, and the one that every token visits."""
    hidden, inner = raw["hidden_size"], raw["moe_intermediate_size"]
    count = raw.get("num_experts") or raw["n_routed_experts"]
    found = {"gate.weight": drawn.matrix(count, hidden)}
    for index in range(count):
        found |= prefixed(mlp(drawn, hidden, inner), f"experts.{index}.")
    if "n_shared_experts" in raw:
        found["gate.e_score_correction_bias"] = drawn.bias(count)
        return found | prefixed(mlp(drawn, hidden, inner * raw["n_shared_experts"]), "shared_experts.")
    found["shared_expert_gate.weight"] = drawn.matrix(1, hidden)
    return found | prefixed(mlp(drawn, hidden, raw["shared_expert_intermediate_size"]), "shared_expert.")


def verifier_config(style: str, **keys: Any) -> dict[str, Any]:
    """A verifier's configuration, in float32 and by the name of its class."""
    kind = RAW[style]["model_type"].replace("_text", "").title().replace("_", "")
    raw = {key: value for key, value in RAW[style].items() if key not in ("quantization_config", "auto_map")}
    return {**raw, "architectures": [f"{kind}ForCausalLM"], "torch_dtype": "float32", **keys}


# What each layout calls the projection of both inputs, their norms, the last norm, and where its layer's names begin.
AROUND = {
    "mtp.": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0."),
    "model.layers.4.": ("eh_proj", "enorm", "hnorm", "shared_head.norm", ""),
    "model.mtp_layers.0.": ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", ""),
}


def native_mtp(style: str, prefix: str, **keys: Any) -> ForeignCheckpoint:
    """A verifier's embedding, head, last norm and one weight of each of its layers, and behind them its MTP block."""
    raw, drawn = verifier_config(style, **keys), Drawn(11 + len(style))
    hidden, vocab = raw["hidden_size"], raw["vocab_size"]
    joined, of_embedding, of_state, last, layer = AROUND[prefix]
    sparse = "num_experts" in raw or "n_routed_experts" in raw
    block = {
        f"{joined}.weight": drawn.matrix(hidden, 2 * hidden),
        **{f"{name}.weight": drawn.norm(hidden) for name in (of_embedding, of_state, last)},
        **prefixed(attention(drawn, raw), f"{layer}self_attn."),
        **prefixed(experts(drawn, raw) if sparse else mlp(drawn, hidden, raw["intermediate_size"]), f"{layer}mlp."),
        **{f"{layer}{name}_layernorm.weight": drawn.norm(hidden) for name in ("input", "post_attention")},
    }
    own = {
        "model.embed_tokens.weight": drawn.matrix(vocab, hidden),
        "model.norm.weight": drawn.norm(hidden),
        "lm_head.weight": drawn.matrix(vocab, hidden),
        **{f"model.layers.{index}.mlp.up_proj.weight": drawn.matrix(48, hidden) for index in range(4)},
    }
    if prefix.startswith("model.layers."):
        block |= {"embed_tokens.weight": own["model.embed_tokens.weight"].clone()}
        block |= {"shared_head.head.weight": own["lm_head.weight"].clone()}
    tensors = {**own, **prefixed(block, prefix)}
    return ForeignCheckpoint(f"native-mtp-{style}", raw, tensors, container="sharded")


def quantised_blocks(tensor: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix in float8 and a scale for each block of `size`, the inverse of what its numbers were multiplied by."""
    rows, columns = (-(-length // side) for length, side in zip(tensor.shape, size, strict=True))
    numbers, scales = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            place = (
                slice(row * size[0], (row + 1) * size[0]),
                slice(column * size[1], (column + 1) * size[1]),
            )
            scales[row, column] = tensor[place].abs().max() / 448
            numbers[place] = (tensor[place] / scales[row, column]).to(torch.float8_e4m3fn)
    return numbers, scales


def native_mtp_float8() -> ForeignCheckpoint:
    """DeepSeek's own way: matrices of the layer in float8 with scales of blocks, here of 16 x 16."""
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    found = native_mtp("deepseek", "model.layers.4.", quantization_config=settings)
    tensors: dict[str, Tensor] = {}
    for name, tensor in found.tensors.items():
        if "model.layers.4." in name and name.endswith("_proj.weight") and "eh_proj" not in name:
            tensors[name], tensors[f"{name}_scale_inv"] = quantised_blocks(tensor, (16, 16))
        else:
            tensors[name] = tensor
    return ForeignCheckpoint("native-mtp-float8", found.config, tensors, container="sharded")


MTP_CASES: dict[str, Callable[[], ForeignCheckpoint]] = {
    "qwen3_next": partial(native_mtp, "qwen3_next", "mtp."),
    "qwen3_5": partial(native_mtp, "qwen3_5", "mtp."),
    "qwen3_5_moe": partial(native_mtp, "qwen3_5_moe", "mtp."),
    "deepseek": partial(native_mtp, "deepseek", "model.layers.4."),
    "glm": partial(native_mtp, "glm", "model.layers.4."),
    "mimo": partial(native_mtp, "mimo", "model.mtp_layers.0."),
    "deepseek-float8": native_mtp_float8,
}
MEDUSA_CASES: list[Callable[[], ForeignCheckpoint]] = [
    medusa,
    medusa_two_layers,
    medusa_one_copy,
    medusa_whole_model,
    modelopt_medusa,
    modelopt_parallel_heads,
    vllm_medusa,
]
MLP_CASES: list[Callable[[], ForeignCheckpoint]] = [
    accelerator,
    accelerator_wide,
    accelerator_tied,
    accelerator_tied_once,
]
CASES: list[Callable[[], ForeignCheckpoint]] = [*MEDUSA_CASES, *MLP_CASES, *MTP_CASES.values()]
