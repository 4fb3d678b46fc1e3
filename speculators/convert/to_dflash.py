"""DFlash in the layouts of z-lab, whose settings stand in `dflash_config`, and of NVIDIA's ModelOpt.

Neither stores embeddings or a head: both are the verifier's.
"""

from __future__ import annotations

from typing import Any

from speculators.convert.foreign_config import llama_keys, of_family, require_expressible
from speculators.convert.from_dflash import EMBEDDINGS, HEAD
from speculators.convert.layer_ids import OUTPUT
from speculators.convert.options import ConversionVerifier
from speculators.convert.plan import CheckpointPlan, Ledger
from speculators.convert.source import SourceCheckpoint
from speculators.formats.config import SpeculatorConfig
from speculators.models.dflash.config import BlockDraftConfig, DFlashConfig

ZLAB, MODELOPT = "z-lab-dflash", "modelopt-dflash"


def plan(speculator: SourceCheckpoint, config: SpeculatorConfig, layout: str) -> CheckpointPlan:
    """Account for every tensor of a DFlash speculator; FormatError names what the layout cannot say."""
    config = of_family(config, DFlashConfig, layout, "DFlash")
    ledger = Ledger(speculator)
    require_expressible(config, layout, _refused(config, ledger, layout))
    ledger.copy_all(ledger.left)
    settings: dict[str, Any] = {**block_settings(config), "causal": not config.sliding_window_non_causal}
    layer = config.transformer_layer_config
    if layout == MODELOPT and "sliding_attention" in layer.layer_types:
        settings |= {"use_swa": True, "swa_window_size": layer.sliding_window}
    written: dict[str, Any] = {
        **flat_layer(config),
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": settings,
        **layers_of_verifier(config, ledger),
    }
    if layout == ZLAB:
        written["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}
    return ledger.finish_foreign(layout, written)


def _refused(config: DFlashConfig, ledger: Ledger, layout: str) -> dict[str, bool]:
    layer = config.transformer_layer_config
    windows = "sliding_attention" in layer.layer_types
    mixed = windows and "full_attention" in layer.layer_types
    return {
        **unsaid_by_layouts(config, ledger),
        "its slots predict their own tokens, not the next (sample_from_anchor)": config.sample_from_anchor,
        "its windows are of all layers or none": layout == MODELOPT and mixed,
        "its blocks are never causal": layout == MODELOPT and not config.sliding_window_non_causal,
    }


def unsaid_by_layouts(config: BlockDraftConfig, ledger: Ledger) -> dict[str, bool]:
    """Why a block drafter stays out of layouts without embeddings, head and map."""
    return {
        "its vocabulary is the verifier's": config.draft_vocab_size < config.verifier_vocab_size,
        "its width is the verifier's, whose embeddings and head it uses": config.has_own_width,
        "it stores no embeddings": ledger.has(EMBEDDINGS) and not config.has_own_width,
        "it stores no head": ledger.has(HEAD)
        and not config.has_own_width
        and config.draft_vocab_size == config.verifier_vocab_size,
        **unsaid_by_output_ids(config),
    }


def unsaid_by_output_ids(config: BlockDraftConfig) -> dict[str, bool]:
    """Why layer ids stay out of layouts that count outputs of layers."""
    return {"depth 0, the embeddings, is no layer's output": 0 in config.aux_layer_ids}


def flat_layer(config: BlockDraftConfig) -> dict[str, Any]:
    """The layer block at the top level, its kind of attention always named."""
    layer = config.transformer_layer_config
    return {
        **llama_keys(layer, config.dtype),
        "layer_types": layer.layer_types,
        "sliding_window": layer.sliding_window,
        "use_sliding_window": layer.use_sliding_window,
    }


def block_settings(config: BlockDraftConfig) -> dict[str, Any]:
    """The settings that every block drafter has."""
    return {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [depth - OUTPUT for depth in config.aux_layer_ids],
    }


def layers_of_verifier(config: BlockDraftConfig, ledger: Ledger) -> dict[str, Any]:
    """`num_target_layers`, where the verifier is here to say so; no engine needs it beside the ids."""
    verifier = ConversionVerifier(config.verifier.name_or_path)
    if verifier.is_here:
        return {"num_target_layers": verifier.shape.num_hidden_layers}
    ledger.note(f"num_target_layers is not written: {verifier.name_or_path} is not a directory here")
    return {}
