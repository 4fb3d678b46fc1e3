"""DSpark in the layouts of DeepSpec, which has embeddings and head of its own, and of NVIDIA's ModelOpt."""

from __future__ import annotations

from speculators.convert.foreign_config import add_verifiers, of_family, require_expressible
from speculators.convert.from_dflash import EMBEDDINGS, HEAD
from speculators.convert.from_dspark import UNPREFIXED
from speculators.convert.plan import CheckpointPlan, Ledger
from speculators.convert.source import SourceCheckpoint
from speculators.convert.to_dflash import block_settings, flat_layer, layers_of_verifier, unsaid_by_layouts
from speculators.formats.config import SpeculatorConfig
from speculators.models.dspark.config import DSparkConfig

DEEPSPEC, MODELOPT = "deepspec-dspark", "modelopt-dspark"
_PREFIXED = {name: short for short, name in UNPREFIXED.items()}


def plan(speculator: SourceCheckpoint, config: SpeculatorConfig, layout: str) -> CheckpointPlan:
    """Account for every tensor of a DSpark speculator; FormatError names what the layout cannot say."""
    config = of_family(config, DSparkConfig, layout, "DSpark")
    ledger = Ledger(speculator)
    require_expressible(config, layout, _refused(config, ledger, layout))
    written = {**flat_layer(config), **layers_of_verifier(config, ledger), "block_size": config.block_size}
    heads = {"markov_rank": config.markov_rank, "markov_head_type": config.markov_head_type}
    if layout == MODELOPT:
        ledger.copy_all(ledger.left, lambda name: _PREFIXED.get(name, name))
        written |= {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {
                **block_settings(config),
                **heads,
                "projector_type": "dspark",
                "shift_label": True,
                "use_confidence_head": config.enable_confidence_head,
            },
        }
        return ledger.finish_foreign(layout, written)
    ledger.copy_all(ledger.left)
    add_verifiers(ledger, config, EMBEDDINGS, HEAD)
    written |= {
        **block_settings(config),
        **heads,
        "architectures": ["Qwen3DSparkModel"],
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "tie_word_embeddings": False,
    }
    return ledger.finish_foreign(layout, written)


def _refused(config: DSparkConfig, ledger: Ledger, layout: str) -> dict[str, bool]:
    layer = config.transformer_layer_config
    refused = {
        "its slots predict the next token, not their own (sample_from_anchor false)": not config.sample_from_anchor,
        "its layers have no windows": "sliding_attention" in layer.layer_types,
        "its slots see each other (is_causal)": bool(layer.is_causal),
        "it has no temperatures of the confidence head": config.confidence_temperatures is not None,
    }
    unsaid = unsaid_by_layouts(config, ledger)
    if layout == MODELOPT:
        text = "its confidence head reads the Markov embedding too (confidence_head_with_markov false)"
        without = config.enable_confidence_head and not config.confidence_head_with_markov
        return refused | unsaid | {text: without}
    stored = ("it stores no embeddings", "it stores no head")
    return refused | {reason: holds for reason, holds in unsaid.items() if reason not in stored}
