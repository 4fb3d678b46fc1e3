"""The command line: what a user types, and nothing that a library user would miss.

Commands import what they need when they run, so that the ones that only read configuration start at once. Exit codes:
0; 1, work failed or a fault was found; 2, the command line was wrong; 128 + signal, interrupted (what was finished is
kept, and the same command continues).
"""

import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType
from typing import Annotated

import typer

from speculators.cli import converting, directories, hub, pipeline, serving, stitching
from speculators.errors import SpeculatorsError

app = typer.Typer(
    name="speculators",
    help="Train, evaluate and serve the draft models of speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
directories.register(app)
pipeline.register(app)
serving.register(app)
hub.register(app)
stitching.register(app)
converting.register(app)

_asked_to_end: list[int] = []
_show_tracebacks: list[bool] = []


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"speculators {version('speculators')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if debug:
        _show_tracebacks.append(True)


def _end(signum: int, _: FrameType | None) -> None:
    # Every stage keeps what it has finished when it is interrupted; being told to end is the same to it.
    _asked_to_end.append(signum)
    raise KeyboardInterrupt


def _fail(error: Exception, code: int) -> int:
    if _show_tracebacks:
        traceback.print_exception(error)
    else:
        typer.echo(f"error: {error}", err=True)
    return code


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (that of this process where none is given) and end the process with its exit code."""
    previous = signal.signal(signal.SIGTERM, _end)
    try:
        app(None if arguments is None else list(arguments), prog_name="speculators")
        code: int | str | None = 0
    except SystemExit as ended:
        code = ended.code
    except SpeculatorsError as error:
        code = _fail(error, error.exit_code)
    except OSError as error:
        code = _fail(error, 1)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous)
    if code == 128 + signal.SIGINT and _asked_to_end:
        code = 128 + _asked_to_end[-1]
    if isinstance(code, int) and code > 128:
        typer.echo("interrupted: what was finished is kept; the same command continues from there", err=True)
    sys.exit(code)
