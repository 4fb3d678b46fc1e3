"""The command that brings a speculator to the Hugging Face hub: push."""

from pathlib import Path
from typing import Annotated, Any

import typer

from speculators.cli.directories import TokenOption
from speculators.cli.report import JsonOption, print_table, say, write_report

PANEL = "Share a speculator"


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("push", rich_help_panel=PANEL)(push)


def push(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A speculator directory.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="A hub id, owner/name.")],
    private: Annotated[bool, typer.Option("--private", help="Only you, or your organisation, may see it.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be uploaded, and send nothing.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="BRANCH", help="A branch, made where there is none.")
    ] = None,
    token: TokenOption = None,
    json_path: JsonOption = None,
) -> None:
    """Upload a speculator with a model card; refuses one that does not validate or whose verifier is a path."""
    from speculators.formats.publish import prepare, publish
    from speculators.models import family_config

    publication = prepare(directory, repo, family_config)
    sizes = publication.sizes
    print_table(
        f"{directory} to {repo}", ("file", "bytes"), [(name, f"{size:,}") for name, size in sizes.items()], json_path
    )
    report: dict[str, Any] = {
        "repo": repo,
        "revision": revision,
        "private": private,
        "files": sizes,
        "card": publication.card,
        "url": None,
    }
    if dry_run:
        say(publication.card, json_path)
        say("nothing was sent; leave --dry-run out to upload", json_path)
    else:
        report["url"] = publish(publication, token=token, private=private, revision=revision)
        say(f"pushed: {report['url']}", json_path)
    write_report(report, json_path)


def push_directory(directory: Path, repo: str, *, token: str | None, json_path: str | None) -> None:
    """Upload a directory that another command has made, and say where; what `push` refuses is refused."""
    from speculators.formats.publish import prepare, publish
    from speculators.models import family_config

    say(f"pushed: {publish(prepare(directory, repo, family_config), token=token)}", json_path)
