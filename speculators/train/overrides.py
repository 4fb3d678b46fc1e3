"""`train.learning_rate=1e-4`: changing typed settings by dotted name, refusing what is misspelt or of another type."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from speculators.errors import UsageError

Settings = TypeVar("Settings", bound=BaseModel)


def apply_overrides(settings: Settings, overrides: Iterable[str]) -> Settings:
    """A copy of `settings` with `name.of.field=value` applied in order.

    Values are JSON (`1e-4`, `true`, `null`, `[0.9, 0.95]`) or else text; `none` is null too. UsageError for a name that
    does not exist (with the nearest that does), for a value of another type, and for one that contradicts the rest.
    """
    data = settings.model_dump(mode="json")
    given: dict[tuple[str, ...], str] = {}
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator or not name:
            raise UsageError(f"override {override!r}: expected name=value, for example train.epochs=2")
        path = tuple(name.split("."))
        _check_name(settings, path)
        _put(data, path, _value(text))
        given[path] = text
    try:
        return _rebuilt(settings, data)
    except _FaultsError as error:
        faults = error.faults
    # What reads as a number may be meant as text: a folder called 2024.
    retried = {
        named for place, _ in faults if (named := _given(place, given)) and isinstance(_value(given[named]), _BARE)
    }
    for path in retried:
        _put(data, path, given[path])
    try:
        return _rebuilt(settings, data)
    except _FaultsError as error:
        still = {_given(place, given) for place, _ in error.faults}
        left = [fault for fault in error.faults if _given(fault[0], given) not in retried]
    left = [fault for fault in faults if (named := _given(fault[0], given)) in retried and named in still] + left
    raise UsageError("; ".join(_explained(place, fault, given) for place, fault in left))


_BARE = (int, float, type(None))
Place = tuple[str, ...]


def _rebuilt(settings: Settings, data: Mapping[str, Any]) -> Settings:
    """`data` as the same kind of settings, each section as the same kind of section; _FaultsError names all faults."""
    kind = type(settings)
    sections = {name: value for name in kind.model_fields if isinstance(value := getattr(settings, name), BaseModel)}
    rebuilt: dict[str, Any] = {}
    faults: list[tuple[Place, Any]] = []
    for name, section in sections.items():
        try:
            rebuilt[name] = _rebuilt(section, data[name])
        except _FaultsError as error:
            faults += [((name, *place), fault) for place, fault in error.faults]
    try:
        # As JSON where there are no sections, because strict models take a list for a tuple there.
        whole = (
            kind.model_validate({**data, **sections, **rebuilt})
            if sections
            else kind.model_validate_json(json.dumps(data))
        )
    except ValidationError as error:
        faults += [(tuple(map(str, fault["loc"])), fault) for fault in error.errors()]
    if faults:
        raise _FaultsError(faults)
    return whole


class _FaultsError(Exception):
    """What is wrong with the values, with the dotted place of each."""

    def __init__(self, faults: list[tuple[Place, Any]]) -> None:
        super().__init__(faults)
        self.faults = faults


def _check_name(settings: BaseModel, path: Sequence[str]) -> None:
    here: Any = settings
    for depth, key in enumerate(path):
        if isinstance(here, Mapping):
            here = here.get(key, {})
            continue
        if not isinstance(here, BaseModel):
            raise UsageError(f"{'.'.join(path)}: {'.'.join(path[:depth])} is a single value, it has nothing inside")
        known = list(type(here).model_fields)
        if key not in known:
            prefix = "".join(f"{part}." for part in path[:depth])
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            hint = f"; did you mean {prefix}{nearest[0]}?" if nearest else ""
            raise UsageError(f"there is no setting {'.'.join(path)}{hint} Known here: {', '.join(sorted(known))}")
        here = getattr(here, key)
    if isinstance(here, BaseModel):
        raise UsageError(
            f"{'.'.join(path)} is a section; set one of {', '.join(sorted(type(here).model_fields))} in it"
        )


def _put(data: dict[str, Any], path: Sequence[str], value: object) -> None:
    here = data
    for key in path[:-1]:
        here = here.setdefault(key, {})
    here[path[-1]] = value


def _value(text: str) -> object:
    if text.lower() == "none":
        return None
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value


def _given(place: tuple[str, ...], given: Mapping[tuple[str, ...], str]) -> tuple[str, ...] | None:
    return next((path for path in given if path == place[: len(path)]), None)


def _explained(place: tuple[str, ...], fault: Any, given: Mapping[tuple[str, ...], str]) -> str:
    path = _given(place, given)
    where = f"{'.'.join(path)}={given[path]}" if path is not None else ".".join(place) or "the settings together"
    return f"{where}: {fault['msg']}"
