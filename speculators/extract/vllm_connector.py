"""A KV connector for vLLM that writes hidden states to per-request files, on a CPU or a GPU.

vLLM's method `extract_hidden_states` keeps the states of the asked layers in the paged cache of a layer that does
nothing else. When a request ends, its rows are copied out of that cache and written by HiddenStatesWriter; its blocks
are kept until they are copied. vLLM is given `kv_connector="SpeculatorsHiddenStatesConnector"`,
`kv_connector_module_path="speculators.extract.vllm_connector"` (not needed where this package is installed beside it),
`kv_role="kv_producer"`, and the options of HiddenStatesOptions as `kv_connector_extra_config`.

This module is imported by vLLM's processes, whose environment need not hold more of this package than it imports.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec
from vllm.v1.request import RequestStatus

from speculators.errors import EngineError, RequestError, SpeculatorsError, StoreError
from speculators.extract.paged_states import CopiedRows, PagedStates, Rows
from speculators.formats.hidden_states import (
    HiddenStatesOptions,
    HiddenStatesWriter,
    WriteFuture,
    parse_transfer_config,
)
from speculators.formats.hidden_states_options import LAYER_IDS

# vLLM shows what its own loggers say.
logger = logging.getLogger(f"vllm.{__name__}")

METHOD = "extract_hidden_states"
_UNWANTED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED, RequestStatus.FINISHED_ERROR)


@dataclass
class Save:
    """A request that has ended: its file, the ids of the rows to write, and the blocks that hold them."""

    request_id: str
    path: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM's bases are untyped
    """What the scheduler tells the worker: files of new requests, rows this step captures, requests that have ended."""

    files: dict[str, str] = field(default_factory=dict)
    computing: list[Rows] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


class SchedulerSide:
    """Chooses the files, and follows each request's blocks to its end."""

    def __init__(self, options: HiddenStatesOptions, group: int, block_size: int) -> None:
        self._options = options
        self._group = group
        self._block_size = block_size
        self._files: dict[str, Path | SpeculatorsError] = {}
        self._blocks: dict[str, list[int]] = {}
        self._saves: list[Save] = []

    def step(self, scheduled: Any) -> StepMetadata:
        """What the worker has to know of a step; a path that may not be is told to its client at the end."""
        metadata = StepMetadata(saves=self._saves)
        self._saves = []
        for request in scheduled.scheduled_new_reqs:
            name = request.req_id
            # A request that was preempted comes again as a new one in some versions.
            if name not in self._files:
                self._choose(name, request.sampling_params, metadata)
            self._blocks[name] = list(request.block_ids[self._group])
            self._note(metadata, name, request.num_computed_tokens, scheduled)
        cached = scheduled.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            added = [] if blocks is None else list(blocks[self._group])
            known = [] if name in cached.resumed_req_ids else self._blocks.get(name, [])
            self._blocks[name] = known + added
            self._note(metadata, name, computed, scheduled)
        return metadata

    def finish(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """What vLLM does with a finished request's blocks, and what its client is told."""
        name = request.request_id
        file = self._files.pop(name, None)
        self._blocks.pop(name, None)
        if file is None or request.status in _UNWANTED:
            return False, None
        asked = request.kv_transfer_params or {}
        if isinstance(file, SpeculatorsError):
            return False, {"hidden_states_path": None, "hidden_states_error": str(file)}
        if request.prompt_token_ids is None:
            text = "a prompt of embeddings has no token ids to store beside its states; send token ids"
            return False, {"hidden_states_path": None, "hidden_states_error": text}
        # The last token was never an input, so that it has no states.
        ids = list(request.all_token_ids)[:-1] if asked.get("include_output_tokens") else request.prompt_token_ids
        self._saves.append(Save(name, str(file), list(ids), list(block_ids)))
        return True, {"hidden_states_path": str(file)}

    def _choose(self, name: str, sampling: Any, metadata: StepMetadata) -> None:
        extra = (sampling.extra_args if sampling is not None else None) or {}
        asked = extra.get("kv_transfer_params") or {}
        wanted = asked.get("hidden_states_path") if isinstance(asked, Mapping) else None
        try:
            path = self._options.path_for(name, wanted)
            if path in self._files.values():
                raise RequestError(f"{path} is the file of another request under way; give another hidden_states_path")
        except SpeculatorsError as error:
            logger.warning("request %s: %s", name, error)
            self._files[name] = error
            return
        self._files[name] = path
        metadata.files[name] = str(path)

    def _note(self, metadata: StepMetadata, name: str, computed: int, scheduled: Any) -> None:
        count = scheduled.num_scheduled_tokens[name]
        first, offset = divmod(computed, self._block_size)
        last = (computed + count - 1) // self._block_size
        metadata.computing.append(Rows(self._blocks[name][first : last + 1], offset, count))


class WorkerSide:
    """Locks the files, copies rows out of the cache, and writes them."""

    def __init__(self, options: HiddenStatesOptions, layer_ids: tuple[int, ...]) -> None:
        self._layer_ids = layer_ids
        self._writer = HiddenStatesWriter.from_options(options)
        self._writer.require_writable()
        self._states: PagedStates | None = None
        self._claimed: dict[str, Path] = {}
        self._copies: dict[str, CopiedRows | None] = {}
        self._finished: set[str] = set()

    def attach(self, cache_NASH: Tensor, block_size: int) -> None:
        """Take the cache; from here on this worker is the one that writes."""
        if cache_NASH.shape[1] != len(self._layer_ids):
            raise EngineError(f"vLLM keeps {cache_NASH.shape[1]} states a token for layers {list(self._layer_ids)}")
        self._states = PagedStates(cache_NASH, block_size)

    def begin(self, metadata: StepMetadata) -> None:
        """Lock the files of new requests, whose names nobody knows yet, and mark the rows that are to come."""
        if self._states is None:
            return
        for name, file in metadata.files.items():
            path = Path(file)
            try:
                self._writer.claim(path)
            except SpeculatorsError as error:
                logger.error("request %s: %s", name, error)
                continue
            self._claimed[name] = path
        self._states.mark(metadata.computing)

    def end(self, metadata: StepMetadata | None, finished: set[str]) -> set[str] | None:
        """Begin to copy what has ended; the requests whose blocks are free again, None where there are none."""
        if self._states is None:
            return None
        for save in metadata.saves if metadata is not None else []:
            self._copies[save.request_id] = self._save(save, self._states)
        self._finished |= finished
        freed = set()
        for name in sorted(self._finished):
            if name in self._copies:
                copied = self._copies[name]
                if copied is not None and not copied.done:
                    continue
                del self._copies[name]
                freed.add(name)
            elif name in self._claimed:
                self._writer.release(self._claimed.pop(name))
            self._finished.discard(name)
        return freed or None

    def close(self) -> None:
        """Write what is queued; failures were logged, and told to readers, when they happened."""
        self._writer.close()

    def _save(self, save: Save, states: PagedStates) -> CopiedRows | None:
        path = self._claimed.pop(save.request_id, None)
        if path is None:
            # Its lock could not be had, which was logged then.
            return None
        try:
            copied = states.copy(save.block_ids, len(save.token_ids))
            ids_T = torch.tensor(save.token_ids, dtype=torch.int64)
            future = self._writer.submit(path, copied.states_TAH, ids_T, self._layer_ids, copied.wait)
        except StoreError as error:
            logger.error("request %s: %s", save.request_id, error)
            self._writer.fail(path, error)
            return None
        future.add_done_callback(partial(_log_failure, save.request_id))
        return copied


class SpeculatorsHiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM's bases are untyped
    """vLLM makes one in the scheduler's process and one in each worker, of which that of rank 0 writes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        options = parse_transfer_config(vllm_config.kv_transfer_config)
        layer_ids = asked_layers(vllm_config)
        self._group = states_group(kv_cache_config)
        self._block_size: int = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        is_scheduler = role == KVConnectorRole.SCHEDULER
        self._scheduler = SchedulerSide(options, self._group, self._block_size) if is_scheduler else None
        self._worker = None if is_scheduler else WorkerSide(options, layer_ids)
        logger.info("hidden states of layers %s go to %s", list(layer_ids), options.shared_storage_path)

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """None: this connector only stores."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing, for the same reason."""

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the worker has to know of a step."""
        assert self._scheduler is not None
        return self._scheduler.step(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep a request's blocks until they are copied, and tell its client the file."""
        assert self._scheduler is not None
        return self._scheduler.finish(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, where layers have several kinds of cache: only the group of the states matters."""
        return self.request_finished(request, block_ids[self._group] if self._group < len(block_ids) else [])

    def get_finished_count(self) -> int:
        """One worker reports, whatever the tensor parallelism: the one that writes."""
        return 1

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """A token's states beside each other."""
        return "LBNHC"

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the cache of the states; with tensor parallelism all workers have the same, and one writes it."""
        assert self._worker is not None
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if len(layers) != 1:
            raise EngineError(f"vLLM has {len(layers)} caches of hidden states, expected one")
        if get_tensor_model_parallel_rank() == 0:
            self._worker.attach(kv_caches[next(iter(layers))], self._block_size)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin a step, before its forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepMetadata):
            self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: this connector only stores."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing, for the same reason."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: rows are copied when their request has ended."""

    def wait_for_save(self) -> None:
        """Nothing: blocks are kept until they are copied."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Begin to copy what has ended, and say whose blocks are free again."""
        assert self._worker is not None
        bound = self._connector_metadata
        return self._worker.end(bound if isinstance(bound, StepMetadata) else None, finished_req_ids), None

    def shutdown(self) -> None:
        """Write what is queued."""
        if self._worker is not None:
            self._worker.close()


def asked_layers(vllm_config: Any) -> tuple[int, ...]:
    """The layers whose states vLLM keeps, in its order, which ascends; EngineError where the request makes no sense."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != METHOD:
        method = None if speculative is None else speculative.method
        raise EngineError(f"speculative_config's method is {method!r}; this connector needs {METHOD!r}")
    ids = getattr(speculative.draft_model_config.hf_config, LAYER_IDS, None) or []
    last = vllm_config.model_config.hf_text_config.num_hidden_layers
    if not ids or len(set(ids)) != len(ids) or not all(type(one) is int and 0 <= one <= last for one in ids):
        raise EngineError(f"{LAYER_IDS} is {ids}, expected distinct ids within 0..{last}")
    return tuple(sorted(ids))


def states_group(kv_cache_config: Any) -> int:
    """Which of vLLM's cache groups holds the states; EngineError where it has none of its own."""
    groups = kv_cache_config.kv_cache_groups
    found = [number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(found) == 1:
        return found[0]
    if not found and len(groups) == 1:
        return 0
    raise EngineError(
        f"{len(found)} of {len(groups)} cache groups hold hidden states, expected one of their own; verifiers with "
        "latent attention (MLA) cannot be extracted from in this version of vLLM"
    )


def _log_failure(request_id: str, future: Any) -> None:
    assert isinstance(future, WriteFuture)
    error = future.exception()
    if error is not None:
        logger.error("request %s: %s", request_id, error)
