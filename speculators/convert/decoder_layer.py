"""The decoder layers of a foreign draft as this library's layer block, checked against the shapes of its tensors.

A producer's own code reads fewer keys of its configuration than a transformers model would; what it leaves out takes
the default of Llama's configuration, as there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from speculators.errors import FormatError
from speculators.formats.decoder import DecoderConfig
from speculators.formats.faults import error_of, fault, refused_as_format_error
from speculators.models.family import VerifierShape, rope_parameters_of

Shapes = Mapping[str, tuple[int, ...]]
Note = Callable[[str], None]

# What transformers' Llama takes where a configuration says nothing.
DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_EPS = 1e-6
_LATER_LAYER = re.compile(r"layers\.(\d+)\.")
_LATENT = ("kv_a_proj_with_mqa", "q_a_proj", "kv_b_proj")
# Numbers that a layer block keeps, or refuses where a draft does not compute them.
_KEPT = (
    "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "logit_scale",
    "pretraining_tp", "attention_dropout", "use_cache",
)  # fmt: skip


def unheard(_: str) -> None:
    """Say nothing."""


def decoder_layer(
    config: Mapping[str, Any],
    shapes: Shapes,
    *,
    first_layer: str,
    verifier: VerifierShape,
    note: Note = unheard,
) -> DecoderConfig:
    """The layer block of a draft whose layers are `first_layer` ("midlayer", "layers.0") and `layers.1`, `layers.2`...

    `config` has Hugging Face's Llama keys at its top level; `shapes` are tensors' by name, without wrappers' prefixes.
    Sizes are the tensors'; heads are counted by the configuration, and their size follows. `vocab_size` is the
    verifier's. `note` is told of defaults. FormatError where configuration, tensors and verifier disagree, or a layer
    is of another kind.
    """
    _require_dense(shapes, first_layer)
    attention = f"{first_layer}.self_attn"
    q, k, o = (_matrix(shapes, f"{attention}.{name}_proj.weight") for name in "qko")
    gate = _matrix(shapes, f"{first_layer}.mlp.gate_proj.weight")
    heads = _count(config, "num_attention_heads")
    head_dim, rest = divmod(q[0], heads)
    if rest:
        raise _contradiction(f"q_proj has {q[0]} rows, no multiple of num_attention_heads {heads}")
    has_norm = f"{attention}.q_norm.weight" in shapes
    sizes = {
        "hidden_size": o[0],
        "intermediate_size": gate[0],
        "num_hidden_layers": _num_layers(shapes, first_layer),
        "head_dim": head_dim,
        "num_key_value_heads": k[0] // head_dim,
        "vocab_size": verifier.vocab_size,
    }
    _require_agreement(config, sizes, verifier)
    kept = {key: config[key] for key in _KEPT if key in config}
    kept = {key: value for key, value in kept.items() if value is not None or key.endswith("_token_id")}
    fields = {
        **kept,
        **sizes,
        **_attention_windows(config, sizes["num_hidden_layers"]),
        "num_attention_heads": heads,
        "model_type": "qwen3" if has_norm else "llama",
        "attention_bias": _has_biases(config, shapes, attention),
        "hidden_act": config.get("hidden_act") or "silu",
        "rms_norm_eps": _number(config, "rms_norm_eps", _DEFAULT_EPS, note),
        "max_position_embeddings": _positions(config, verifier, note),
        "rope_parameters": draft_rope(config, note),
    }
    with refused_as_format_error("config.json"):
        return DecoderConfig.model_validate(fields)


def _has_biases(config: Mapping[str, Any], shapes: Shapes, attention: str) -> bool:
    found = f"{attention}.q_proj.bias" in shapes
    said = next((key for key in ("attention_bias", "qkv_bias") if config.get(key) is True), None)
    if said is not None and not found:
        raise _contradiction(f"{said} is true, and {attention}.q_proj.bias is missing")
    return found


def draft_rope(config: Mapping[str, Any], note: Note = unheard) -> dict[str, Any]:
    """A draft's rope settings as one dict with `rope_type` and `rope_theta`, the base 10000 where none is written."""
    settings = config.get("rope_parameters") or config.get("rope_scaling")
    nested = settings.get("full_attention", settings) if isinstance(settings, Mapping) else {}
    if config.get("rope_theta") is None and (not isinstance(nested, Mapping) or nested.get("rope_theta") is None):
        note(f"no rope_theta is written; taken as {DEFAULT_ROPE_THETA:g}, as its producer's code does")
        config = {**config, "rope_theta": DEFAULT_ROPE_THETA}
    if settings is not None and not isinstance(settings, Mapping):
        raise FormatError(f"config.json: rope settings are {settings!r}; expected an object")
    return rope_parameters_of(config, "of the draft")


