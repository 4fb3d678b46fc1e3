"""The table of everything that can be wrong with a speculator directory, and how a fault is said.

A code never changes its meaning: scripts look for it. `ERROR` means that an engine would refuse the directory or serve
it wrongly; `WARNING` means that it works, but hardly as its author meant.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from speculators.errors import FormatError

Level = Literal["ERROR", "WARNING"]

FAULTS: dict[str, tuple[str, Level]] = {
    "no-config": ("F001", "ERROR"),
    "model-type": ("F002", "ERROR"),
    "no-speculators-config": ("F003", "ERROR"),
    "no-speculative-tokens": ("F004", "ERROR"),
    "no-verifier": ("F005", "ERROR"),
    "no-speculators-model-type": ("F006", "ERROR"),
    "unsupported-type": ("F007", "ERROR"),
    "layer-config": ("F008", "ERROR"),
    "second-proposal": ("F009", "WARNING"),
    "verifier-bare-path": ("F010", "WARNING"),
    "verifier-not-found": ("F011", "WARNING"),
    "d2t-absolute": ("F012", "ERROR"),
    "d2t-at-full-vocabulary": ("F013", "ERROR"),
    "d2t-all-zero": ("F014", "WARNING"),
    "d2t-invalid": ("F015", "ERROR"),
    "no-lm-head": ("F016", "ERROR"),
    "unknown-tensor": ("F017", "ERROR"),
    "missing-tensor": ("F018", "ERROR"),
    "fc-width": ("F019", "ERROR"),
    "tensor-shape": ("F020", "ERROR"),
    "tensor-dtype": ("F021", "ERROR"),
    "norms-all-ones": ("F022", "WARNING"),
    "not-finite": ("F023", "ERROR"),
    "no-weights": ("F024", "ERROR"),
    "broken-weights": ("F025", "ERROR"),
    "broken-index": ("F026", "ERROR"),
    "stray-weights": ("F027", "ERROR"),
    "num-aux-hidden-states": ("F028", "ERROR"),
    "layer-ids": ("F029", "ERROR"),
    "no-layer-ids": ("F030", "ERROR"),
    "unknown-key": ("F031", "ERROR"),
    "missing-key": ("F032", "ERROR"),
    "bad-value": ("F033", "ERROR"),
    "contradiction": ("F034", "ERROR"),
    "layer-model-type": ("F035", "ERROR"),
    "dtype-differs": ("F036", "WARNING"),
    "sliding-window-ignored": ("F037", "WARNING"),
    "verifier-mismatch": ("F038", "ERROR"),
    "no-d2t": ("F039", "ERROR"),
    "all-zero": ("F040", "WARNING"),
    "norms-before-fc": ("F041", "ERROR"),
    "fc-norm-not-read": ("F042", "ERROR"),
    "norm-output-not-read": ("F043", "WARNING"),
    "anchor-sampling": ("F044", "ERROR"),
    "mixed-causality": ("F045", "WARNING"),
    "causality-not-read": ("F046", "ERROR"),
    "markov-head": ("F047", "ERROR"),
    "no-sample-from-anchor": ("F048", "ERROR"),
    "context-short": ("F049", "WARNING"),
    "tokens-exceed-block": ("F050", "ERROR"),
    "mask-token-id": ("F051", "ERROR"),
    "not-served": ("F052", "WARNING"),
    "integer-width": ("F053", "WARNING"),
    "reduced-vocabulary": ("F054", "ERROR"),
    "default-differs": ("F055", "ERROR"),
    "acceptance-not-read": ("F056", "WARNING"),
    "constant": ("F057", "WARNING"),
    "end-not-drafted": ("F058", "WARNING"),
}

# Keys that an engine reads before anything else have codes of their own; list positions are written as "0".
_SLUG_OF_KEY: dict[str, str] = {
    "model_type": "model-type",
    "speculators_model_type": "no-speculators-model-type",
    "speculators_config": "no-speculators-config",
    "speculators_config.proposal_methods": "no-speculative-tokens",
    "speculators_config.proposal_methods.0": "no-speculative-tokens",
    "speculators_config.proposal_methods.0.speculative_tokens": "no-speculative-tokens",
    "speculators_config.verifier": "no-verifier",
    "speculators_config.verifier.name_or_path": "no-verifier",
    "transformer_layer_config": "layer-config",
    "transformer_layer_config.model_type": "layer-model-type",
    "transformer_layer_config.num_aux_hidden_states": "num-aux-hidden-states",
    "transformer_layer_config.num_aux_layers": "num-aux-hidden-states",
    "eagle_aux_hidden_state_layer_ids": "layer-ids",
    "aux_hidden_state_layer_ids": "layer-ids",
}
# Of these it matters that they are there: engines take another value for an absent one than their writers did.
_SLUG_WHEN_ABSENT: dict[str, str] = {"sample_from_anchor": "no-sample-from-anchor"}
_CONTRADICTIONS = "contradictions"
_JSON_TYPES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "list", dict: "object"
}  # fmt: skip


class Fault(NamedTuple):
    """One thing wrong with a directory; its text form is `ERROR F012 d2t-absolute: message`."""

    code: str
    slug: str
    level: Level
    message: str

    def __str__(self) -> str:
        return f"{self.level} {self.code} {self.slug}: {self.message}"


def fault(slug: str, message: str) -> Fault:
    """Make the fault that FAULTS knows under `slug`; line breaks of the message become spaces."""
    code, level = FAULTS[slug]
    return Fault(code, slug, level, " ".join(message.split()))


class FaultsError(FormatError):
    """A FormatError that still has its faults one by one; its `code` is the first one's."""

    def __init__(self, message: str, faults: Sequence[Fault]) -> None:
        super().__init__(message, code=faults[0].code)
        self.faults = tuple(faults)


