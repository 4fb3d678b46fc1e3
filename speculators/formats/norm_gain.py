"""Whether a verifier's final norm multiplies by its weight or by one more than its weight.

Both store a tensor of the same name and shape. The answer is that of the verifier's own class in transformers: with
weights of 0 a norm that adds one lets the input through.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

# For types that transformers does not know, or whose norms cannot be told apart; of those it knows it says the same.
GAIN_PLUS_ONE = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "recurrent_gemma",
        "vaultgemma",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen4_exp",
        "qwen4_exp_text",
        "minimax_m3_vl_text",
    }
)
_WIDTH = 4
# Norms without a weight, or with a second input, stand beside the one in question in some modules.
_OTHER_NORMS = ("Unweighted", "Weightless", "Gated")


def adds_one(model_type: str) -> bool:
    """Whether the final norm of a model type computes x̂·(1 + w); false for a type that nobody knows."""
    answers = {class_adds_one(norm) for norm in _norm_classes(model_type)} - {None}
    return answers == {True} if len(answers) == 1 else model_type in GAIN_PLUS_ONE


def class_adds_one(norm_class: type[nn.Module]) -> bool | None:
    """Whether a norm class computes x̂·(1 + w); None where it is not made from a width alone or has no weight."""
    try:
        norm = norm_class(_WIDTH)
        weight = norm.get_parameter("weight")
        with torch.no_grad():
            weight.zero_()
            return bool(norm(torch.ones(1, _WIDTH, dtype=weight.dtype, device=weight.device)).any())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None


def _norm_classes(model_type: str) -> Iterator[type[nn.Module]]:
    """The RMSNorm classes of the module that transformers keeps a model type's language model in."""
    if model_type not in CONFIG_MAPPING:
        return
    config_class = CONFIG_MAPPING[model_type]
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        if config_class not in mapping:
            continue
        found = mapping[config_class]
        model_class = found[0] if isinstance(found, tuple) else found
        for name, value in vars(sys.modules[model_class.__module__]).items():
            norm = name.endswith("RMSNorm") and isinstance(value, type) and issubclass(value, nn.Module)
            if norm and not any(other in name for other in _OTHER_NORMS):
                yield value
        return
