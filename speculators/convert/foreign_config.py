"""What exporters share: a layer block as Llama's flat keys, and refusing what a layout cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculators.convert.plan import Ledger
from speculators.errors import FormatError
from speculators.formats.config import SpeculatorConfig
from speculators.formats.decoder import DecoderConfig

_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window")


def llama_keys(layer: DecoderConfig, dtype: str) -> dict[str, Any]:
    """A layer block at the top level of a configuration, its rope as `rope_theta` and `rope_scaling`.

    Windows are named only where there are any.
    """
    written = layer.to_json()
    rope = dict(written.pop("rope_parameters"))
    theta = rope.pop("rope_theta")
    if "sliding_attention" not in layer.layer_types:
        written = {key: value for key, value in written.items() if key not in _WINDOWS}
    scaling = None if rope == {"rope_type": "default"} else rope
    return written | {"rope_theta": theta, "rope_scaling": scaling, "torch_dtype": dtype}


def require_expressible(config: SpeculatorConfig, layout: str, refused: Mapping[str, bool]) -> None:
    """Raise FormatError with those of the reasons `refused` that hold, each of which keeps a speculator out."""
    reasons = [reason for reason, holds in refused.items() if holds]
    if reasons:
        kind = config.speculators_model_type
        raise FormatError(f"this {kind} speculator cannot be written as {layout}: {'; '.join(reasons)}")


def require_stored(ledger: Ledger, layout: str, *names: str) -> None:
    """Raise FormatError where a speculator leaves a tensor to its verifier that the layout has to have."""
    absent = [name for name in names if not ledger.has(name)]
    if absent:
        raise FormatError(
            f"{ledger.source.directory} leaves {' and '.join(absent)} to its verifier, and {layout} does not; attach "
            "the verifier's weights and save it again"
        )
