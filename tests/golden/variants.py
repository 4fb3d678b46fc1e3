"""Further golden folders, derived from the ones here by rule, so that nothing but a recipe need be kept.

A variant is a folder's tensors and config with some keys changed, some tensors left out and some put in. New tensors
are sums of waves over their indices: no generator, so that any software makes the same ones. ROWS are the inputs here
with other masks and documents. Read by our tests and by `with_peer.py`, which runs where this library is not installed.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent
RANK, HIDDEN = 256, 64


def waves(*shape: int, size: float = 0.05) -> Tensor:
    """A tensor without repetition or symmetry, bfloat16, of values up to `size`."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (size * torch.sin(0.37 * index + 0.011 * index**1.5)).reshape(shape).to(torch.bfloat16)


@dataclass(frozen=True)
class Variant:
    """What is different from the folder `base`; `proposed` is the number of tokens a step, where it changes.

    `layer` are keys of `transformer_layer_config`.
    """

    base: str
    config: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    tensors: Callable[[], dict[str, Tensor]] = dict
    proposed: int | None = None
    layer: Mapping[str, Any] = field(default_factory=dict)


def _reduced() -> dict[str, Tensor]:
    """EAGLE-3's vocabulary map, and the rows of the verifier's head that it keeps."""
    vocabulary = load_file(HERE / "eagle3" / "model.safetensors")
    head = load_file(HERE / "verifier" / "model.safetensors")["lm_head.weight"]
    return {"d2t": vocabulary["d2t"], "t2d": vocabulary["t2d"], "lm_head.weight": head[vocabulary["t2d"].bool()]}


def _qwen3_layers() -> dict[str, Tensor]:
    """Norms of EAGLE-3's first layer's queries and keys, and a second layer, of width HIDDEN."""
    shapes = {
        "self_attn.q_proj": (64, HIDDEN),
        "self_attn.k_proj": (32, HIDDEN),
        "self_attn.v_proj": (32, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 64),
        "mlp.gate_proj": (96, HIDDEN),
        "mlp.up_proj": (96, HIDDEN),
        "mlp.down_proj": (HIDDEN, 96),
    }
    sizes = {name: 0.1 + 0.02 * place for place, name in enumerate(shapes)}
    tensors = {f"layers.1.{name}.weight": waves(*shape, size=sizes[name]) for name, shape in shapes.items()}
    for place, name in enumerate(("input_layernorm", "post_attention_layernorm")):
        tensors[f"layers.1.{name}.weight"] = 1 + waves(HIDDEN, size=0.2 + 0.1 * place)
    for layer in range(2):
        for place, name in enumerate(("q_norm", "k_norm")):
            tensors[f"layers.{layer}.self_attn.{name}.weight"] = 1 + waves(16, size=0.3 + 0.1 * (layer + place))
    return tensors


