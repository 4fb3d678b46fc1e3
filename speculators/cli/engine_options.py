"""Options of `serve` and `generate` that vLLM spells too: JSON objects, a file of options, and names of engine keys."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from speculators.errors import UsageError

SPELLINGS: dict[str, Any] = {"token_normalize_func": lambda name: name.replace("_", "-")}
ENGINE_OPTIONS: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, **SPELLINGS}
_FROM_FILE = "speculators.engine_keywords"
# Short names of engine keys, and what a file of options calls the argument.
_SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size"}
_ARGUMENTS = {"model": "checkpoint"}
# Options that are one key of the speculative configuration each.
_SPEC_KEYS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
_DEPRECATED = {"speculative_model": "model", "num_speculative_tokens": "num_speculative_tokens"}


def _read_file(context: typer.Context, path: Path | None) -> Path | None:
    """Take options from a YAML mapping; those of the command line win."""
    if path is None:
        return None
    options = {option.name: option for option in context.command.params if option.name != "config"}
    defaults: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for written, value in _yaml_mapping(path).items():
        name = str(written).lstrip("-").replace("-", "_")
        option = options.get(_ARGUMENTS.get(name, name))
        if option is None or option.name is None:
            others[name] = value
        elif isinstance(value, Mapping):
            defaults[option.name] = json.dumps(value)
        else:
            several = getattr(option, "multiple", False) and not isinstance(value, list)
            defaults[option.name] = [value] if several else value
    context.default_map = {**(context.default_map or {}), **defaults}
    context.meta[_FROM_FILE] = others
    return path


def _yaml_mapping(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Mapping):
        raise typer.BadParameter(f"{path} holds {found!r}, expected a mapping from option names to values")
    return found


SpeculativeOption = Annotated[
    str | None, typer.Option("--speculative-config", "-sc", metavar="JSON", help="Draft how, and with what.")
]
TransferOption = Annotated[
    str | None, typer.Option("--kv-transfer-config", metavar="JSON", help="Where extracted hidden states go.")
]
AdditionalOption = Annotated[
    str | None,
    typer.Option("--additional-config", metavar="JSON", help="Lossy rules, confidence budgets, windows, trees."),
]
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="YAML", help="Take options from a file; JSON ones nest.", is_eager=True, callback=_read_file
    ),
]
SpecMethodOption = Annotated[str | None, typer.Option("--spec-method", help="The speculative method.")]
SpecModelOption = Annotated[str | None, typer.Option("--spec-model", help="What drafts.")]
SpecTokensOption = Annotated[int | None, typer.Option("--spec-tokens", help="Drafts a step.")]
OldModelOption = Annotated[str | None, typer.Option("--speculative-model", hidden=True)]
OldTokensOption = Annotated[str | None, typer.Option("--num-speculative-tokens", hidden=True)]


def speculation_keywords(context: typer.Context) -> dict[str, Any]:
    """What the options say about speculation, as keywords of `LLM`; UsageError where they contradict each other.

    Reads the parameters of a command that has every option above.
    """
    given = _object(context, "speculative_config")
    _refuse_deprecated(context, given)
    for parameter, key in _SPEC_KEYS.items():
        value = context.params[parameter]
        if value is None:
            continue
        option = f"--{parameter.replace('_', '-')}"
        if given is not None and key in {str(name).replace("-", "_") for name in given}:
            raise UsageError(f"{option} {value} and --speculative-config, which has {key!r} too: give one of the two")
        given = {**(given or {}), key: value}
    return {
        "speculative_config": given,
        "kv_transfer_config": _object(context, "kv_transfer_config"),
        "additional_config": _object(context, "additional_config"),
    }


def engine_keywords(context: typer.Context) -> dict[str, Any]:
    """Options that have no flag of their own here: the engine accepts or refuses each by name."""
    keywords = {**context.meta.get(_FROM_FILE, {}), **_keywords(context.args)}
    if "model" in keywords:
        raise UsageError(f"--model {keywords['model']}: the model is this command's argument, not an option")
    return keywords


def _refuse_deprecated(context: typer.Context, given: Mapping[str, Any] | None) -> None:
    old = {key: context.params[parameter] for parameter, key in _DEPRECATED.items() if context.params[parameter]}
    if not old:
        return
    names = " and ".join(f"--{parameter.replace('_', '-')}" for parameter, key in _DEPRECATED.items() if key in old)
    equal = json.dumps({**(given or {}), **{key: _value(str(value)) for key, value in old.items()}})
    raise UsageError(f"{names}: deprecated; write --speculative-config '{equal}' instead")


def _object(context: typer.Context, parameter: str) -> dict[str, Any] | None:
    text = context.params[parameter]
    option = f"--{parameter.replace('_', '-')}"
    if text is None:
        return None
    try:
        given = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise UsageError(f"{option} is {text}, expected a JSON object")
    return given


def _keywords(words: Sequence[str]) -> dict[str, Any]:
    from speculators.runtime.engine_keywords import KEYWORDS, TAKEN

    known = KEYWORDS.keys() | TAKEN
    keywords: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            if name.removeprefix("no_") in known and name not in known:
                keywords[name.removeprefix("no_")], name = False, None
                continue
            keywords[name] = _value(text) if equals else True
            name = None if equals else name
        elif word in _SHORT:
            name = _SHORT[word]
            keywords[name] = True
        elif name is not None:
            keywords[name], name = _value(word), None
        else:
            raise UsageError(f"got {word!r}, expected an option")
    return keywords


def _value(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value
