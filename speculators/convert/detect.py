"""Whose layout a checkpoint is in, told by its configuration and tensor names; never by its path (free of torch)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from speculators.convert.layer_ids import lookup
from speculators.errors import FormatError

_MEDUSA = re.compile(r"(?:module\.)?(?:medusa_heads?\.|heads\.)?\d+\.\d+\.(?:linear\.)?(?:weight|bias)")
_DEEPSEEK_MTP = re.compile(r"model\.layers\.\d+\.(?:eh_proj|enorm|hnorm|shared_head\.\w+)\.weight")
_FUSED_LAYER = re.compile(r"(?:.*\.)?(?:midlayer|layers\.0)\.hidden_norm\.weight")

# What each wrapper puts in front of a draft's own names.
WRAPPERS = ("module.", "draft_model.", "eagle_module.", "dflash_module.", "model.")


def detect(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The key in `SOURCES` of a checkpoint with these tensors; FormatError names what it is where none reads it."""
    found = _by_config(config, shapes) or _by_tensors(config, shapes)
    if found is not None:
        return found
    names = ", ".join(sorted(shapes)[:5])
    raise FormatError(
        f"architectures {config.get('architectures')!r}, model_type {config.get('model_type')!r} and tensors such as "
        f"{names} belong to no draft that is known; give the family"
    )


def _by_config(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    if config.get("speculators_model_type") is not None or config.get("speculators_config") is not None:
        return "speculators"
    if config.get("model_type") == "mlp_speculator" or _named(config, "Arctic"):
        return "mlp_speculator"
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return "medusa"
    own = [name for name in shapes if name != "lm_head.weight"]
    if own and all(_MEDUSA.fullmatch(name) for name in own):
        return "medusa"
    if str(config.get("model_type")).startswith("gemma4") and "assistant" in str(config.get("model_type")):
        raise FormatError(
            "a Gemma-4 assistant drafts over its verifier's own keys and values and is no head to convert; serve it as "
            "it is: method mtp, with its directory as the model"
        )
    is_causal = any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ())
    if config.get("spd_type") in ("pard", "pard2"):
        return "pard"
    if "pard_token" in config and is_causal and not _has(shapes, "mask_hidden"):
        return "pard"
    return None


def _by_tensors(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    block = _block_drafter(config, shapes)
    if block is not None:
        return block
    if _has(shapes, "mask_hidden"):
        return "peagle"
    if any(name.startswith(("mtp.", "model.mtp_layers.")) or _DEEPSEEK_MTP.fullmatch(name) for name in shapes):
        return "mtp"
    fc = next((shape for name, shape in shapes.items() if name.endswith("fc.weight")), None)
    wide = fc is not None and len(fc) == 2 and fc[1] >= 3 * fc[0]
    if wide or _has(shapes, "d2t") or any(_FUSED_LAYER.fullmatch(name) for name in shapes):
        return "eagle3"
    if fc is not None and not any(name.endswith("layers.0.input_layernorm.weight") for name in shapes):
        return "eagle"
    return None


def _block_drafter(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    names = " ".join(str(name) for name in config.get("architectures") or ())
    if "XPress" in names or "xpress_block_size" in config:
        raise FormatError("an XPress draft has heads that no family here has; it is not converted")
    # The second names such a draft inside its verifier's checkpoint, which has no Markov head at its top.
    if any(name.endswith("markov_w1.weight") for name in shapes) or "dspark_target_layer_ids" in config:
        return "dspark"
    kind = lookup(config, "dflash_config.projector_type")
    if "DSpark" not in names and "DFlash" not in names and "dflash_config" not in config:
        return None
    if kind == "domino" or any(name.startswith("prefix_gru.") for name in shapes):
        raise FormatError("a Domino draft runs a GRU over its prefix, which no family here has; it is not converted")
    if any(name.endswith("layer_fusion_weights") for name in shapes):
        raise FormatError("a DFlare draft weighs layers one by one, which no family here does; it is not converted")
    return "dflash2" if any("attention_conv" in name for name in shapes) else "dflash"


def _named(config: Mapping[str, Any], word: str) -> bool:
    return any(word in str(name) for name in config.get("architectures") or ())


def _has(shapes: Mapping[str, tuple[int, ...]], ending: str) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for name in shapes)