def _convolutions_and_selector(taps: int, group: int, rank: int) -> dict[str, Tensor]:
    tensors = {
        "candidate_selector.predecessor_codebook": waves(128, rank, size=0.2),
        "candidate_selector.successor_codebook": waves(128, rank, size=0.25),
        "candidate_selector.hidden_projection.weight": waves(rank, HIDDEN, size=0.1),
    }
    for layer in range(2):
        for place, name in enumerate(("attention_conv", "mlp_conv")):
            size = 0.1 * (1 + layer + place)
            kernel = waves(2, taps, HIDDEN, size=size)
            kernel[:, 0] += 1
            tensors[f"layers.{layer}.{name}.base_kernel"] = kernel
            rows = 2 * taps * (HIDDEN // group)
            tensors[f"layers.{layer}.{name}.kernel_projection.weight"] = waves(rows, HIDDEN, size=size / 4)
    return tensors


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

VARIANTS: dict[str, Variant] = {
    "eagle3_full": Variant(
        "eagle3",
        {"draft_vocab_size": 128},
        ("d2t", "t2d"),
        lambda: {"lm_head.weight": load_file(HERE / "verifier" / "model.safetensors")["lm_head.weight"]},
    ),
    "eagle3_plain": Variant(
        "eagle3",
        {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False},
        ("input_norm.weight",),
    ),
    "eagle3_fc_norm": Variant(
        "eagle3",
        {"norm_before_fc": False, "fc_norm": True},
        ("input_norm.weight",),
        lambda: {f"fc_norm.{part}.weight": 1 + waves(HIDDEN, size=0.1 * (part + 1)) for part in range(3)},
    ),
    "eagle3_qwen3": Variant(
        "eagle3",
        tensors=_qwen3_layers,
        layer={
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "rope_parameters": LLAMA3,
        },
    ),
    "eagle3_biased": Variant(
        "eagle3",
        tensors=lambda: {
            f"layers.0.self_attn.{name}_proj.bias": waves(size, size=0.2)
            for name, size in {"q": 64, "k": 32, "v": 32, "o": HIDDEN}.items()
        },
        layer={"attention_bias": True, "sliding_window": 3, "rope_parameters": YARN},
    ),
    "dflash_block_8": Variant("dflash", {"block_size": 8}, proposed=7),
    "dflash_non_causal": Variant("dflash", {"sliding_window_non_causal": True}),
    "dflash_reduced": Variant("dflash", {"draft_vocab_size": 32}, tensors=_reduced),
    "dflash_full_layers": Variant("dflash", layer={"layer_types": ["full_attention", "sliding_attention"]}),
    "dflash_from_anchor": Variant("dflash", {"block_size": 4, "sample_from_anchor": True}, proposed=4),
    "dflash2_small": Variant(
        "dflash2",
        {
            "block_size": 5,
            "sample_from_anchor": True,
            "conv_kernel_size": 3,
            "conv_group_size": 8,
            "selector_rank": 32,
            "selector_top_k": 4,
        },
        tensors=lambda: _convolutions_and_selector(3, 8, 32),
        proposed=5,
    ),
    "dspark_full": Variant(
        "dspark",
        {"draft_vocab_size": 128, "sample_from_anchor": False},
        ("d2t", "t2d", "lm_head.weight"),
        lambda: {"markov_head.markov_w2.weight": waves(128, RANK, size=0.2)},
        proposed=7,
    ),
    "dspark_gated": Variant(
        "dspark",
        {"markov_head_type": "gated"},
        tensors=lambda: {
            "markov_head.gate_proj.weight": waves(RANK, HIDDEN + RANK),
            "markov_head.gate_proj.bias": waves(RANK, size=0.2),
        },
    ),
    "dspark_rnn": Variant(
        "dspark",
        {"markov_head_type": "rnn"},
        tensors=lambda: {
            "markov_head.joint_proj.weight": waves(3 * RANK, 2 * RANK + HIDDEN),
            "markov_head.joint_proj.bias": waves(3 * RANK, size=0.2),
        },
    ),
    "dspark_no_confidence": Variant(
        "dspark", {"enable_confidence_head": False}, ("confidence_head.proj.weight", "confidence_head.proj.bias")
    ),
    "dspark_plain_confidence": Variant(
        "dspark",
        {"confidence_head_with_markov": False},
        tensors=lambda: {"confidence_head.proj.weight": waves(1, HIDDEN, size=0.3)},
    ),
    "mtp_1": Variant("mtp", proposed=1),
    "mtp_2": Variant("mtp", proposed=2),
    "mtp_4": Variant("mtp", proposed=4),
}


def _holes(inputs: dict[str, Tensor]) -> None:
    """A mask that is true in runs of all lengths, up to the last token."""
    index = torch.arange(inputs["loss_mask"].shape[1])
    inputs["loss_mask"][0] = (0.37 * index + 0.011 * index**1.5).sin() > -0.4
    inputs["loss_mask"][0, -6:] = True


def _documents(inputs: dict[str, Tensor]) -> None:
    """Two documents and padding; what reaches from one into the other does not count, where readings differ."""
    second, padding, far = 30, 60, 17
    inputs["document_ids"][0, second:] = 1
    inputs["document_ids"][0, padding:] = -1
    inputs["position_ids"][0, second:] -= second
    inputs["loss_mask"][0] = True
    for start in (second, padding):
        inputs["loss_mask"][0, start - far : start + 5] = False


def _single(inputs: dict[str, Tensor]) -> None:
    """One token that counts, which shows the epsilons of divisors."""
    inputs["loss_mask"][0] = torch.arange(inputs["loss_mask"].shape[1]) == 20


# Masks are stored as integers in these, as some writers do.
ROWS: dict[str, Callable[[dict[str, Tensor]], None]] = {"holes": _holes, "documents": _documents, "single": _single}


def write_row(name: str, target: Path) -> Path:
    """The file of a row of ROWS, written to the folder `target`; the row that is kept here has no name."""
    if not name:
        return HERE / "golden_inputs.safetensors"
    inputs, path = load_file(HERE / "golden_inputs.safetensors"), target / f"{name}.safetensors"
    ROWS[name](inputs)
    save_file(inputs | {"loss_mask": inputs["loss_mask"].to(torch.int64)}, path)
    return path


def build(name: str, target: Path) -> Path:
    """Write the folder `name` below `target`, with the verifier beside it; a folder that is kept here is copied."""
    folder, variant = target / name, VARIANTS.get(name, Variant(name))
    folder.mkdir(parents=True, exist_ok=True)
    if not (target / "verifier").is_dir():
        shutil.copytree(HERE / "verifier", target / "verifier")
    config = json.loads((HERE / variant.base / "config.json").read_text(encoding="utf-8")) | dict(variant.config)
    config["transformer_layer_config"] |= dict(variant.layer)
    if variant.proposed is not None:
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = variant.proposed
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = load_file(HERE / variant.base / "model.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if key not in variant.without} | variant.tensors()
    save_file(
        {key: tensor.contiguous() for key, tensor in kept.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder
