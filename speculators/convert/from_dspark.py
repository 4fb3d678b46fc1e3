"""DSpark drafts as DeepSpec, SpecForge and NVIDIA's ModelOpt write them: DFlash's backbone and two heads."""

from __future__ import annotations

from typing import Any

from speculators.convert.detect import WRAPPERS
from speculators.convert.from_dflash import OPTIONS, BlockReader, renamed
from speculators.convert.from_dflash_settings import explicit_causality
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan
from speculators.convert.source import SourceCheckpoint
from speculators.formats.faults import error_of, fault
from speculators.models.dspark.config import DSparkConfig

# ModelOpt writes its heads without prefixes. A layer's `gate_proj` is below `layers`, so that nothing is called alike.
UNPREFIXED = {
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    **{
        f"{name}.{part}": f"markov_head.{name}.{part}"
        for name in ("gate_proj", "joint_proj")
        for part in ("weight", "bias")
    },
    "confidence_proj.weight": "confidence_head.proj.weight",
    "confidence_proj.bias": "confidence_head.proj.bias",
}
_KIND_OF_PART = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
_CONFIDENCE, _W1 = "confidence_head.proj.weight", "markov_head.markov_w1.weight"


def plan(source: SourceCheckpoint, verifier: ConversionVerifier, options: ConvertOptions) -> CheckpointPlan:
    """Account for a DSpark draft's tensors; FormatError names what it cannot be converted for."""
    options.require_only("a DSpark draft", *OPTIONS, "markov_head_type")
    reader = BlockReader(renamed(source.without_prefixes(*WRAPPERS), UNPREFIXED), verifier, options)
    _settle_causality(reader)
    return reader.finish(DSparkConfig, "dspark", **_heads(reader))


def _heads(reader: BlockReader) -> dict[str, Any]:
    """The keys of both heads: as written, else as the tensors show."""
    settings, shape = reader.settings, reader.ledger.source.shape
    first, confidence = shape(_W1), shape(_CONFIDENCE)
    if first is None or len(first) != 2:
        raise error_of([fault("missing-tensor", f"{_W1} is {first}; expected a matrix")], "checkpoint")
    shown = next((kind for name, kind in _KIND_OF_PART.items() if shape(name) is not None), "vanilla")
    enabled = settings.flag("enable_confidence_head", "use_confidence_head")
    with_markov = settings.flag("confidence_head_with_markov")
    if with_markov is None:
        with_markov = confidence is None or confidence[-1] != reader.layer.hidden_size
    return {
        "markov_rank": settings.count("markov_rank", least=1) or first[1],
        "markov_head_type": reader.options.markov_head_type or settings.get("markov_head_type") or shown,
        "enable_confidence_head": confidence is not None if enabled is None else enabled,
        "confidence_head_with_markov": with_markov,
    }


def _settle_causality(reader: BlockReader) -> None:
    """Check a DSpark draft's attention against how engines run it: causal in a layer with a window, and in no other."""
    causal = explicit_causality(reader.settings, reader.options)
    windows = "sliding_attention" in reader.layer.layer_types
    if causal is None and reader.settings.flag("use_swa"):
        # Who writes this key trains blocks whose slots see each other.
        causal = False
    if windows and causal is False:
        text = "slots of a block see each other in layers with a window; engines run a DSpark draft's causally there"
        raise error_of([fault("causality-not-read", f"{text}, so it is not converted")], "config.json")
    if causal:
        reader.layer = reader.layer.model_copy(update={"is_causal": True})
