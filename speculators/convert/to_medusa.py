"""Medusa heads in Medusa's own layout, or under vLLM's names, which vLLM serves as they are."""

from __future__ import annotations

import re
from typing import Any

from speculators.convert.foreign_config import require_expressible
from speculators.convert.plan import CheckpointPlan, Ledger
from speculators.convert.source import SourceCheckpoint
from speculators.errors import FormatError
from speculators.formats.config import SpeculatorConfig
from speculators.models.medusa.config import MedusaConfig

OWN, VLLM = "medusa", "vllm-medusa"
_LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
# Of the tree that Medusa's runtime verifies, what vLLM's configuration class has and its heads do not read.
_TREE = {"max_paths": 64, "topk": 10}


def plan(speculator: SourceCheckpoint, config: SpeculatorConfig, layout: str) -> CheckpointPlan:
    """Account for every tensor; FormatError names what the layout has no place for."""
    if not isinstance(config, MedusaConfig):
        kind = config.speculators_model_type
        raise FormatError(f"{speculator.directory} is a speculator of type {kind}; {layout} holds Medusa heads")
    ledger = Ledger(speculator)
    if layout == VLLM:
        ledger.copy_all(config.expected_tensors())
        return ledger.finish_foreign(layout, _vllm_config(config))
    refused = {
        "its heads have output matrices of their own, these share one": config.original_lm_head,
        "its layers have biases, these have none": not config.medusa_fc_bias,
        "it knows the whole vocabulary, these have a part of it": config.truncated_vocab_size < config.vocab_size,
    }
    require_expressible(config, layout, refused)
    ledger.copy_all(config.expected_tensors(), lambda name: _own_name(name, config.medusa_num_layers))
    return ledger.finish_foreign(layout, _own_config(config))


def _own_name(name: str, num_layers: int) -> str:
    match = _LAYER.fullmatch(name)
    if match is not None:
        return f"{match[1]}.{match[2]}.linear.{match[3]}"
    head = name.removeprefix("lm_heads.").removesuffix(".weight")
    return f"{head}.{num_layers}.weight"


def _own_config(config: MedusaConfig) -> dict[str, Any]:
    return {
        "medusa_num_heads": config.medusa_num_heads,
        "medusa_num_layers": config.medusa_num_layers,
        "base_model_name_or_path": config.verifier.name_or_path,
    }


def _vllm_config(config: MedusaConfig) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.medusa_num_heads,
        "num_hidden_layers": config.medusa_num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.truncated_vocab_size,
        "medusa_fc_bias": config.medusa_fc_bias,
        "original_lm_head": config.original_lm_head,
        "base_model_name_or_path": config.verifier.name_or_path,
        "torch_dtype": config.dtype,
        **_TREE,
    }
