"""The command that puts a trained draft back into the verifier that it is a part of: stitch-mtp."""

from pathlib import Path
from typing import Annotated

import typer

from speculators.cli import converting
from speculators.cli.directories import SpeculatorArgument
from speculators.cli.report import JsonOption

LAYOUT = "native-mtp"
VerifierArgument = Annotated[
    str, typer.Argument(metavar="VERIFIER", help="Its verifier's checkpoint, which stays as it is.")
]


def register(app: typer.Typer) -> None:
    """Add this module's command, and its older form."""
    app.command("stitch-mtp", rich_help_panel=converting.PANEL)(stitch)
    app.command("stitch", hidden=True)(stitch_as_before)


def stitch(
    draft: SpeculatorArgument, verifier: VerifierArgument, out: converting.OutOption, json_path: JsonOption = None
) -> None:
    """Write a copy of a verifier whose MTP block is the draft's, under the names that engines read.

    Files that hold nothing of the block are hard links where that can be: they take no room, and must not be changed.
    The same as export --to native-mtp.
    """
    converting.export(draft, LAYOUT, out, verifier, json_path=json_path)


def stitch_as_before(
    draft: SpeculatorArgument,
    verifier: VerifierArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory.")],
) -> None:
    """Do what stitch-mtp does; the new directory is the third argument."""
    stitch(draft, verifier, out)