def output_bias_missing(layer: DecoderConfig, shapes: Shapes, attention: str) -> bool:
    """Whether a llama layer has biases but none on `attention`.o_proj: one of zeros says the same."""
    return layer.model_type == "llama" and layer.attention_bias and f"{attention}.o_proj.bias" not in shapes


def _require_dense(shapes: Shapes, first_layer: str) -> None:
    latent = next((part for part in _LATENT if f"{first_layer}.self_attn.{part}.weight" in shapes), None)
    if latent is not None:
        raise FormatError(
            f"{first_layer} has latent attention (MLA: {latent}), which no draft family here has; it is not converted"
        )
    if f"{first_layer}.self_attn.qkv_proj.weight" in shapes:
        raise FormatError(f"{first_layer} has queries, keys and values in one qkv_proj; give a checkpoint with three")
    if any(name.startswith(f"{first_layer}.mlp.experts.") for name in shapes):
        raise FormatError(f"{first_layer} is a mixture of experts, which no draft family here has; it is not converted")


def _matrix(shapes: Shapes, name: str) -> tuple[int, ...]:
    if name not in shapes:
        raise error_of([fault("missing-tensor", f"{name} is missing")], "checkpoint")
    if len(shapes[name]) != 2 or 0 in shapes[name]:
        raise error_of(
            [fault("tensor-shape", f"{name} has shape {list(shapes[name])}; expected a matrix")], "checkpoint"
        )
    return shapes[name]


def _num_layers(shapes: Shapes, first_layer: str) -> int:
    found = {int(match[1]) for name in shapes if (match := _LATER_LAYER.match(name))}
    found |= {0} if first_layer != "layers.0" else set()
    absent = next((index for index in range(max(found) + 1) if index not in found), None)
    if absent is not None:
        raise error_of(
            [fault("missing-tensor", f"layers.{absent} is missing; there are {sorted(found)}")], "checkpoint"
        )
    return len(found)


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value <= 0:
        raise error_of([fault("bad-value", f"{key} is {value!r}; expected a whole number above 0")], "config.json")
    return value


def _require_agreement(config: Mapping[str, Any], sizes: Mapping[str, int], verifier: VerifierShape) -> None:
    for key, found in sizes.items():
        said = config.get(key)
        if said is None or said == found:
            continue
        if key == "vocab_size":
            text = f"vocab_size is {said}; that of {verifier.name_or_path} is {found}: is it this verifier's draft?"
            raise error_of([fault("verifier-mismatch", text)], "config.json")
        raise _contradiction(f"{key} is {said}; by the shapes of the tensors it is {found}")


def _contradiction(text: str) -> FormatError:
    return error_of([fault("contradiction", text)], "config.json")


def _attention_windows(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    types = config.get("layer_types")
    if types is None:
        return {"layer_types": ["full_attention"] * num_layers}
    if not isinstance(types, list) or len(types) < num_layers:
        raise _contradiction(f"layer_types is {types!r}; expected one for each of {num_layers} layers")
    # A configuration that was copied from the verifier names the kinds of all its layers.
    types = types[:num_layers]
    windows = "sliding_attention" in types
    return {
        "layer_types": types,
        "use_sliding_window": windows,
        "sliding_window": config.get("sliding_window") if windows else None,
    }


def _number(config: Mapping[str, Any], key: str, default: float, note: Note) -> float:
    value = config.get(key)
    if value is None:
        note(f"no {key} is written; taken as {default:g}, as its producer's code does")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise error_of([fault("bad-value", f"{key} is {value!r}; expected a number")], "config.json")
    return float(value)


def _positions(config: Mapping[str, Any], verifier: VerifierShape, note: Note) -> int:
    if config.get("max_position_embeddings") is not None:
        return _count(config, "max_position_embeddings")
    note(f"no max_position_embeddings is written; taken as the verifier's {verifier.max_position_embeddings}")
    return verifier.max_position_embeddings
