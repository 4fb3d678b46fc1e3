"""Where per-request files go: the options of vLLM's hidden-states connector, and the paths that they allow."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from speculators.errors import EngineError, RequestError
from speculators.formats.hidden_states_lock import LOCK, MARKER, PARTIAL

logger = logging.getLogger(__name__)

ROLE = "kv_producer"
# Where vLLM looks, in the configuration of the draft, for the layers whose states it keeps.
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# File systems allow 255 bytes; the temporary name and the lock's are longer than the file's own.
_MAX_NAME_BYTES = 220
_MAX_ID_CHARACTERS = 160
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class HiddenStatesOptions:
    """The options of a writer; names and defaults are those of vLLM's connector.

    `allowed_save_roots`, which vLLM does not have, are the folders that a client's `hidden_states_path` must stay under
    where `allow_custom_save_path` lets it have one; left out, it is the shared path. vLLM lets it be anywhere. Raises
    EngineError for values of another kind.
    """

    shared_storage_path: str = "/tmp"
    allow_custom_save_path: bool = False
    allowed_save_roots: Sequence[str | os.PathLike[str]] | None = None
    num_writer_threads: int = 8
    use_synchronization_lock: bool = True

    def __post_init__(self) -> None:
        shared = self.shared_storage_path
        if not isinstance(shared, str | os.PathLike) or not str(shared) or "\0" in str(shared):
            raise EngineError(f"shared_storage_path is {shared!r}, expected a folder")
        for name in ("allow_custom_save_path", "use_synchronization_lock"):
            if not isinstance(getattr(self, name), bool):
                raise EngineError(f"{name} is {getattr(self, name)!r}, expected true or false")
        if type(self.num_writer_threads) is not int or self.num_writer_threads < 1:
            raise EngineError(f"num_writer_threads is {self.num_writer_threads!r}, expected 1 or more")
        roots = self.allowed_save_roots
        if roots is not None:
            if isinstance(roots, str) or not roots or not all(isinstance(root, str | os.PathLike) for root in roots):
                raise EngineError(f"allowed_save_roots is {roots!r}, expected a list of folders")
            object.__setattr__(self, "allowed_save_roots", tuple(str(root) for root in roots))
        object.__setattr__(self, "shared_storage_path", str(shared))

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """The options of a `kv_connector_extra_config`; EngineError names an unknown one."""
        names = [item.name for item in fields(cls)]
        unknown = sorted(str(key) for key in given if key not in names)
        if unknown:
            raise EngineError(
                f"kv_connector_extra_config: unknown {', '.join(unknown)}; expected any of {', '.join(names)}"
            )
        return cls(**given)

    def path_for(self, request_id: str, hidden_states_path: str | None = None) -> Path:
        """Where a request's file goes: `{request_id}.safetensors` under the shared path, or where its client wants it.

        A client's path is ignored, with a warning, unless `allow_custom_save_path`; a relative one starts at the shared
        path. RequestError where it leads out of the allowed roots, links followed, or cannot be a file's.
        """
        default = Path(self.shared_storage_path, f"{safe_name(request_id)}.safetensors")
        if hidden_states_path is None:
            return default
        if not self.allow_custom_save_path:
            logger.warning(
                "request %s: hidden_states_path is ignored, since allow_custom_save_path is off; its file is %s",
                request_id,
                default,
            )
            return default
        if not _may_be_path(hidden_states_path):
            raise RequestError(f"hidden_states_path is {hidden_states_path!r}, expected the path of a file")
        path = Path(os.path.realpath(os.path.join(self.shared_storage_path, hidden_states_path)))
        roots = [Path(os.path.realpath(root)) for root in self.allowed_save_roots or (self.shared_storage_path,)]
        if not any(root in path.parents for root in roots):
            raise RequestError(
                f"hidden_states_path {hidden_states_path!r} leads to {path}, expected a file below "
                f"{' or '.join(map(str, roots))}"
            )
        if hidden_states_path.endswith("/") or os.path.isdir(path):
            raise RequestError(f"hidden_states_path {hidden_states_path!r} is a folder, expected a file")
        if len(os.fsencode(path.name)) > _MAX_NAME_BYTES or path.name.endswith((LOCK, MARKER, PARTIAL)):
            raise RequestError(
                f"hidden_states_path {hidden_states_path!r}: expected a name of at most {_MAX_NAME_BYTES} bytes that "
                f"does not end in {LOCK}, {MARKER} or {PARTIAL}"
            )
        return path


def parse_transfer_config(config: object) -> HiddenStatesOptions:
    """The writer's options in a `kv_transfer_config`, given as a mapping or as an object with the same attributes.

    EngineError where the role is not `kv_producer`, or an option in `kv_connector_extra_config` is unknown or wrong.
    """
    if isinstance(config, Mapping):
        role, extra = config.get("kv_role"), config.get("kv_connector_extra_config")
    else:
        role, extra = getattr(config, "kv_role", None), getattr(config, "kv_connector_extra_config", None)
    if role != ROLE:
        raise EngineError(f"kv_transfer_config: kv_role is {role!r}, expected {ROLE!r}: hidden states are only written")
    if extra is not None and not isinstance(extra, Mapping):
        raise EngineError(f"kv_transfer_config: kv_connector_extra_config is {extra!r}, expected a mapping")
    return HiddenStatesOptions.from_mapping(extra or {})


def _may_be_path(given: object) -> bool:
    try:
        return isinstance(given, str) and given != "" and b"\0" not in os.fsencode(given)
    except UnicodeEncodeError:
        return False


def safe_name(request_id: str) -> str:
    """A request's id as a file name: itself where it is one, else its safe characters and a hash to tell it apart."""
    kept = _UNSAFE.sub("_", request_id)[:_MAX_ID_CHARACTERS].lstrip(".")
    if kept == request_id and kept:
        return kept
    digest = hashlib.sha256(request_id.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{kept}-{digest}" if kept else digest
