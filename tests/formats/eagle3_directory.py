"""A sound EAGLE-3 directory with random weights, written without the code under test, and ways to spoil it."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).resolve().parent.parent / "golden"

VOCAB, DRAFT_VOCAB, HIDDEN, AUX_LAYERS = 64, 16, 8, 3

CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "draft_vocab_size": DRAFT_VOCAB,
    "dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "embed_requires_grad": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": True,
    "norm_output": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somebody/verifier"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "head_dim": 4,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 12,
        "layer_types": ["full_attention"],
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    },
}
KEPT = sorted([0, 1, 2, 5, 6, 9, 13, 14, 20, 21, 30, 40, 41, 42, 55, 63])


def make_config(**changes: Any) -> dict[str, Any]:
    """A copy of the configuration with top-level keys changed; `layer=` and `block=` update the nested ones."""
    config = copy.deepcopy(CONFIG)
    config["transformer_layer_config"] |= changes.pop("layer", {})
    config["speculators_config"] |= changes.pop("block", {})
    return config | changes


def make_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random tensors of the names and shapes that `CONFIG` asks for, spelt out by hand."""
    generator = torch.Generator().manual_seed(7)
    layer = "layers.0."
    shapes = {
        "fc.weight": (8, 24),
        "norm.weight": (8,),
        "lm_head.weight": (16, 8),
        layer + "hidden_norm.weight": (8,),
        layer + "input_layernorm.weight": (8,),
        layer + "post_attention_layernorm.weight": (8,),
        layer + "self_attn.q_proj.weight": (8, 16),
        layer + "self_attn.k_proj.weight": (4, 16),
        layer + "self_attn.v_proj.weight": (4, 16),
        layer + "self_attn.o_proj.weight": (8, 8),
        layer + "mlp.gate_proj.weight": (12, 8),
        layer + "mlp.up_proj.weight": (12, 8),
        layer + "mlp.down_proj.weight": (8, 12),
    }
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    kept = torch.tensor(KEPT)
    tensors["d2t"] = kept - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    tensors["t2d"][kept] = True
    return tensors


def write_directory(
    directory: Path, config: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor] | None = None
) -> Path:
    """Write `config.json` and `model.safetensors` with safetensors' own writer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(make_config() if config is None else config))
    save_file(
        make_tensors() if tensors is None else tensors, directory / "model.safetensors", metadata={"format": "pt"}
    )
    return directory


def write_safetensors(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write a safetensors file byte by byte; `header` is JSON, or bytes taken as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path
