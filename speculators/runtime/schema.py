"""How a key of a user's configuration is described: one description gives its check, its error and its coverage.

A configuration is a frozen dataclass whose fields are made by `key`; `check_keys` reads a field's description when an
object is made, `read_mapping` makes one of a user's mapping.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from speculators.errors import EngineError

Coverage = Literal["effect", "neutral", "refused"]
Value = TypeVar("Value")
Config = TypeVar("Config")
_DESCRIPTION = "description"


class Kind(Protocol):
    """A type and a range; `expected` says both in words, after "expected"."""

    @property
    def expected(self) -> str:
        """What a value must be."""
        ...

    def read(self, value: object) -> object:
        """The value as it is kept; ValueError, with the reason or empty, where it is none of this kind."""
        ...


@dataclass(frozen=True)
class Whole:
    """A whole number from `least` to `most`."""

    least: int
    most: int | None = None

    @property
    def expected(self) -> str:
        """What a value must be."""
        return f"a whole number {_span(self.least, self.most)}"

    def read(self, value: object) -> int:
        """The number."""
        if not isinstance(value, int) or isinstance(value, bool) or not _within(value, self.least, self.most):
            raise ValueError
        return value


@dataclass(frozen=True)
class Number:
    """A finite number from `least` to `most`; `positive` leaves 0 out."""

    least: float
    most: float | None = None
    positive: bool = False

    @property
    def expected(self) -> str:
        """What a value must be."""
        return f"a number in (0, {self.most}]" if self.positive else f"a number {_span(self.least, self.most)}"

    def read(self, value: object) -> float:
        """The number."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
            raise ValueError
        if not _within(value, self.least, self.most) or (self.positive and not value):
            raise ValueError
        return float(value)


@dataclass(frozen=True)
class Flag:
    """True or false."""

    expected: ClassVar[str] = "true or false"

    def read(self, value: object) -> bool:
        """The flag."""
        if not isinstance(value, bool):
            raise ValueError
        return value


@dataclass(frozen=True)
class Text:
    """A text of at least one character."""

    expected: ClassVar[str] = "a non-empty string"

    def read(self, value: object) -> str:
        """The text."""
        if not isinstance(value, str) or not value:
            raise ValueError
        return value


@dataclass(frozen=True)
class Choice:
    """One of several texts."""

    values: tuple[str, ...]

    @property
    def expected(self) -> str:
        """What a value must be."""
        return f"one of {', '.join(self.values)}"

    def read(self, value: object) -> str:
        """The text."""
        if not isinstance(value, str) or value not in self.values:
            raise ValueError
        return value


@dataclass(frozen=True)
class Object:
    """A mapping from names to anything; whoever reads it checks what is inside."""

    expected: ClassVar[str] = "an object (a mapping)"

    def read(self, value: object) -> Mapping[str, Any]:
        """The mapping."""
        if not isinstance(value, Mapping):
            raise ValueError
        return value


@dataclass(frozen=True)
class Anything:
    """A value of which only some are honoured."""

    expected: ClassVar[str] = "a value"

    def read(self, value: object) -> object:
        """The value."""
        return value


@dataclass(frozen=True)
class Nested:
    """A mapping whose keys are those of another configuration; null for its defaults."""

    config: type[Any]
    where: str
    expected: ClassVar[str] = "an object (a mapping)"

    def read(self, value: object) -> object:
        """The configuration."""
        if value is None or isinstance(value, self.config):
            return value or self.config()
        if not isinstance(value, Mapping):
            raise ValueError
        return read_mapping(self.config, value, self.where)


@dataclass(frozen=True)
class Key:
    """A key: its type and range, and what a value of it does.

    `coverage` "effect": it changes something that can be observed, said by `about`. "neutral": every value passes and
    changes nothing, for the reason in `about`. "refused": only the values in `honoured`, which are true of this engine
    already, pass; `about` is the reason. `methods` are those under which alone it may be other than its default.
    """

    kind: Kind
    coverage: Coverage
    about: str
    nullable: bool = True
    honoured: tuple[object, ...] | None = None
    methods: tuple[str, ...] | None = None

    def read(self, where: str, name: str, value: object) -> object:
        """The value as it is kept; EngineError names the key, the value and what is allowed."""
        if value is None and self.nullable:
            return None
        try:
            kept = self.kind.read(value)
        except ValueError as error:
            expected = f"expected {self.kind.expected}{' or null' if self.nullable else ''}"
            reason = f"{error}; {expected}" if str(error) else expected
            raise EngineError(f"{where}: {name}={value!r}: {reason}") from None
        if self.honoured is not None and not any(_same(kept, one) for one in self.honoured):
            allowed = " or ".join(repr(one) for one in _named(self.honoured, self.nullable))
            raise EngineError(
                f"{where}: {name}={value!r} cannot be honoured by this engine: {self.about}; it runs with "
                f"{name}={allowed}"
            )
        return kept


def key(default: Value, description: Key) -> Value:
    """A field of a configuration: its default and its description."""
    # A dataclass takes the field for what describes the default, as of `dataclasses.field` itself.
    made: Value = field(default=default, metadata={_DESCRIPTION: description})
    return made


def keys_of(config: type[Any]) -> dict[str, Key]:
    """The descriptions of a configuration's fields, by name."""
    return {item.name: item.metadata[_DESCRIPTION] for item in fields(config) if _DESCRIPTION in item.metadata}


def defaults_of(config: type[Any]) -> dict[str, object]:
    """The defaults of a configuration's described fields, by name."""
    return {item.name: item.default for item in fields(config) if _DESCRIPTION in item.metadata}


def check_keys(config: Any, where: str) -> None:
    """Read every described field of a new configuration as its description says, and keep what was read."""
    for name, description in keys_of(type(config)).items():
        object.__setattr__(config, name, description.read(where, name, getattr(config, name)))


def changed_keys(config: Any) -> Iterator[tuple[str, Key, object]]:
    """The described fields that are not at their defaults: name, description and value."""
    defaults = defaults_of(type(config))
    for name, description in keys_of(type(config)).items():
        value = getattr(config, name)
        if value != defaults[name]:
            yield name, description, value


def read_mapping(config: type[Config], given: object, where: str, refused: Mapping[str, str] | None = None) -> Config:
    """Make a configuration of a user's mapping, in whose keys dashes count as underscores.

    `refused` are keys that people write here for a reason, each with what to do instead. EngineError names a key that
    is refused, unknown (with the nearest known one) or there twice.
    """
    if not isinstance(given, Mapping):
        raise EngineError(f"{where} is {given!r}, expected an object (a mapping)")
    known = keys_of(config)
    read: dict[str, Any] = {}
    for written, value in given.items():
        name = str(written).replace("-", "_")
        if name in read:
            raise EngineError(f"{where}: key {name!r} is there twice, with dashes and with underscores")
        if name in known:
            read[name] = value
        elif refused is None or name not in refused:
            raise EngineError(f"{where}: unknown key {name!r}{nearest(name, known)}")
        elif value is not None:
            raise EngineError(f"{where}: {name}={value!r}: {refused[name]}")
    return config(**read)


def nearest(name: str, known: Iterable[str]) -> str:
    """A question after the known name that is most like an unknown one; empty where none is."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _named(honoured: tuple[object, ...], nullable: bool) -> Iterator[object]:
    if nullable:
        yield None
    yield from honoured


def _span(least: float, most: float | None) -> str:
    return f"of at least {least}" if most is None else f"in [{least}, {most}]"


def _within(value: float, least: float, most: float | None) -> bool:
    return value >= least and (most is None or value <= most)
