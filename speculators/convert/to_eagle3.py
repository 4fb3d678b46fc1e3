"""EAGLE-3 in the layouts of SafeAILab, of SpecForge (which SGLang reads) and of NVIDIA's ModelOpt."""

from __future__ import annotations

from typing import Any

from speculators.convert.foreign_config import (
    SAFEAILAB_ROPES,
    add_verifiers,
    llama_keys,
    of_family,
    require_expressible,
)
from speculators.convert.layer_ids import OUTPUT
from speculators.convert.options import ConversionVerifier
from speculators.convert.plan import CheckpointPlan, Ledger
from speculators.convert.source import SourceCheckpoint
from speculators.convert.vocabulary import plan_vocabulary
from speculators.errors import FormatError
from speculators.formats.config import SpeculatorConfig
from speculators.models.eagle3.config import Eagle3Config

SAFEAILAB, SPECFORGE, MODELOPT = "safeailab-eagle3", "sglang", "modelopt-eagle3"
_ARCHITECTURE = {SAFEAILAB: "LlamaForCausalLM", SPECFORGE: "LlamaForCausalLMEagle3", MODELOPT: "LlamaForCausalLMEagle3"}


def plan(speculator: SourceCheckpoint, config: SpeculatorConfig, layout: str) -> CheckpointPlan:
    """Account for every tensor of an EAGLE-3 speculator; FormatError names what the layout cannot say."""
    config = of_family(config, Eagle3Config, layout, "EAGLE-3")
    require_expressible(config, layout, _refused(config, layout))
    ledger = Ledger(speculator)
    add_verifiers(ledger, config, "lm_head.weight")
    written = _config(config, layout)
    if layout == SAFEAILAB:
        _require_default_ids(config, ledger)
    plan_vocabulary(ledger, config.draft_vocab_size, config.verifier_vocab_size, None)
    if layout == MODELOPT:
        ledger.withdraw("t2d", "the layout has d2t alone, from which it follows")
    rename = str if layout == MODELOPT else _midlayer
    ledger.copy_all(ledger.left, rename)
    return ledger.finish_foreign(layout, written)


def _midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _refused(config: Eagle3Config, layout: str) -> dict[str, bool]:
    layer, ids = config.transformer_layer_config, config.aux_layer_ids
    refused = {
        "its layer adds the state as it was before the norm, and no key of it says otherwise (norm_before_residual); "
        "train with norm_before_residual=false": config.norm_before_residual,
        "it has no norm over all features (norm_before_fc)": config.norm_before_fc,
        "its attention does not normalise queries and keys (qwen3 layers)": layer.model_type != "llama",
        "its layers have no sliding windows": "sliding_attention" in layer.layer_types,
        "it turns whole heads (partial_rotary_factor)": layer.rope_parameters.get("partial_rotary_factor", 1) != 1,
        "depth 0, the embeddings, is no layer's output": layout != SAFEAILAB and 0 in ids,
    }
    if layout == MODELOPT:
        return refused | {
            "it has no norm a feature (fc_norm)": config.fc_norm,
            "its next step takes the state before the norm (norm_output)": config.norm_output,
        }
    refused |= {
        "it has one layer": layer.num_hidden_layers > 1,
        "it reads three layers of the verifier": len(ids) != 3,
        "its attention has no biases": layer.attention_bias,
    }
    if layout == SPECFORGE:
        text = (
            "its next step takes the normed state only in a draft with a norm a feature (norm_output without fc_norm)"
        )
        return refused | {text: config.norm_output and not config.fc_norm}
    rope = layer.rope_parameters["rope_type"]
    return refused | {
        "it has no norm a feature (fc_norm)": config.fc_norm,
        "its next step takes the state before the norm (norm_output)": config.norm_output,
        f"its code builds rotations of type {', '.join(SAFEAILAB_ROPES)} only": rope not in SAFEAILAB_ROPES,
    }


def _require_default_ids(config: Eagle3Config, ledger: Ledger) -> None:
    """SafeAILab's code reads depths 2, L // 2 and L - 3, and its files name none."""
    ids, verifier = config.aux_layer_ids, ConversionVerifier(config.verifier.name_or_path)
    num_layers = verifier.shape.num_hidden_layers if verifier.is_here else ids[-1] + 3
    if ids != [2, num_layers // 2, num_layers - 3]:
        raise FormatError(
            f"this speculator reads depths {ids}; {SAFEAILAB} names none, and its code reads 2, L // 2 and L - 3 of a "
            f"verifier with L layers (here {num_layers})"
        )
    ledger.note(f"the layout names no layers; its code reads {ids} of a verifier with {num_layers} layers")


def _config(config: Eagle3Config, layout: str) -> dict[str, Any]:
    written: dict[str, Any] = {
        **llama_keys(config.transformer_layer_config, config.dtype),
        "architectures": [_ARCHITECTURE[layout]],
        "draft_vocab_size": config.draft_vocab_size,
        # Engines that read the key take its absence for either.
        "norm_before_residual": False,
    }
    if config.has_own_width:
        written["target_hidden_size"] = config.target_hidden_size
    if layout == SAFEAILAB:
        return written
    written["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [depth - OUTPUT for depth in config.aux_layer_ids],
        "use_aux_hidden_state": True,
    }
    if layout == MODELOPT:
        written["eagle_config"] |= {
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
        }
    elif config.fc_norm:
        written |= {"fc_norm": True} | ({"norm_output": True} if config.norm_output else {})
    return written
