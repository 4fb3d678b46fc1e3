"""Commands between other projects' drafts and speculators: convert and export."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculators.cli.convert_options import (
    AuxLayerIdsOption,
    BlockSizeOption,
    D2tHoldsOption,
    DtypeOption,
    FcNormOption,
    LayerIdsMeanOption,
    MarkovHeadTypeOption,
    MaskTokenIdOption,
    NormBeforeFcOption,
    NormBeforeResidualOption,
    NormOutputOption,
    SampleFromAnchorOption,
    SlidingWindowNonCausalOption,
    SpeculativeTokensOption,
)
from speculators.cli.directories import RevisionOption, SpeculatorArgument, TokenOption
from speculators.cli.hub import push_directory
from speculators.cli.report import JsonOption, print_table, say, write_report

if TYPE_CHECKING:
    from speculators.convert.check import Check
    from speculators.convert.options import ConvertOptions
    from speculators.convert.plan import CheckpointPlan
    from speculators.convert.run import Conversion

PANEL = "Bring a speculator in or out"
VerifierOption = Annotated[
    str, typer.Option("--verifier", metavar="V", help="The model that the draft is for: directory or hub id.")
]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="A new directory.")]
WeightsOption = Annotated[
    str | None, typer.Option("--weights", metavar="FILE", help="The file of weights, where there are several.")
]
CheckOption = Annotated[bool, typer.Option("--check", help="Measure acceptance, also with other readings of the file.")]
PromptsOption = Annotated[
    Path | None, typer.Option("--prompts", metavar="FILE", help="What to measure on: JSONL rows, as of evaluate.")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("convert", rich_help_panel=PANEL)(convert)
    app.command("export", rich_help_panel=PANEL)(export)


def convert(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SRC", help="Somebody's draft: directory or hub id.")],
    verifier: VerifierOption,
    out: OutOption,
    family: Annotated[str, typer.Option("--family", help="Whose layout it is, where that cannot be told.")] = "auto",
    weights: WeightsOption = None,
    aux_layer_ids: AuxLayerIdsOption = None,
    layer_ids_mean: LayerIdsMeanOption = None,
    d2t_holds: D2tHoldsOption = None,
    speculative_tokens: SpeculativeTokensOption = None,
    norm_before_residual: NormBeforeResidualOption = None,
    norm_before_fc: NormBeforeFcOption = None,
    fc_norm: FcNormOption = None,
    norm_output: NormOutputOption = None,
    mask_token_id: MaskTokenIdOption = None,
    block_size: BlockSizeOption = None,
    sample_from_anchor: SampleFromAnchorOption = None,
    sliding_window_non_causal: SlidingWindowNonCausalOption = None,
    markov_head_type: MarkovHeadTypeOption = None,
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
    verifier_revision: Annotated[str | None, typer.Option(metavar="NAME", help="The same of the verifier.")] = None,
    token: TokenOption = None,
    measure: CheckOption = False,
    prompts: PromptsOption = None,
    push: Annotated[str | None, typer.Option("--push", metavar="REPO", help="Then upload it to the hub.")] = None,
    json_path: JsonOption = None,
) -> None:
    """Make a speculator of another project's draft, and say where every tensor went.

    Options from --aux-layer-ids to --dtype say what the file does not, or overrule it.
    """
    from speculators.convert.options import ConversionVerifier
    from speculators.convert.run import carry_out, plan_conversion
    from speculators.convert.writing import require_new
    from speculators.errors import UsageError

    if prompts is not None and not measure:
        raise UsageError("--prompts says what --check measures; give both or neither")
    options = _options(context)
    conversations = _conversations(prompts)
    known = ConversionVerifier(verifier, verifier_revision, token)
    _refuse_push(push, known.is_here)
    require_new(out)
    plan = plan_conversion(source, known, family, options, weights, revision)
    if measure and not plan.is_speculator:
        text = f"--check reads a speculator in several ways, and a {plan.family} model is read in one"
        raise UsageError(f"{text}; leave it out, and see what LLM({str(out)!r}) counts")
    with _progress(out, plan.num_bytes, json_path) as advance:
        conversion = carry_out(plan, out, known, advance)
    report = conversion.to_json() | {"check": None}
    _print_conversion(source, conversion, json_path)
    try:
        if measure:
            report["check"] = _measured(conversion, conversations, json_path).to_json()
    finally:
        # Also where it could not be measured: what was converted is there.
        write_report(report, json_path)
    if push is not None:
        push_directory(out, push, token=token, json_path=json_path)


def export(
    speculator: SpeculatorArgument,
    layout: Annotated[str, typer.Option("--to", metavar="LAYOUT", help="Whose layout; an unknown one lists them all.")],
    out: OutOption,
    verifier: Annotated[
        str | None,
        typer.Option("--verifier", metavar="V", help="Where its verifier is, for layouts that hold its tensors too."),
    ] = None,
    revision: RevisionOption = None,
    token: TokenOption = None,
    json_path: JsonOption = None,
) -> None:
    """Write a speculator in another project's layout; what the layout cannot say is refused."""
    from speculators.convert.export import planned_export, write_export
    from speculators.convert.writing import require_new

    require_new(out)
    plan = planned_export(speculator, layout, verifier, revision, token)
    with _progress(out, plan.num_bytes, json_path) as advance:
        write_export(plan, out, advance)
    _print_plan(f"{speculator} to {out}", plan, [("layout", layout)], json_path)
    write_report({"layout": layout, **plan.account()}, json_path)


