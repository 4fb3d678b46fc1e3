"""Commands that run a speculator: evaluate, generate and serve."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculators.cli.engine_options import (
    ENGINE_OPTIONS,
    SPELLINGS,
    AdditionalOption,
    FileOption,
    OldModelOption,
    OldTokensOption,
    SpecMethodOption,
    SpecModelOption,
    SpecTokensOption,
    SpeculativeOption,
    TransferOption,
    engine_keywords,
    speculation_keywords,
)
from speculators.cli.report import JsonOption, say, write_report

if TYPE_CHECKING:
    from speculators.runtime.llm import LLM
    from speculators.runtime.stream import TextStream

PANEL = "Run a speculator"
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CKPT", help="A speculator, or a verifier: folder or hub id.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")]
SeedOption = Annotated[int, typer.Option("--seed")]
DepthOption = Annotated[
    int | None, typer.Option("--num-speculative-tokens", min=1, help="Drafts a step; the speculator's own otherwise.")
]
LengthOption = Annotated[int | None, typer.Option("--max-model-len", min=1, help="Tokens of prompt and answer.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the verifier.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("evaluate", rich_help_panel=PANEL)(evaluate)
    app.command("generate", rich_help_panel=PANEL, context_settings=SPELLINGS)(generate)
    app.command("serve", rich_help_panel=PANEL, context_settings=ENGINE_OPTIONS)(serve)


def evaluate(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A speculator: folder or hub id.")],
    data: Annotated[Path, typer.Option("--data", help="JSONL rows with turns, prompt or messages.")],
    num_speculative_tokens: DepthOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 96,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Take the first prompts only.")] = None,
    temperature: TemperatureOption = 0.0,
    dtype: DtypeOption = "auto",
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, help="Prompts at a time.")] = 1,
    seed: SeedOption = 0,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="PNG", help="Also draw the report.")] = None,
    trust_remote_code: TrustOption = False,
    json_path: JsonOption = None,
) -> None:
    """Measure acceptance, speed and identity on any prompts, with and without speculation."""
    from rich.console import Console

    from speculators.extract.conversations import read_conversations
    from speculators.models.speculator import Speculator
    from speculators.runtime import evaluate as evaluation
    from speculators.runtime.verifier import Verifier

    rows = read_conversations(data, limit)
    prompts = [row.first_turn for row in rows]
    speculator = Speculator.from_pretrained(directory)
    verifier = Verifier.from_pretrained(
        speculator.config.verifier.name_or_path, dtype=dtype, trust_remote_code=trust_remote_code
    )
    options = evaluation.EvaluateOptions(num_speculative_tokens, max_new_tokens, temperature, max_num_seqs, seed)
    report = evaluation.evaluate(verifier, speculator, prompts, options, speculator_name=directory)
    if plot is not None:
        evaluation.plot_report(report, plot)
    write_report(report, json_path)
    Console(stderr=json_path == "-").print(evaluation.report_table(report))


def generate(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    prompt: Annotated[str | None, typer.Option("--prompt", help="A text to continue.")] = None,
    chat: Annotated[str | None, typer.Option("--chat", help="A message to answer; standard input otherwise.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 256,
    temperature: TemperatureOption = 0.0,
    top_p: Annotated[float, typer.Option("--top-p")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k")] = 0,
    min_p: Annotated[float, typer.Option("--min-p")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="A text that ends the answer.")] = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = "auto",
    speculative_config: SpeculativeOption = None,
    kv_transfer_config: TransferOption = None,
    additional_config: AdditionalOption = None,
    spec_method: SpecMethodOption = None,
    spec_model: SpecModelOption = None,
    spec_tokens: SpecTokensOption = None,
    speculative_model: OldModelOption = None,
    num_speculative_tokens: OldTokensOption = None,
    config: FileOption = None,
    max_model_len: LengthOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Stream one answer to the terminal, accepted draft tokens in another colour, and a line of statistics."""
    from speculators.errors import UsageError
    from speculators.runtime.llm import LLM
    from speculators.runtime.sampling import SamplingParams
    from speculators.runtime.stream import TextStream

    speculation = speculation_keywords(context)
    if prompt is not None and chat is not None:
        raise UsageError("both --prompt and --chat are given; expected one")
    message = chat if prompt or chat else sys.stdin.read().strip()
    if not prompt and not message:
        raise UsageError("there is nothing to answer; give --prompt, --chat or standard input")
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=stop,
        seed=seed if temperature > 0 else None,
        max_tokens=max_tokens,
    )
    llm = LLM(
        checkpoint,
        dtype=dtype,
        max_model_len=max_model_len,
        trust_remote_code=trust_remote_code,
        **{"max_num_seqs": 1, **speculation, **engine_keywords(context)},
    )
    asked = prompt or {"prompt_token_ids": llm.chat_token_ids([{"role": "user", "content": message}])}
    stream = TextStream(llm, asked, params)
    for piece in stream:
        typer.secho(piece.text, fg=typer.colors.GREEN if piece.accepted else None, nl=False)
        sys.stdout.flush()
    _conclude(stream)
    llm.close()


def _conclude(stream: "TextStream") -> None:
    """End the line of the answer, and say what it took and what it left."""
    typer.echo()
    typer.secho(stream.statistics(), err=True, dim=True)
    if stream.output is not None and stream.output.kv_transfer_params is not None:
        typer.secho(f"hidden states are in {stream.output.kv_transfer_params['hidden_states_path']}", err=True)


def serve(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    host: Annotated[str, typer.Option("--host")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option("--served-model-name", help="What clients call the model; may be repeated.")
    ] = None,
    speculative_config: SpeculativeOption = None,
    kv_transfer_config: TransferOption = None,
    additional_config: AdditionalOption = None,
    spec_method: SpecMethodOption = None,
    spec_model: SpecModelOption = None,
    spec_tokens: SpecTokensOption = None,
    speculative_model: OldModelOption = None,
    num_speculative_tokens: OldTokensOption = None,
    config: FileOption = None,
    dtype: DtypeOption = "auto",
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, help="Requests at a time.")] = 16,
    max_model_len: LengthOption = None,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer")] = None,
    seed: SeedOption = 0,
    log_level: Annotated[str, typer.Option("--log-level")] = "info",
    trust_remote_code: TrustOption = False,
) -> None:
    """Serve a speculator with its verifier over an OpenAI-compatible HTTP API.

    Other engine options of vLLM are accepted where this engine already does what they ask, and refused by name where
    it does not. Dashes in names of options may be underscores.
    """
    from speculators.runtime.server import serve as run_server

    llm = _load(
        checkpoint,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        tokenizer=tokenizer,
        seed=seed,
        trust_remote_code=trust_remote_code,
        **speculation_keywords(context),
        **engine_keywords(context),
    )
    depth = llm.num_speculative_tokens
    say(f"{llm.verifier.name_or_path}" + (f", {depth} drafts a step from {checkpoint}" if depth else ", no drafts"))
    run_server(llm, host=host, port=port, served_model_names=served_model_name, log_level=log_level)


def _load(checkpoint: str, **keywords: Any) -> "LLM":
    from speculators.runtime.llm import LLM

    return LLM(checkpoint, **keywords)
