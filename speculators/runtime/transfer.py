"""Where extracted hidden states go: `kv_transfer_config`, as vLLM knows it."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from speculators.errors import EngineError

# vLLM's connector and this project's connector for vLLM: inside this runtime both mean the same files.
CONNECTORS = ("ExampleHiddenStatesConnector", "SpeculatorsHiddenStatesConnector")
# Keys of vLLM's schema that have one meaning here: the values that are already true.
_TRUE: dict[str, tuple[object, ...]] = {"kv_rank": (None, 0), "kv_parallel_size": (1,)}
# Names of things that change no file.
_LABELS = frozenset({"engine_id", "kv_connector_module_path"})


@dataclass(frozen=True)
class KVTransferConfig:
    """Which connector takes the hidden states, in which role, and its options; field names are vLLM's.

    `kv_connector_extra_config` takes `shared_storage_path`, `allow_custom_save_path`, `allowed_save_roots`,
    `num_writer_threads` and `use_synchronization_lock`.
    """

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None

    @classmethod
    def from_user(cls, given: "Mapping[str, Any] | KVTransferConfig") -> "KVTransferConfig":
        """Check what a user gave; EngineError names the key that is unknown or cannot be honoured.

        Role and options are checked where the writer reads them.
        """
        if not isinstance(given, KVTransferConfig | Mapping):
            raise EngineError(f"kv_transfer_config is {given!r}, expected a dict or a KVTransferConfig")
        if isinstance(given, Mapping):
            own = {item.name for item in fields(cls)}
            for key, value in given.items():
                if key in _TRUE and value not in _TRUE[key]:
                    raise EngineError(f"kv_transfer_config: {key}={value!r} cannot be honoured; expected {_TRUE[key]}")
                if key not in own and key not in _TRUE and key not in _LABELS:
                    near = difflib.get_close_matches(str(key), own, n=1)
                    hint = f"; did you mean {near[0]}?" if near else ""
                    raise EngineError(f"kv_transfer_config: unknown key {key!r}{hint}")
            given = cls(**{key: value for key, value in given.items() if key in own})
        if given.kv_connector not in CONNECTORS:
            raise EngineError(
                f"kv_transfer_config: kv_connector={given.kv_connector!r}, expected one of {', '.join(CONNECTORS)}"
            )
        return given
