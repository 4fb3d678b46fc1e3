"""Which hidden state a layer id means: the commonest way to make a draft that accepts nothing and says nothing.

Ours are depths: i is what enters layer i, 0 the embeddings, L the last layer's output. Several producers count outputs
of layers instead, one less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from speculators.convert.options import ConvertOptions
from speculators.convert.plan import LayerIdReading
from speculators.errors import FormatError, UsageError
from speculators.formats.faults import error_of, fault

DEPTH, OUTPUT = 0, 1
# Where a draft's configuration may name its layers, in the order in which one of them counts, and what the ids mean
# there. Dots step into an object.
PLACES: tuple[tuple[str, int], ...] = (
    ("eagle_aux_hidden_state_layer_ids", DEPTH),
    ("eagle_config.eagle_aux_hidden_state_layer_ids", OUTPUT),
    ("aux_hidden_states_layer_ids", OUTPUT),
    ("dflash_config.target_layer_ids", OUTPUT),
    ("dspark_target_layer_ids", OUTPUT),
    ("target_layer_ids", OUTPUT),
    ("dflash_config.layer_ids", DEPTH),
    ("eagle_config.layer_ids", DEPTH),
)


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """A value by its dotted path; None where any step is not there."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def read_layer_ids(
    config: Mapping[str, Any], options: ConvertOptions, default: Sequence[int], num_layers: int
) -> LayerIdReading:
    """The depths that feed a draft: the user's, else the file's as its place means them, else `default` (depths).

    FormatError where two places disagree or an id is none of the verifier's; UsageError for a user's id that is none.
    """
    found = [(path, meaning, lookup(config, path)) for path, meaning in PLACES]
    found = [(path, meaning, ids) for path, meaning, ids in found if ids is not None]
    if options.layer_ids_mean is not None and (not found or options.aux_layer_ids is not None):
        raise UsageError("layer_ids_mean says how the file's layer ids are counted; here none of them is read")
    readings = [_reading(path, meaning, ids, options) for path, meaning, ids in found]
    if options.aux_layer_ids is not None:
        ids = tuple(options.aux_layer_ids)
        said = readings[0].read if readings else ids
        if len(said) != len(ids) or not _inside(ids, num_layers):
            raise UsageError(
                f"aux_layer_ids is {list(ids)}; expected {len(said)} depths within 0..{num_layers}, as many as the "
                "draft has features"
            )
        return LayerIdReading(said, ids, "the user's choice")
    if not readings:
        if not _inside(default, num_layers) or list(default) != sorted(set(default)):
            text = f"no layer ids are written, and the default of such drafts, depths {list(default)}, does not fit a"
            text = f"{text} verifier of {num_layers} layers; give aux_layer_ids"
            raise error_of([fault("layer-ids", text)], "config.json")
        return LayerIdReading(tuple(default), tuple(default), "default")
    reading = readings[0]
    for other in readings[1:]:
        if other.written != reading.written:
            raise error_of(
                [
                    fault(
                        "layer-ids",
                        f"{reading.source} says depths {list(reading.written)} and {other.source} "
                        f"{list(other.written)}; give aux_layer_ids",
                    )
                ],
                "config.json",
            )
    if not _inside(reading.written, num_layers):
        text = f"{reading.source} means depths {list(reading.written)}; the verifier has 0..{num_layers}"
        raise error_of([fault("layer-ids", f"{text}; is it this verifier's draft?")], "config.json")
    return reading


def _reading(path: str, meaning: int, ids: object, options: ConvertOptions) -> LayerIdReading:
    if not isinstance(ids, list) or not ids or not all(type(item) is int for item in ids):
        raise FormatError(f"config.json: {path} is {ids!r}; expected a list of whole numbers")
    if options.layer_ids_mean is not None:
        meaning = OUTPUT if options.layer_ids_mean == "output" else DEPTH
    return LayerIdReading(tuple(ids), tuple(item + meaning for item in ids), path)


def _inside(ids: Sequence[int], num_layers: int) -> bool:
    return all(0 <= item <= num_layers for item in ids)


def eagle3_default(num_layers: int) -> tuple[int, int, int]:
    """The depths that every EAGLE-3 producer feeds unless told otherwise: early, middle, late."""
    return 2, num_layers // 2, num_layers - 3


def block_default(num_layers: int, num_features: int) -> tuple[int, ...]:
    """The depths of DFlash's and DSpark's `num_features` evenly spread layers.

    Their own formula, id_i = round(1 + i (L - 4) / (n - 1)), half to even, counts outputs; these are one more.
    """
    if num_features == 1:
        return (num_layers // 2 + 1,)
    return tuple(round(1 + index * (num_layers - 4) / (num_features - 1)) + 1 for index in range(num_features))
