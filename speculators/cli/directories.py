"""Commands that read a speculator without loading torch: inspect and validate."""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculators.cli.report import JsonOption, print_table, say, write_report

if TYPE_CHECKING:
    from speculators.formats.checkpoint import TensorHeader
    from speculators.formats.config import SpeculatorConfig

PANEL = "Look at a speculator"
DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A speculator directory.")]
SpeculatorArgument = Annotated[str, typer.Argument(metavar="DIR|REPO", help="A speculator: directory or hub id.")]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", metavar="NAME", help="Branch, tag or commit of the hub repository.")
]
TokenOption = Annotated[
    str | None, typer.Option("--token", help="For the hub; HF_TOKEN, or the one you logged in with, otherwise.")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("inspect", rich_help_panel=PANEL)(inspect)
    app.command("validate", rich_help_panel=PANEL)(validate)


def inspect(
    speculator: SpeculatorArgument,
    revision: RevisionOption = None,
    token: TokenOption = None,
    json_path: JsonOption = None,
) -> None:
    """Say what a speculator is: family, verifier, depth, size, and what vLLM will read; the verifier is not needed."""
    from speculators.errors import FormatError
    from speculators.formats.draft_model_file import no_speculator
    from speculators.formats.faults import error_of
    from speculators.models import family_config

    raw, headers = _described(speculator, revision, token)
    kind = raw.get("speculators_model_type")
    family = family_config(kind) if isinstance(kind, str) else None
    if kind is None and (found := no_speculator(speculator)) is not None:
        raise error_of([found], speculator)
    if family is None:
        hint = "run `speculators validate` on the directory for all that is wrong with it"
        raise FormatError(f"{speculator}: speculators_model_type is {kind!r}, which no family here has; {hint}")
    report = _report(speculator, family.from_json(raw, speculator), raw, headers)
    write_report(report, json_path)
    _print_description(report, json_path)


def _described(
    speculator: str, revision: str | None, token: str | None
) -> tuple[dict[str, Any], "dict[str, TensorHeader]"]:
    """The configuration and the tensors' headers; the hub's client is imported only for what is no directory."""
    if Path(speculator).is_dir() and revision is None:
        from speculators.formats.checkpoint import read_config, read_headers

        return read_config(speculator), read_headers(speculator)
    from speculators.formats.hub import describe

    return describe(speculator, revision, token)


def _report(
    name: str, config: "SpeculatorConfig", raw: Mapping[str, Any], headers: "Mapping[str, TensorHeader]"
) -> dict[str, Any]:
    from speculators.formats.vllm import describe_for_vllm
    from speculators.runtime.config import METHOD_OF_FAMILY

    kind = config.speculators_model_type
    weights = [header for header in headers.values() if header.dtype not in _MAP_DTYPES]
    return {
        "directory": name,
        "family": kind,
        "verifier": config.verifier.name_or_path,
        "method": METHOD_OF_FAMILY.get(kind),
        "depth": config.num_speculative_tokens,
        "num_speculative_tokens": config.num_speculative_tokens,
        "max_speculative_tokens": config.max_speculative_tokens,
        "network": config.network().replace("`", ""),
        "layers": len({found[1] for name in headers if (found := _LAYER.match(name))}),
        "aux_layer_ids": config.aux_layer_ids,
        "vocabulary": {
            "draft": config.num_draft_ids,
            "verifier": config.verifier_vocab_size,
            "coverage": config.num_draft_ids / config.verifier_vocab_size,
        },
        "parameters": sum(prod(header.shape) for header in weights),
        "bytes": sum(header.end - header.start for header in headers.values()),
        "tensors": {name: {"dtype": header.dtype, "shape": list(header.shape)} for name, header in headers.items()},
        "vllm": describe_for_vllm(config, raw),
    }


_LAYER = re.compile(r"(?:\w+_)?layers\.(\d+)\.")
# What stores maps between vocabularies, not weights.
_MAP_DTYPES = frozenset({"I64", "I32", "BOOL"})


def _print_description(report: dict[str, Any], json_path: str | None) -> None:
    vocabulary, features = report["vocabulary"], ", ".join(str(one) for one in report["aux_layer_ids"])
    rows: list[tuple[str, object]] = [
        ("family", report["family"]),
        ("verifier", report["verifier"]),
        ("method", report["method"]),
        ("tokens a step (K)", report["depth"]),
        ("most tokens a step", report["max_speculative_tokens"] or "any"),
        ("network", report["network"]),
        ("aux layer ids", features or "none: the last state after its norm"),
        ("vocabulary", f"{vocabulary['draft']} of {vocabulary['verifier']} tokens ({vocabulary['coverage']:.1%})"),
        ("parameters", f"{report['parameters'] / 1e6:.2f} million"),
        ("size", f"{report['bytes'] / 2**20:.1f} MiB in {len(report['tensors'])} tensors"),
        *_vllm_rows(report["vllm"]),
    ]
    print_table(report["directory"], ("what", "value"), rows, json_path)


def _vllm_rows(vllm: Mapping[str, Any]) -> list[tuple[str, object]]:
    if not vllm["served"]:
        return [("vLLM", f"does not read this directory; {vllm['instead']}")]
    blocks = {name: block for name, block in vllm.items() if name.endswith("_config")}
    rows: list[tuple[str, object]] = [
        ("vLLM: method", vllm["method"]),
        ("vLLM: drafts in one pass", "yes" if vllm["parallel_drafting"] else "no"),
        ("vLLM: draft class", vllm["architecture"]),
        ("vLLM: model runner", vllm["runner"]),
        ("vLLM: model and tokenizer", vllm["model"]),
        ("vLLM: captured layers", ", ".join(str(one) for one in vllm["capture_layer_ids"])),
        *((f"vLLM: {key}", value) for key, value in vllm["draft"].items()),
        *((f"vLLM: {name}.{key}", value) for name, block in blocks.items() for key, value in (block or {}).items()),
    ]
    return rows + [("vLLM differs", text) for text in vllm["differs"]]


def validate(directory: DirectoryArgument, json_path: JsonOption = None) -> None:
    """Name every fault of a speculator directory, one a line; exit code 1 where one of them is an error."""
    from speculators.formats.vllm import validate_directory
    from speculators.models import family_config

    faults = validate_directory(directory, family_config)
    for fault in faults:
        say(str(fault), json_path)
    errors = sum(fault.level == "ERROR" for fault in faults)
    if not faults:
        say(f"{directory}: no fault found", json_path)
    write_report([fault._asdict() for fault in faults], json_path)
    if errors:
        raise typer.Exit(1)
