"""How commands report: a table or lines for people, and the same facts as JSON for programs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="PATH", help="Also write the report as JSON; '-' is standard output.")
]


def say(text: str, json_path: str | None = None) -> None:
    """Print a line for people: on standard output, or on standard error where JSON goes to standard output."""
    typer.echo(text, err=json_path == "-")


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], json_path: str | None = None
) -> None:
    """Print a table; the first column is aligned left, the others right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*[str(cell) for cell in row])
    Console(stderr=json_path == "-").print(table)


def write_report(payload: Mapping[str, object] | Sequence[object], json_path: str | None) -> None:
    """Write a report as JSON where the user asked for it."""
    if json_path is None:
        return
    text = json.dumps(payload, indent=2, ensure_ascii=False)
    if json_path == "-":
        typer.echo(text)
        return
    from speculators.formats.files import write_text

    write_text(Path(json_path), text + "\n")
