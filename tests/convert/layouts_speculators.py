"""Speculators directories of PyPI's package as its versions have written them, for `tests.tiny_models.make_verifier`.

Names and keys are those of its classes; the drafts inside are those of the other layouts.
"""

from collections.abc import Callable
from typing import Any

import torch

from tests.convert import layouts_block, layouts_eagle
from tests.convert.foreign import Drawn, ForeignCheckpoint

_NOT_THE_LAYERS = ("architectures", "torch_dtype", "transformers_version", "num_target_layers", "bias", "qkv_bias")
_OLD_NAMES = {"fc.": "fusion_fc.", "layers.0.": "transformer."}


def speculators_config(kind: str, architecture: str, layer: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """What every version writes."""
    return {
        "architectures": [architecture],
        "auto_map": {"": f"{kind}.Config"},
        "speculators_model_type": kind,
        "speculators_version": "0.2.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": "org/verifier", "architectures": ["LlamaForCausalLM"]},
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformer_layer_config": {key: value for key, value in layer.items() if key not in _NOT_THE_LAYERS},
        "transformers_version": "4.55.4",
        **keys,
    }


def old_eagle3() -> ForeignCheckpoint:
    """Version 0.2: no layer ids, no flags but one, a bias of zeros, the verifier's head and norm beside the draft."""
    drawn = Drawn(31)
    tensors = {**layouts_eagle.fused(drawn, "layers.0"), **layouts_eagle.reduced(drawn)}
    tensors |= {
        "embed_tokens.weight": drawn.matrix(layouts_eagle.VOCAB, layouts_eagle.HIDDEN),
        "fc.bias": torch.zeros(layouts_eagle.HIDDEN),
        "verifier_lm_head.weight": drawn.matrix(layouts_eagle.DRAFT_VOCAB, layouts_eagle.HIDDEN),
        "verifier_norm.weight": drawn.norm(layouts_eagle.HIDDEN),
    }
    layer = layouts_eagle.llama_config("LlamaForCausalLM")
    config = speculators_config(
        "eagle3",
        "Eagle3Speculator",
        layer,
        draft_vocab_size=layouts_eagle.DRAFT_VOCAB,
        norm_before_residual=True,
        target_hidden_size=None,
    )
    return ForeignCheckpoint("speculators-0.2-eagle3", config, tensors, container="sharded")


def later_eagle3() -> ForeignCheckpoint:
    """A later version: layer ids and a switch of its training; `norm_before_residual` is not written."""
    case = old_eagle3()
    case.layout = "speculators-later-eagle3"
    del case.tensors["fc.bias"], case.config["norm_before_residual"]
    case.config |= {
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
        "enable_sp_ulysses": False,
        "embed_requires_grad": True,
    }
    case.config["transformer_layer_config"]["rope_theta"] = 500000.0
    return case


def old_eagle() -> ForeignCheckpoint:
    """Version 0.1's EAGLE: its own names for layer and projection, the layer's keys in a block."""
    case = layouts_eagle.hass()
    tensors = {}
    for name, tensor in case.tensors.items():
        old = next((old for old in _OLD_NAMES if name.startswith(old)), None)
        tensors[name if old is None else _OLD_NAMES[old] + name.removeprefix(old)] = tensor
    config = speculators_config(
        "eagle",
        "EagleSpeculator",
        {**case.config, "attention_bias": True},
        fusion_bias=True,
        layernorms=False,
        transformer_layer_architecture="LlamaDecoderLayer",
    )
    return ForeignCheckpoint("speculators-0.1-eagle", config, tensors)


def old_dflash() -> ForeignCheckpoint:
    """DFlash before it had a key for who sees whom, of blocks of the default size; Domino's keys without a Domino."""
    case = layouts_block.zlab()
    settings = case.config.pop("dflash_config")
    layer = {key: value for key, value in case.config.items() if key not in ("auto_map", "block_size")}
    config = speculators_config(
        "dflash",
        "DFlashSpeculator",
        layer,
        draft_vocab_size=layouts_block.VOCAB,
        aux_hidden_state_layer_ids=[index + 1 for index in settings["target_layer_ids"]],
        mask_token_id=layouts_block.MASK,
        projector_type="dflash",
        emb_dim=256,
        gru_hidden_dim=1024,
        pure_draft_prefix_len=1,
        shift_label=False,
    )
    return ForeignCheckpoint("speculators-dflash", config, case.tensors)


CASES: list[Callable[[], ForeignCheckpoint]] = [old_eagle3, later_eagle3, old_eagle, old_dflash]
