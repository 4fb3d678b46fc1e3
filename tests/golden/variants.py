"""Further golden folders, derived from the ones here by rule, so that nothing but a recipe need be kept.

A variant is a folder's tensors and config with some keys changed, some tensors left out and some put in. New tensors
are sums of waves over their indices: no generator, so that any software makes the same ones. Read by our tests and by
`with_peer.py`, which runs where this library is not installed.
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
    """What is different from the folder `base`; `proposed` is the number of tokens a step, where it changes."""

    base: str
    config: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    tensors: Callable[[], dict[str, Tensor]] = dict
    proposed: int | None = None


def _reduced() -> dict[str, Tensor]:
    """EAGLE-3's vocabulary map, and the rows of the verifier's head that it keeps."""
    vocabulary = load_file(HERE / "eagle3" / "model.safetensors")
    head = load_file(HERE / "verifier" / "model.safetensors")["lm_head.weight"]
    return {"d2t": vocabulary["d2t"], "t2d": vocabulary["t2d"], "lm_head.weight": head[vocabulary["t2d"].bool()]}


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
    "dflash_block_8": Variant("dflash", {"block_size": 8}, proposed=7),
    "dflash_non_causal": Variant("dflash", {"sliding_window_non_causal": True}),
    "dflash_reduced": Variant("dflash", {"draft_vocab_size": 32}, tensors=_reduced),
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
    "mtp_2": Variant("mtp", proposed=2),
}


def build(name: str, target: Path) -> Path:
    """Write the folder `name` below `target`, with the verifier beside it; a folder that is kept here is copied."""
    folder, variant = target / name, VARIANTS.get(name, Variant(name))
    folder.mkdir(parents=True, exist_ok=True)
    if not (target / "verifier").is_dir():
        shutil.copytree(HERE / "verifier", target / "verifier")
    config = json.loads((HERE / variant.base / "config.json").read_text(encoding="utf-8")) | dict(variant.config)
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
