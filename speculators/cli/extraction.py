"""The commands that store a verifier's hidden states, and clear away what others left behind."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from speculators.cli.data import TrustOption, json_object
from speculators.cli.report import say

if TYPE_CHECKING:
    from speculators.extract.filling import FillResult
    from speculators.extract.remote import ServerOptions
    from speculators.extract.store import StoreEstimate, WorkShare

VerifierOption = Annotated[str | None, typer.Option("--verifier", "--model", help="A folder or a hub id.")]
RowsOption = Annotated[
    str | None, typer.Option("--data", "--preprocessed-data", help="A folder made by prepare-data, or conversations.")
]
OutOption = Annotated[Path | None, typer.Option("--out", "--output", help="The store to write, or to verify.")]
LayersOption = Annotated[
    str | None,
    typer.Option("--layers", "--target-layer-ids", help="Layers to keep, like 2,15,27; the last is always kept."),
]
TypeOption = Annotated[
    str | None, typer.Option("--speculator-type", help="Whose usual layers to keep, where none are named.")
]
EndpointOption = Annotated[
    list[str] | None, typer.Option("--endpoint", help="A server that extracts (source server); may be repeated.")
]
ServedOption = Annotated[
    str | None, typer.Option("--served-model", help="What the servers call the verifier, else the first they name.")
]
ConcurrencyOption = Annotated[int, typer.Option("--concurrency", min=1, help="Requests at a time, to all servers.")]
VllmOption = Annotated[
    Path | None, typer.Option("--vllm-python", help="The Python that has vLLM (source vllm), else this one.")
]
VllmKeywordsOption = Annotated[
    str | None, typer.Option("--vllm-keywords", help='Of its LLM, as JSON: {"tensor_parallel_size": 4}.')
]
FilesOption = Annotated[Path | None, typer.Option("--files", help="A folder of per-request files (source files).")]
FileLayersOption = Annotated[
    str | None, typer.Option("--file-layers", help="The files' layers, where they do not say (stock vLLM's).")
]
AuxOption = Annotated[
    str | None, typer.Option("--aux-dtype", help="int8 or float8_e4m3fn: quantise all layers but the last.")
]
LengthOption = Annotated[int, typer.Option("--seq-length", min=2, help="Longer conversations are cut.")]
BatchOption = Annotated[int, typer.Option("--batch-tokens", min=1, help="Tokens of a pass.")]
SkipOption = Annotated[bool, typer.Option("--skip-failed", help="Leave out rows that no states can be had for.")]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Compare the checksums of a store, and do no more.")]


def extract(
    model: VerifierOption = None,
    data: RowsOption = None,
    output: OutOption = None,
    layers: LayersOption = None,
    speculator_type: TypeOption = None,
    source: Annotated[str, typer.Option("--source", help="local, server, vllm or files.")] = "local",
    endpoint: EndpointOption = None,
    served_model: ServedOption = None,
    concurrency: ConcurrencyOption = 16,
    vllm_python: VllmOption = None,
    vllm_keywords: VllmKeywordsOption = None,
    files: FilesOption = None,
    file_layers: FileLayersOption = None,
    seq_length: LengthOption = 2048,
    dtype: Annotated[str, typer.Option("--dtype", help="What the verifier computes in.")] = "auto",
    store_dtype: Annotated[str, typer.Option("--store-dtype", help="bfloat16, float16 or float32.")] = "bfloat16",
    aux_dtype: AuxOption = None,
    batch_tokens: BatchOption = 4096,
    shard_mib: Annotated[int, typer.Option("--shard-mib", min=1, help="Size of a shard.")] = 256,
    skip_failed: SkipOption = False,
    verify: VerifyOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Store a verifier's hidden states of prepared rows; a rerun continues where the last one ended.

    Under torchrun or accelerate launch each process writes its share of the shards.
    """
    from speculators.errors import UsageError
    from speculators.extract.run import extract_share
    from speculators.extract.sourcing import ExtractOptions, SourceName, launched_device, launched_share
    from speculators.extract.verify import verify_store
    from speculators.extract.vllm_engine import VllmOptions

    if output is None:
        raise UsageError("--out is missing: the store to write, or to verify")
    if verify:
        say(f"{output}: {verify_store(output)}")
        return
    if model is None or data is None:
        raise UsageError(f"--{'verifier' if model is None else 'data'} is missing")
    share = launched_share(os.environ)
    stated = None if file_layers is None else tuple(_layer_ids(file_layers))
    options = ExtractOptions(
        source=cast(SourceName, source),
        server=_servers(endpoint, served_model, concurrency, stated),
        vllm=VllmOptions(python=vllm_python, keywords=json_object(vllm_keywords, "--vllm-keywords")),
        files=files,
        file_layer_ids=stated,
        skip_failed=skip_failed,
        share=share,
        dtype=dtype,
        store_dtype=store_dtype,
        aux_dtype=aux_dtype,
        batch_tokens=batch_tokens,
        shard_bytes=shard_mib * 2**20,
        device=launched_device(os.environ),
        trust_remote_code=trust_remote_code,
    )
    chosen = _usual_layer_ids(model, speculator_type) if layers is None else _layer_ids(layers)
    prepared = _prepared(model, data, output, seq_length, alone=share.world_size == 1)
    result = extract_share(model, prepared, output, chosen, options, announce=_announce(output, share))
    _tell_store(output, result)


def sweep(
    folder: Annotated[Path, typer.Argument(help="Where an extraction's per-request files go.")],
    ttl: Annotated[float, typer.Option("--ttl", min=0, help="Seconds; what is younger stays.")] = 3600.0,
    files_too: Annotated[bool, typer.Option("--files-too", help="Remove uncollected files too.")] = False,
) -> None:
    """Remove locks that nobody holds, and temporary files of writers that died."""
    from speculators.formats.hidden_states import sweep as sweep_folder

    removed = sweep_folder(folder, ttl, files_too=files_too)
    say(f"{folder}: removed {removed.locks} locks, {removed.partial_files} partial files, {removed.files} files")


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


def _announce(output: Path, share: "WorkShare") -> Callable[["StoreEstimate"], None]:
    def tell(estimate: "StoreEstimate") -> None:
        if share.rank == 0:
            say(f"{output}: {estimate}")

    return tell


def _tell_store(output: Path, result: "FillResult") -> None:
    from speculators.extract.store import Manifest

    manifest = Manifest.read(output)
    rows, found = manifest.num_rows, sum(shard.rows for shard in manifest.shards.values())
    layers = ", ".join(str(one) for one in manifest.identity.layer_ids)
    left = "" if found == rows else f"; {rows - found} rows are left to other processes"
    say(f"{output}: {found} rows, layers {layers} ({result}){left}")


def _servers(
    endpoints: list[str] | None, model: str | None, concurrency: int, layer_ids: tuple[int, ...] | None
) -> "ServerOptions | None":
    from speculators.extract.remote import ServerOptions

    if not endpoints:
        return None
    return ServerOptions(tuple(endpoints), model, concurrency=concurrency, server_layer_ids=layer_ids)


def _prepared(model: str, data: str, output: Path, seq_length: int, *, alone: bool) -> Path:
    """The prepared folder; conversations are prepared into the store's folder first."""
    from speculators.errors import UsageError
    from speculators.extract.prepared import MANIFEST
    from speculators.extract.run import PrepareOptions, prepare

    if Path(data, MANIFEST).is_file():
        return Path(data)
    if not alone:
        raise UsageError(f"--data {data} is not prepared; run prepare-data before several processes share the work")
    return prepare(model, data, output / "prepared", PrepareOptions(max_length=seq_length)).directory
