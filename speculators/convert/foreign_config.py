"""What exporters share: a layer block as Llama's flat keys, and refusing what a layout cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from speculators.convert.dtypes import STORED_AS_DTYPE
from speculators.convert.options import ConversionVerifier
from speculators.convert.plan import Ledger, PlannedTensor
from speculators.convert.source import TORCH_OF_DTYPE
from speculators.errors import FormatError
from speculators.formats.config import SpeculatorConfig
from speculators.formats.decoder import DecoderConfig
from speculators.formats.faults import error_of, fault

Config = TypeVar("Config", bound=SpeculatorConfig)
# Of rope types, those that SafeAILab's own code builds.
SAFEAILAB_ROPES = ("default", "linear", "llama3")
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


def of_family(config: SpeculatorConfig, kind: type[Config], layout: str, name: str) -> Config:
    """The configuration as that of the one family that a layout is for, which messages call `name`; FormatError."""
    if not isinstance(config, kind):
        raise FormatError(f"{layout} is a layout of {name}; this is a {config.speculators_model_type} speculator")
    return config


def require_expressible(config: SpeculatorConfig, layout: str, refused: Mapping[str, bool]) -> None:
    """Raise FormatError with those of the reasons `refused` that hold, each of which keeps a speculator out."""
    reasons = [reason for reason, holds in refused.items() if holds]
    if reasons:
        kind = config.speculators_model_type
        raise FormatError(f"this {kind} speculator cannot be written as {layout}: {'; '.join(reasons)}")


def add_verifiers(ledger: Ledger, config: SpeculatorConfig, *names: str) -> None:
    """Write the verifier's embeddings or head where a speculator leaves them to it and the layout does not.

    FormatError where the verifier's are of another shape.
    """
    missing = [name for name in names if not ledger.has(name) and name not in ledger.planned]
    if not missing:
        return
    name_or_path = config.verifier.name_or_path
    weights, dtype = ConversionVerifier(name_or_path).weights, STORED_AS_DTYPE[config.dtype]
    theirs = {"embed_tokens.weight": weights.embed_tokens, "lm_head.weight": weights.lm_head}
    for name in missing:
        shape, wanted = tuple(theirs[name].shape), config.expected_tensors()[name].shape
        if shape != wanted:
            text = f"{name} of {name_or_path} is {list(shape)}; the draft's is {list(wanted)}: give its own verifier"
            raise error_of([fault("verifier-mismatch", text)], ledger.source.directory)
        make = partial(theirs[name].to, TORCH_OF_DTYPE[dtype])
        ledger.plan(name, PlannedTensor(shape, dtype, make), f"{name_or_path}'s")
