"""Which source the hidden states of rows come from: a verifier in this process, servers, vLLM's engine, or files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from speculators.errors import UsageError
from speculators.extract.filling import StatesSource
from speculators.extract.folder import FolderSource
from speculators.extract.local import LocalSource
from speculators.extract.manifest import StoreIdentity
from speculators.extract.prepared import PreparedData
from speculators.extract.remote import ServerOptions, ServerSource
from speculators.extract.store import DEFAULT_SHARD_BYTES, WorkShare
from speculators.extract.vllm_engine import VllmOptions, VllmSource
from speculators.runtime.verifier import Verifier

SourceName = Literal["local", "server", "vllm", "files"]


@dataclass(frozen=True)
class ExtractOptions:
    """How hidden states are computed and stored.

    `dtype` is what the verifier computes in, `store_dtype` what is written, `aux_dtype` what all layers but the last
    are quantised to (`int8`, `float8_e4m3fn`); a pass takes `batch_tokens` tokens, and a shard about
    `shard_bytes` bytes. `source` is the verifier in this process ("local"), the servers of `server`, an engine of
    "vllm", or the per-request "files" below the folder `files`, whose layers are `file_layer_ids` where they do not
    say. `skip_failed` leaves out rows that no states can be had for; `share` is this process's part of the work.
    """

    source: SourceName = "local"
    server: ServerOptions | None = None
    vllm: VllmOptions = field(default_factory=VllmOptions)
    files: Path | None = None
    file_layer_ids: tuple[int, ...] | None = None
    skip_failed: bool = False
    share: WorkShare = field(default_factory=WorkShare)
    dtype: str = "auto"
    store_dtype: str = "bfloat16"
    aux_dtype: str | None = None
    batch_tokens: int = 4096
    shard_bytes: int = DEFAULT_SHARD_BYTES
    device: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.source not in get_args(SourceName):
            raise UsageError(f"source {self.source!r}: expected one of {', '.join(get_args(SourceName))}")
        if self.source == "server" and self.server is None:
            raise UsageError("source server needs endpoints like http://127.0.0.1:8000/v1")
        if self.source == "files" and self.files is None:
            raise UsageError("source files needs the folder of per-request files")


def open_source(
    verifier: str | Path,
    data: PreparedData,
    identity: StoreIdentity,
    options: ExtractOptions,
    opened: ExitStack,
    *,
    progress: bool = True,
) -> StatesSource:
    """The source that the options name, of states of `identity.layer_ids`; `opened` closes it."""
    if options.server is not None and options.source == "server":
        return opened.enter_context(ServerSource(options.server, identity.layer_ids))
    if options.source == "vllm":
        chosen = {"dtype": options.dtype, "trust_remote_code": options.trust_remote_code, **options.vllm.keywords}
        engine = replace(options.vllm, keywords=chosen)
        return opened.enter_context(VllmSource(verifier, identity.layer_ids, max(data.lengths), engine))
    if options.files is not None and options.source == "files":
        stated = options.file_layer_ids
        return FolderSource(options.files, identity.layer_ids, file_layer_ids=stated, progress=progress)
    model = Verifier.from_pretrained(
        verifier, dtype=options.dtype, device=options.device, trust_remote_code=options.trust_remote_code
    )
    return LocalSource(model, identity, batch_tokens=options.batch_tokens)


def launched_share(environment: Mapping[str, str]) -> WorkShare:
    """This process's part of the work, by the environment that a launcher of several processes made."""
    return WorkShare(int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1")))


def launched_device(environment: Mapping[str, str]) -> str | None:
    """This process's own accelerator among several processes; None for whatever there is."""
    if launched_share(environment).world_size == 1 or not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    return None if kind is None else f"{kind.type}:{environment.get('LOCAL_RANK', '0')}"
