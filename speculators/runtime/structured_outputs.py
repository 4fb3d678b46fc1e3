"""What form a request asks its output to have; fields and meaning are vLLM's."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from speculators.errors import RequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Options that shape JSON alone, with the kinds that they apply to.
_JSON_OPTIONS = {
    "disable_any_whitespace": ("json", "json_object"),
    "disable_additional_properties": ("json",),
    "whitespace_pattern": ("json", "json_object"),
}

# Keywords of JSON Schema under which further schemas stand; anything else is data.
_ONE_SCHEMA = frozenset({"items", "additionalProperties", "contains", "not", "if", "then", "else"})
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_LISTS_OF_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of an output: exactly one of `json` (a schema), `regex`, `choice` (texts), `grammar`, `json_object`.

    A schema is a dict or its JSON text, a grammar is written in Lark or GBNF, and `json_object` True asks for any JSON
    object. For JSON, `disable_any_whitespace` or `whitespace_pattern` (a regular expression) say what may stand between
    its tokens, and `disable_additional_properties` closes every object of the schema. RequestError names a field that
    is wrong.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if self.structural_tag is not None:
            raise _wrong(
                "structural_tag is not supported by this runtime; give a `grammar` of the tags and their content"
            )
        if len(given) != 1:
            raise _wrong(f"expected exactly one of {', '.join(KINDS)}, got {', '.join(given) or 'none of them'}")
        self._check_kind()
        for name, kinds in _JSON_OPTIONS.items():
            value = getattr(self, name)
            expected = str | None if name == "whitespace_pattern" else bool
            if not isinstance(value, expected):
                raise _wrong(f"{name}={value!r}: expected {expected}")
            if value and given[0] not in kinds:
                raise _wrong(f"{name} belongs to {' or '.join(kinds)}, got it with {given[0]}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise _wrong("disable_any_whitespace and whitespace_pattern contradict each other; give one of them")

    @classmethod
    def of(cls, given: object) -> "StructuredOutputsParams":
        """Themselves, or a mapping of their fields; RequestError for a field that does not exist."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise _wrong(f"{given!r}: expected StructuredOutputsParams or a dict of their fields")
        known = [item.name for item in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise _wrong(f"unknown field {name!r}; {hint}")
        return cls(**given)

    @property
    def kind(self) -> str:
        """Which of the five it is."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of `json` or `json_object`, with objects closed where that was asked for."""
        if self.kind == "json_object":
            return {"type": "object"}
        text = self.json if isinstance(self.json, str) else json.dumps(dict(self.json or {}))
        schema: dict[str, Any] = json.loads(text)
        if self.disable_additional_properties:
            _close_objects(schema)
        return schema

    def _check_kind(self) -> None:
        if self.json is not None:
            _check_schema(self.json)
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and text):
                raise _wrong(f"{name}={text!r}: expected a text that is not empty")
        if self.choice is not None and not (
            isinstance(self.choice, list | tuple)
            and self.choice
            and all(isinstance(text, str) and text for text in self.choice)
        ):
            raise _wrong(f"choice={self.choice!r}: expected a list of texts, none empty")
        if self.json_object not in (None, True):
            raise _wrong(f"json_object={self.json_object!r}: expected True, or None for no such wish")


def _check_schema(given: object) -> None:
    schema = given
    if isinstance(given, str):
        try:
            schema = json.loads(given)
        except json.JSONDecodeError as error:
            raise _wrong(f"json={given[:80]!r} is no JSON: {error}; give a JSON schema") from error
    if not isinstance(schema, Mapping):
        raise _wrong(f"json={given!r:.80}: expected a JSON schema, a dict or the JSON text of one")
    try:
        json.dumps(dict(schema))
    except (TypeError, ValueError) as error:
        raise _wrong(f"json holds what JSON cannot: {error}") from error


def _close_objects(schema: object) -> None:
    """Forbid properties that a schema does not name, in place, wherever it does not speak of them itself."""
    if not isinstance(schema, dict):
        return
    is_object = schema.get("type") == "object" or "properties" in schema
    if is_object and not {"additionalProperties", "patternProperties"} & set(schema):
        schema["additionalProperties"] = False
    for keyword, value in schema.items():
        if keyword in _ONE_SCHEMA and not isinstance(value, list):
            _close_objects(value)
        elif keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            for part in value.values():
                _close_objects(part)
        elif keyword in _LISTS_OF_SCHEMAS and isinstance(value, list):
            for part in value:
                _close_objects(part)


def _wrong(text: str) -> RequestError:
    return RequestError(f"structured_outputs: {text}", parameter="structured_outputs")