def _options(context: typer.Context) -> "ConvertOptions":
    """The options of the command line that are fields of ConvertOptions; UsageError says what is wrong with one."""
    from pydantic import ValidationError

    from speculators.convert.options import ConvertOptions
    from speculators.errors import UsageError

    given = {name: value for name, value in context.params.items() if name in ConvertOptions.model_fields}
    given = {name: value for name, value in given.items() if value is not None}
    if "aux_layer_ids" in given:
        given["aux_layer_ids"] = _numbers(given["aux_layer_ids"])
    try:
        return ConvertOptions.model_validate(given)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        name = str(wrong["loc"][0]) if wrong["loc"] else "options"
        expected = wrong["msg"].removeprefix("Input should be ")
        raise UsageError(f"{_flag(name)} is {given.get(name)!r}; expected {expected}") from error


def _numbers(text: str) -> list[int]:
    from speculators.errors import UsageError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--aux-layer-ids is {text!r}; expected whole numbers such as 2,14,27") from None


def _flag(name: str, value: object = True) -> str:
    """An option as it is typed."""
    words = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{words}" if value else f"--no-{words}"
    return f"--{words} {','.join(map(str, value)) if isinstance(value, list) else value}"


def _conversations(prompts: Path | None) -> list[Any] | None:
    if prompts is None:
        return None
    from speculators.extract.conversations import read_conversations

    return [row.first_turn for row in read_conversations(prompts, None)]


def _refuse_push(repo: str | None, is_here: bool) -> None:
    """UsageError where the result could not be pushed because its verifier is a path, before anything is converted."""
    if repo is not None and is_here:
        from speculators.errors import UsageError

        raise UsageError(f"--push {repo} needs a verifier that others can have; give --verifier as a hub id")


@contextmanager
def _progress(out: Path, total: int, json_path: str | None) -> Iterator[Callable[[int], None]]:
    """A bar of bytes while it lasts; yields what moves it on."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=json_path == "-"), transient=True) as bar:
        task = bar.add_task(f"writing {out}", total=total)
        yield lambda done: bar.advance(task, done)


def _print_conversion(source: str, conversion: "Conversion", json_path: str | None) -> None:
    plan, vocabulary = conversion.plan, conversion.vocabulary
    first: list[tuple[str, object]] = [("family", plan.family)]
    if vocabulary is not None:
        share = vocabulary.draft / vocabulary.verifier
        first.append(("vocabulary", f"{vocabulary.draft} of {vocabulary.verifier} tokens ({share:.1%})"))
    _print_plan(f"{source} to {conversion.directory}", plan, first, json_path)
    for item in conversion.health:
        say(str(item), json_path)


def _print_plan(title: str, plan: "CheckpointPlan", first: list[tuple[str, object]], json_path: str | None) -> None:
    """Where every tensor went, and the notes as warnings."""
    rows = [
        *first,
        ("tensors used", len(plan.used)),
        *((f"dropped: {name}", reason) for name, reason in plan.dropped.items()),
        *((f"derived: {name}", f"from {origin}") for name, origin in plan.derived.items()),
    ]
    if plan.ids is not None:
        read, written = (", ".join(map(str, ids)) for ids in (plan.ids.read, plan.ids.written))
        rows.append(("layer ids", f"{read} -> depths {written} ({plan.ids.source})"))
    rows.append(("written", f"{plan.num_bytes / 2**20:.1f} MiB in {len(plan.tensors)} tensors"))
    print_table(title, ("what", "value"), rows, json_path)
    for note in plan.notes:
        say(f"warning: {note}", json_path)


def _measured(conversion: "Conversion", conversations: list[Any] | None, json_path: str | None) -> "Check":
    """Measure, and show what was measured."""
    from speculators.convert.check import check

    found = check(conversion.directory, conversations)
    rows = [(one.reading.name, f"{one.acceptance_length:.3f}", one.num_drafts) for one in found.measured]
    print_table("acceptance by reading", ("reading", "tokens a step", "steps"), rows, json_path)
    better = found.better
    if better is not None:
        flags = " ".join(_flag(name, value) for name, value in better.reading.options.items())
        say(f"warning: {found.warning}: {flags}", json_path)
    elif found.warning is not None:
        say(f"warning: {found.warning}", json_path)
    else:
        say("no reading accepts more than the written one, beyond chance", json_path)
    return found
