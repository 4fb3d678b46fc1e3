"""The command that puts a trained draft back into the verifier that it is a part of: stitch."""

from pathlib import Path
from typing import Annotated

import typer

from speculators.cli.hub import PANEL
from speculators.cli.report import say


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("stitch", rich_help_panel=PANEL)(stitch)


def stitch(
    speculator: Annotated[
        str, typer.Argument(metavar="SPECULATOR", help="A draft that is a part of its verifier: directory or hub id.")
    ],
    verifier: Annotated[
        Path, typer.Argument(metavar="VERIFIER", help="Its verifier's checkpoint on disk, which stays as it is.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the copy.")],
) -> None:
    """Write a copy of a verifier whose MTP block is the speculator's, under the names that engines read.

    Files that hold nothing of the block are hard links where that can be: they take no room, and must not be changed.
    """
    from speculators.models.speculator import Speculator

    Speculator.from_pretrained(speculator).draft.stitch(verifier, out)
    say(f"{out}: {verifier} with the block of {speculator}")
