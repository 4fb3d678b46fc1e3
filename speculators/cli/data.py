"""Commands that make training data: answers by the verifier, rows of tokens, and the draft's vocabulary."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculators.cli.report import JsonOption, print_table, say, write_report

if TYPE_CHECKING:
    from speculators.extract.prepared import PreparedData
    from speculators.extract.regenerate import RegenerateResult

ModelOption = Annotated[str, typer.Option("--model", help="The verifier: a folder or a hub id.")]
SourceOption = Annotated[
    list[str],
    typer.Option(
        "--data",
        "--dataset",
        help="A .jsonl, .json (.gz, .xz) or .parquet file, a folder of them, a saved dataset, or "
        "hf:owner/name[:subset[:split]]; @0.3 behind it takes that share. May be repeated.",
    ),
]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the verifier.")]
LimitOption = Annotated[int | None, typer.Option("--max-samples", "--limit", min=1, help="Take the first rows only.")]
TemplateOption = Annotated[
    str | None,
    typer.Option("--chat-template-kwargs", help='Options of the chat template: {"enable_thinking": false}.'),
]
SkipBadOption = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Count rows that are malformed or too long, instead of stopping.")
]
EndpointOption = Annotated[
    list[str] | None,
    typer.Option("--endpoint", help="An OpenAI server that answers instead: http://host:8000/v1. May be repeated."),
]
TemperaturesOption = Annotated[
    str, typer.Option("--temperature", help='A number, or shares of rows: {"0": 0.5, "0.8": 0.5}.')
]
_DESCRIBED = {
    "read": "rows read",
    "rows": "rows kept",
    "split": "conversations split into several rows",
    "cut": "rows cut",
    "skipped": "rows skipped",
    "lost_reasoning": "answers whose reasoning the template leaves out",
    "tokens": "tokens",
    "supervised_tokens": "tokens learnt",
}


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """The value of an option that is a JSON object; empty where it is not given."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option} is {text!r}, expected a JSON object") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{option} is {text!r}, expected a JSON object")
    return found


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
    data: SourceOption,
    output: Annotated[Path, typer.Option("--output", "--outfile", help="The JSONL file of conversations to write.")],
    model: Annotated[
        str | None,
        typer.Option("--model", help="A verifier, or a speculator, with which it answers faster; or a server's name."),
    ] = None,
    endpoint: EndpointOption = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Conversations at a time, of servers.")] = 64,
    max_retries: Annotated[int, typer.Option("--max-retries", min=0, help="Further attempts, of servers.")] = 5,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of an answer at most.")] = 256,
    temperature: TemperaturesOption = "0",
    sampling_params: Annotated[
        str | None, typer.Option("--sampling-params", help='Further ones by name: {"top_p": 0.9, "top_k": 20}.')
    ] = None,
    chat_template_kwargs: TemplateOption = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    limit: LimitOption = None,
    skip_bad_rows: SkipBadOption = False,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, help="Conversations at a time.")] = 32,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", min=1)] = None,
    store_token_ids: Annotated[bool, typer.Option("--store-token-ids", help="Keep the answers' ids too.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Let the verifier answer prompts; a rerun continues where the last one ended."""
    from speculators.errors import UsageError
    from speculators.extract.endpoints import RetryPolicy
    from speculators.extract.regenerate import RegenerateOptions
    from speculators.extract.regenerate_remote import EndpointOptions, regenerate_remotely

    options = RegenerateOptions(
        max_new_tokens=max_tokens,
        temperatures=_temperatures(temperature),
        seed=seed,
        store_token_ids=store_token_ids,
        limit=limit,
        sampling=json_object(sampling_params, "--sampling-params"),
        template_options=json_object(chat_template_kwargs, "--chat-template-kwargs"),
        skip_bad_rows=skip_bad_rows,
    )
    if endpoint:
        policy = RetryPolicy(retries=max_retries)
        servers = EndpointOptions(tuple(endpoint), model=model, concurrency=concurrency, policy=policy)
        done = regenerate_remotely(servers, data, output, options)
    elif model is None:
        raise UsageError("--model or --endpoint is missing: who answers?")
    else:
        from speculators.extract.run import regenerate

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
    _tell_answers(done)


def _tell_answers(done: "RegenerateResult") -> None:
    counted = f"{done.rows} conversations ({done.resumed} were there before), {done.answer_tokens} answer tokens"
    left_out = f"{len(done.skipped)} skipped, {len(done.failed)} failed"
    say(f"{done.output}: {counted}; {left_out}")
    if done.skipped:
        say(f"skipped, no room for an answer: {', '.join(done.skipped)}")
    if done.failed:
        say(f"failed, see {done.output.with_name(f'{done.output.stem}.errors.jsonl')}: {', '.join(done.failed[:20])}")
        raise typer.Exit(1)


def prepare_data(
    model: ModelOption,
    data: SourceOption,
    output: Annotated[Path, typer.Option("--output", help="The folder to write.")] = Path("output"),
    seq_length: Annotated[int, typer.Option("--seq-length", min=2, help="Longer rows are cut.")] = 2048,
    max_samples: LimitOption = None,
    minimum_valid_tokens: Annotated[
        int, typer.Option("--minimum-valid-tokens", min=1, help="Skip rows with fewer tokens to learn.")
    ] = 1,
    chat_template_kwargs: TemplateOption = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option("--draft-vocab-size", min=1, help="Also choose this many tokens for the draft.")
    ] = None,
    last_turn_only: Annotated[
        bool, typer.Option("--last-turn-only", help="Learn each row's last answer only.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Draws the shares of weighted sources.")] = 0,
    skip_bad_rows: SkipBadOption = False,
    max_row_bytes: Annotated[int, typer.Option("--max-row-bytes", min=1, help="Longer rows are bad.")] = 4 * 2**20,
    show: Annotated[int, typer.Option("--show", min=0, help="Print this many rows, what is learnt coloured.")] = 0,
    stats_json: Annotated[Path | None, typer.Option("--stats-json", help="Write the statistics as JSON.")] = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Turn conversations into token ids and loss masks through the verifier's own chat template."""
    from speculators.extract.run import PrepareOptions, prepare

    options = PrepareOptions(
        max_length=seq_length,
        turns="last" if last_turn_only else "all",
        template_options=json_object(chat_template_kwargs, "--chat-template-kwargs"),
        limit=max_samples,
        minimum_valid_tokens=minimum_valid_tokens,
        max_row_bytes=max_row_bytes,
        skip_bad_rows=skip_bad_rows,
        seed=seed,
        draft_vocab_size=draft_vocab_size,
        trust_remote_code=trust_remote_code,
    )
    prepared = prepare(model, data, output, options)
    if show:
        _show(prepared, model, show, trust_remote_code)
    statistics = prepared.statistics()
    print_table(str(output), ("count", "value"), _lines(statistics))
    for fault in statistics["faults"]:
        say(f"bad row: {fault}")
    write_report(statistics, None if stats_json is None else str(stats_json))


def _show(prepared: "PreparedData", model: str, count: int, trust_remote_code: bool) -> None:
    from rich.console import Console

    from speculators.extract.preview import LEARNT, coloured_row
    from speculators.extract.run import load_tokenizer

    console = Console(highlight=False)
    tokenizer = load_tokenizer(model, trust_remote_code)
    for row in range(min(count, len(prepared))):
        learnt = int(prepared[row][1].sum())
        console.rule(f"row {row}: {prepared.lengths[row]} tokens, [{LEARNT}]{learnt} learnt[/]")
        console.print(coloured_row(prepared, row, tokenizer))
    console.rule()


def _lines(statistics: Mapping[str, Any]) -> list[tuple[str, object]]:
    """The statistics as lines of a table, zeros of rare counts left out."""
    lines: list[tuple[str, object]] = []
    for name, title in _DESCRIBED.items():
        if statistics[name] or name not in ("split", "lost_reasoning"):
            lines.append((title, statistics[name]))
        if name == "skipped":
            lines += [(f"  {why}", number) for why, number in statistics["skipped_why"].items()]
    marks = statistics["row_tokens"]
    lines.append(("share learnt", f"{statistics['supervised_share']:.1%}"))
    lines.append(("tokens of a row", f"{marks['min']} to {marks['max']}, median {marks['median']}"))
    if "draft_vocab" in statistics:
        vocab = statistics["draft_vocab"]
        lines.append(("draft vocabulary", vocab["size"]))
        lines.append(("coverage of what is learnt", f"{vocab['coverage']:.2%}"))
    return lines


def vocab_map(
    data: Annotated[list[Path], typer.Option("--data", help="A folder made by prepare-data; several add up.")],
    draft_vocab_size: Annotated[int, typer.Option("--draft-vocab-size", min=1, help="Tokens of the draft.")],
    output: Annotated[Path, typer.Option("--output", help="A .safetensors file, or a folder for it.")],
    json_path: JsonOption = None,
) -> None:
    """Choose the draft's vocabulary by how often each token is learnt, over one or several prepared folders."""
    from speculators.extract.prepared import (
        DRAFT_VOCAB,
        PreparedData,
        merged_counts,
        merged_draft_vocab,
        write_draft_vocab,
    )

    parts = [PreparedData(folder) for folder in data]
    vocab = merged_draft_vocab(parts, draft_vocab_size)
    path = write_draft_vocab(vocab, output if output.suffix == ".safetensors" else output / DRAFT_VOCAB)
    counts = merged_counts(parts)
    report = {
        "path": str(path),
        "draft_vocab_size": vocab.draft_size,
        "verifier_vocab_size": vocab.verifier_size,
        "tokens": int(counts.sum()),
        "distinct_tokens": int((counts > 0).sum()),
        "coverage": round(vocab.coverage(counts), 6),
    }
    lines = [(name.replace("_", " "), value) for name, value in report.items() if name != "path"]
    print_table("draft vocabulary", ("count", "value"), lines, json_path)
    say(f"written: {path}", json_path)
    write_report(report, json_path)
