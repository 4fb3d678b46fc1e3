"""The settings of a golden case, as its key writes them, checked and completed.

A key is `"<folder>|<settings as JSON>"`. Every family has its own settings; each has the type, the range and, where it
may be left out, the default below. `loss_fn` is a loss's name or a mixture of several, an object of weights, which may
be written as JSON once more; names of other software are understood beside ours. A weight of 0 leaves a loss out.
"""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from speculators.errors import UsageError
from speculators.models.losses import TERMS

LOSS_ALIASES = {"rkl": "reverse_kl", "reverse_kl_div": "reverse_kl", "jsd": "js", "js_div": "js"}
POSITION_WEIGHTS = ("fixed-exp-decay", "dpace", None)
# Two ways that the other software has to the same numbers; ours has one.
IMPLEMENTATIONS = ("eager", "fused")


class Setting(NamedTuple):
    """One setting: whether a value is allowed, in words too, and the default (... where a key must give it)."""

    allows: Callable[[Any], bool]
    expected: str
    default: Any = ...


def _integer(value: Any) -> bool:
    return type(value) is int and value >= 1


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and math.isfinite(value) and low <= value <= high


def _weights(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) > 0 and all(_number(0, math.inf)(item) for item in value)
    )


LOSS_FN = Setting(lambda value: isinstance(value, str | dict), "a loss's name, or weights by name", "kl_div")
IMPLEMENTATION = Setting(lambda value: value in IMPLEMENTATIONS, "eager or fused", "eager")
BLOCK_DRAFTER = {
    "loss_fn": LOSS_FN,
    "max_anchors": Setting(_integer, "a positive integer", 512),
    "dflash_decay_gamma": Setting(_number(1e-6, math.inf), "a positive number", 4.0),
    "per_position_loss_weight": Setting(
        lambda value: value in POSITION_WEIGHTS, "fixed-exp-decay or dpace", "fixed-exp-decay"
    ),
    "dpace_alpha": Setting(_number(0, 1), "a number in [0, 1]", 0.5),
    "loss_implementation": IMPLEMENTATION,
}
SETTINGS: dict[str, dict[str, Setting]] = {
    "eagle3": {
        "loss_fn": LOSS_FN,
        "ttt_steps": Setting(_integer, "a positive integer", 3),
        "ttt_step_loss_decay": Setting(_number(1e-6, 1), "a number in (0, 1]", 1.0),
        "loss_implementation": IMPLEMENTATION,
    },
    "dflash": BLOCK_DRAFTER,
    "dflash2": BLOCK_DRAFTER | {"selector_loss_alpha": Setting(_number(0, math.inf), "a number from 0 on", 1.0)},
    "dspark": BLOCK_DRAFTER
    | {
        "max_anchors": Setting(_integer, "a positive integer", 3072),
        "confidence_head_alpha": Setting(_number(0, math.inf), "a number from 0 on", 1.0),
    },
    "mtp": {
        # Left out: as many as there are weights, or as the folder proposes.
        "num_speculative_steps": Setting(_integer, "a positive integer", None),
        "step_weight_beta": Setting(_number(1e-6, 1), "a number in (0, 1]", 0.6),
        "step_weights": Setting(_weights, "a list of weights, or null", None),
    },
}
SETTING_ALIASES = {"gamma": "dflash_decay_gamma"}


def loss_terms(value: str | dict[str, Any]) -> dict[str, float]:
    """Weights of `losses.TERMS` by name: `"kl_div"`, `{"ce": 0.1, "tv": 0.9}` or that as a string of JSON."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = json.loads(value)
    weights = {value: 1.0} if isinstance(value, str) else value
    terms: dict[str, float] = {}
    for written, weight in weights.items():
        name = LOSS_ALIASES.get(written, written)
        if name not in TERMS:
            raise UsageError(f"loss_fn names {written!r}; expected {', '.join(TERMS)}, or weights of several")
        if name in terms or not _number(0, math.inf)(weight):
            raise UsageError(f"loss_fn gives {written!r} the weight {weight!r}; expected one number from 0 on a loss")
        terms[name] = float(weight)
    terms = {name: weight for name, weight in terms.items() if weight > 0}
    if not terms:
        raise UsageError("loss_fn has no losses; expected at least one of a weight above 0")
    return terms


def read_case(case: str, family: str) -> dict[str, Any]:
    """The settings of a case's key for a folder of this family, defaults filled in; `loss_fn` becomes a dict.

    UsageError names a setting that this family does not have, that is missing or has a value of the wrong kind.
    """
    text = case.partition("|")[2]
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"case {case!r}: expected '<folder>|<settings as JSON>': {error}") from error
    if not isinstance(given, dict):
        raise UsageError(f"case {case!r}: its settings are {given!r}; expected a JSON object")
    known, found = SETTINGS[family], {}
    for written, value in given.items():
        name = SETTING_ALIASES.get(written, written)
        if name not in known:
            raise UsageError(f"{written} is no setting of {family}; expected {', '.join(known)}")
        if name in found:
            raise UsageError(f"{written} is the same setting as {name}, which is given too; keep one of them")
        if not known[name].allows(value):
            raise UsageError(f"{written} is {value!r}; expected {known[name].expected}")
        found[name] = value
    for name, setting in known.items():
        found.setdefault(name, setting.default)
    if "loss_fn" in found:
        found["loss_fn"] = loss_terms(found["loss_fn"])
    return found