def error_of(faults: Sequence[Fault], source: object) -> FaultsError:
    """Turn faults into one FormatError whose code is the first fault's; `source` names the file or directory."""
    lines = [f"{item.code} {item.slug}: {item.message}" for item in faults]
    text = f"{source}: {lines[0]}" if len(lines) == 1 else f"{source}: {len(lines)} faults\n  " + "\n  ".join(lines)
    return FaultsError(text, faults)


def contradictions(problems: Iterable[tuple[str, str]]) -> None:
    """Raise, inside a pydantic validator, all (slug, message) pairs at once; do nothing when there are none."""
    found = tuple(problems)
    if found:
        raise PydanticCustomError(_CONTRADICTIONS, "contradicting values", {"problems": found})


@contextmanager
def refused_as_format_error(source: object) -> Iterator[None]:
    """Turn pydantic's refusal of values that a program put together into a FormatError that `source` opens."""
    try:
        yield
    except ValidationError as error:
        raise error_of(config_faults(error), source) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known name closest to `name`, or an empty string when none is close."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def shown(value: object) -> str:
    """Return a short one-line form of a value together with its JSON type, for a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return text if value is None else f"{text} ({_JSON_TYPES.get(type(value), type(value).__name__)})"


def config_faults(error: ValidationError, model: type[BaseModel] | None = None) -> list[Fault]:
    """Translate what pydantic found wrong with a configuration into faults, one per key.

    `model` is the class that was validated; without it a fault cannot tell the nearest key or what a key means.
    """
    found: dict[tuple[str, str], Fault] = {}
    for item in error.errors(include_url=False):
        for key, problem in _translated(item, model):
            found.setdefault((key, problem.slug), problem)
    return list(found.values())


def _translated(item: Any, model: type[BaseModel] | None) -> Iterator[tuple[str, Fault]]:
    if item["type"] == _CONTRADICTIONS:
        yield from ((message, fault(slug, message)) for slug, message in item["ctx"]["problems"])
        return
    location: tuple[int | str, ...] = item["loc"]
    key = ".".join(str(part) for part in location)
    owner = None if model is None else _model_at(model, location[:-1])
    known = [] if owner is None else [field.alias or name for name, field in owner.model_fields.items()]
    slug = _SLUG_OF_KEY.get(key, "")
    if not slug and location and isinstance(location[-1], int):
        slug = _SLUG_OF_KEY.get(".".join(map(str, location[:-1])), "")
    if item["type"] == "extra_forbidden":
        name = str(location[-1])
        if key == "model_type":
            text = f"model_type is {shown(item['input'])}; expected no such key at the top level: remove it"
        else:
            text = f"{key} is not a known key{nearest(name, known)}; remove it or correct its name"
        yield key, fault(slug if key == "model_type" else "unknown-key", text)
        return
    field = None if owner is None else owner.model_fields.get(str(location[-1]))
    meaning = f" ({field.description})" if field is not None and field.description else ""
    if item["type"] == "missing":
        absent = _SLUG_WHEN_ABSENT.get(key) or _when_absent(slug) or "missing-key"
        yield key, fault(absent, f"{key} is missing{meaning}; write it")
        return
    expected = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if item["input"] is None:
        slug = _when_absent(slug)
    elif slug == "no-speculators-model-type" and isinstance(item["input"], str) and item["input"]:
        slug = "unsupported-type"
    yield key, fault(slug or "bad-value", f"{key} is {shown(item['input'])}; expected {expected}{meaning}")


def _when_absent(slug: str) -> str:
    return "no-layer-ids" if slug == "layer-ids" else slug


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    """Follow a location of a pydantic error down to the model that owns its last part."""
    current: type[BaseModel] = model
    for part in location:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part)
        if field is None:
            return None
        candidates = [field.annotation, *get_args(field.annotation)]
        inner = next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if inner is None:
            return None
        current = inner
    return current
