"""EAGLE-1 in the layouts of SafeAILab's own code and of vLLM's `method: eagle`, which differ in what they can say."""

from __future__ import annotations

from typing import Any

from speculators.convert.foreign_config import (
    SAFEAILAB_ROPES,
    add_verifiers,
    llama_keys,
    of_family,
    require_expressible,
)
from speculators.convert.plan import CheckpointPlan, Ledger
from speculators.convert.source import SourceCheckpoint
from speculators.formats.config import SpeculatorConfig
from speculators.models.eagle.config import EagleConfig

SAFEAILAB, VLLM = "safeailab-eagle", "vllm-eagle"


def plan(speculator: SourceCheckpoint, config: SpeculatorConfig, layout: str) -> CheckpointPlan:
    """Account for every tensor of an EAGLE speculator; FormatError names what the layout cannot say."""
    config = of_family(config, EagleConfig, layout, "EAGLE-1")
    require_expressible(config, layout, _refused(config, layout))
    ledger = Ledger(speculator)
    if layout == SAFEAILAB:
        add_verifiers(ledger, config, "embed_tokens.weight")
    ledger.copy_all(ledger.left)
    return ledger.finish_foreign(layout, _config(config))


def _refused(config: EagleConfig, layout: str) -> dict[str, bool]:
    rope = config.rope_parameters
    refused = {
        "it has no norm on the embeddings (embed_layernorm)": config.embed_layernorm,
        "it has no norm before the head (post_embedding_layernorm)": config.post_embedding_layernorm,
        "it turns whole heads (partial_rotary_factor)": rope.get("partial_rotary_factor", 1) != 1,
    }
    if layout == VLLM:
        return refused | {"vLLM leaves out the bias of fc (bias)": config.bias}
    kinds = ", ".join(SAFEAILAB_ROPES)
    return refused | {f"its code builds rotations of type {kinds} only": rope["rope_type"] not in SAFEAILAB_ROPES}


def _config(config: EagleConfig) -> dict[str, Any]:
    """Plain Llama keys, `qkv_bias`, and `bias` for that of `fc`, whose absence the two readers take differently."""
    keys = llama_keys(config.decoder(), config.dtype)
    del keys["attention_bias"]
    return keys | {"architectures": ["LlamaForCausalLM"], "bias": config.bias, "qkv_bias": config.qkv_bias}
