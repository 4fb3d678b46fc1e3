"""Which of transformers' models have layers with a running state that a slot cache keeps, and what computes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn
from transformers import PretrainedConfig

from speculators.models.gated_delta import GatedDelta
from speculators.models.mamba2 import Mamba2
from speculators.models.recurrent import SlotLayer
from speculators.models.short_conv import ShortConvolution


class Recurrence(NamedTuple):
    """What a model's layers with a state are called in `layer_types`, where they have it, and what computes that."""

    kinds: frozenset[str]
    attribute: str
    layer: type[SlotLayer]


_DELTA = Recurrence(frozenset({"linear_attention"}), "linear_attn", GatedDelta)
_SHORT = Recurrence(frozenset({"conv"}), "conv", ShortConvolution)
_MAMBA = Recurrence(frozenset({"linear_attention", "mamba"}), "mamba", Mamba2)
RECURRENCES: Mapping[str, Recurrence] = {
    "qwen3_next": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "lfm2": _SHORT,
    "lfm2_moe": _SHORT,
    "bamba": _MAMBA,
    "granitemoehybrid": _MAMBA,
    "falcon_h1": _MAMBA._replace(kinds=frozenset({"hybrid"})),
    "nemotron_h": _MAMBA._replace(attribute="mixer"),
}


def kept_states(config: PretrainedConfig) -> frozenset[str]:
    """Kinds of layers, as the config's `layer_types` calls them, whose running state a slot cache keeps."""
    found = RECURRENCES.get(config.model_type)
    return frozenset() if found is None else found.kinds


def use_slot_states(layers: Iterable[nn.Module], config: PretrainedConfig) -> None:
    """Let those among decoder layers that have a state keep it where `SlotKeyValues` says; weights stay."""
    found = RECURRENCES.get(config.model_type)
    if found is None:
        return
    for layer in layers:
        module = getattr(layer, found.attribute, None)
        # In some models the attribute is the attention, or nothing, of other layers.
        if isinstance(module, nn.Module) and (found.layer is not Mamba2 or hasattr(module, "A_log")):
            found.layer(module).take_over()
