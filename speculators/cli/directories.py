"""Commands that read a speculator directory without loading torch: inspect and validate."""

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculators.cli.report import JsonOption, print_table, say, write_report

if TYPE_CHECKING:
    from speculators.formats.config import SpeculatorConfig

PANEL = "Look at a speculator"
DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A speculator directory.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("inspect", rich_help_panel=PANEL)(inspect)
    app.command("validate", rich_help_panel=PANEL)(validate)


def _family_config(name: str) -> "type[SpeculatorConfig] | None":
    from speculators.models import FAMILIES

    return FAMILIES[name].config if name in FAMILIES else None


def inspect(directory: DirectoryArgument, json_path: JsonOption = None) -> None:
    """Say what a speculator is: family, verifier, depth, size, and what vLLM will read from the directory."""
    from speculators.errors import FormatError
    from speculators.formats.checkpoint import read_config, read_headers
    from speculators.formats.vllm import describe_for_vllm

    raw = read_config(directory)
    kind = raw.get("speculators_model_type")
    family = _family_config(kind) if isinstance(kind, str) else None
    if family is None:
        hint = "run `speculators validate` on the directory for all that is wrong with it"
        raise FormatError(f"{directory}: speculators_model_type is {kind!r}, which no family here has; {hint}")
    config = family.from_json(raw, directory)
    headers = read_headers(directory)
    sizes = {name: prod(header.shape) for name, header in headers.items()}
    weights = {name: size for name, size in sizes.items() if name not in ("d2t", "t2d")}
    report: dict[str, Any] = {
        "directory": str(directory),
        "family": config.speculators_model_type,
        "verifier": config.verifier.name_or_path,
        "num_speculative_tokens": config.num_speculative_tokens,
        "aux_layer_ids": config.aux_layer_ids,
        "parameters": sum(weights.values()),
        "bytes": sum(header.end - header.start for header in headers.values()),
        "tensors": {name: {"dtype": header.dtype, "shape": list(header.shape)} for name, header in headers.items()},
        "vllm": describe_for_vllm(config),
    }
    write_report(report, json_path)
    _print_description(report, json_path)


def _print_description(report: dict[str, Any], json_path: str | None) -> None:
    vllm = report["vllm"]
    rows: list[tuple[str, object]] = [
        ("family", report["family"]),
        ("verifier", report["verifier"]),
        ("tokens a step (K)", report["num_speculative_tokens"]),
        ("aux layer ids", ", ".join(str(one) for one in report["aux_layer_ids"])),
        ("parameters", f"{report['parameters'] / 1e6:.2f} million"),
        ("size", f"{report['bytes'] / 2**20:.1f} MiB in {len(report['tensors'])} tensors"),
        ("vLLM: method", vllm["method"]),
        ("vLLM: draft class", vllm["architecture"]),
        ("vLLM: model and tokenizer", vllm["model"]),
        ("vLLM: captured layers", ", ".join(str(one) for one in vllm["capture_layer_ids"])),
        *((f"vLLM: {key}", value) for key, value in vllm["draft"].items()),
    ]
    print_table(report["directory"], ("what", "value"), rows, json_path)


def validate(directory: DirectoryArgument, json_path: JsonOption = None) -> None:
    """Name every fault of a speculator directory, one a line; exit code 1 where one of them is an error."""
    from speculators.formats.vllm import validate_directory

    faults = validate_directory(directory, _family_config)
    for fault in faults:
        say(str(fault), json_path)
    errors = sum(fault.level == "ERROR" for fault in faults)
    if not faults:
        say(f"{directory}: no fault found", json_path)
    write_report([fault._asdict() for fault in faults], json_path)
    if errors:
        raise typer.Exit(1)
