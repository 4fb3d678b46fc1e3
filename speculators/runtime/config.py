"""What a user may ask of the runtime: `speculative_config` and the engine's keywords, honoured or refused by name."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from speculators.errors import EngineError
from speculators.formats.hidden_states_options import LAYER_IDS

# The methods of a speculator family; the one place where the runtime names them.
METHOD_OF_FAMILY = {
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "dflash": "dflash",
    "dflash2": "dflash",
    "dspark": "dspark",
    "mtp": "mtp",
    "eagle": "eagle",
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
}
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
# Drafts nothing: the states of these layers go to files instead.
EXTRACT_METHOD = "extract_hidden_states"

# Keys of vLLM's schema that this engine has one answer to: the values that are already true of it.
_SPECULATIVE_TRUE: dict[str, tuple[Any, ...]] = {
    "rejection_sample_method": ("standard",),
    "draft_tensor_parallel_size": (None, 1),
    "enforce_eager": (None, True, False),
    "disable_padded_drafter_batch": (False,),
    "parallel_drafting": (False,),
    "quantization": (None,),
    "moe_backend": (None, "auto"),
    "attention_backend": (None, "auto"),
    "kv_cache_dtype": (None, "auto"),
    "use_local_argmax_reduction": (False,),
    "use_heterogeneous_vocab": (False,),
    "enable_adaptive_verification": (False,),
    "num_speculative_tokens_per_batch_size": (None,),
    "prompt_lookup_max": (None,),
    "prompt_lookup_min": (None,),
    "synthetic_acceptance_rates": (None,),
    "synthetic_acceptance_length": (None,),
    "dspark_draft_topk": (None,),
    "index_share_for_mtp_iteration": (None,),
    "draft_load_config": (None,),
    "disable_eagle_block_drop": (False, True),
    "max_model_len": (None,),
    "code_revision": (None,),
    "suffix_decoding_max_tree_depth": (24,),
    "suffix_decoding_max_cached_requests": (10000,),
    "suffix_decoding_max_spec_factor": (1.0,),
    "suffix_decoding_min_token_prob": (0.1,),
}
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop")

_ENGINE_TRUE: dict[str, tuple[Any, ...]] = {
    "enforce_eager": (True, False),
    "enable_prefix_caching": (None, False),
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "distributed_executor_backend": (None, "uni"),
    "compilation_config": (None, 0, {}, {"level": 0}, {"mode": 0}),
    "additional_config": (None, {}),
    "quantization": (None,),
    "kv_cache_dtype": ("auto",),
    "swap_space": (0,),
    "cpu_offload_gb": (0,),
    "enable_lora": (False,),
    "enable_chunked_prefill": (None, True),
    "async_scheduling": (None, False),
    "skip_tokenizer_init": (False,),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto", "safetensors"),
    "hf_overrides": (None, {}),
    "disable_log_stats": (True, False),
    "block_size": (None,),
    "enable_expert_parallel": (False,),
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """The speculation asked for: `method`, the draft's `model`, K, and how drafts are sampled.

    None means that it follows from the draft's directory. `draft_model_config` belongs to method
    `extract_hidden_states`, which drafts nothing, and says whose states are kept: `{"hf_config":
    {"eagle_aux_hidden_state_layer_ids": [...]}}`.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    draft_sample_method: str = "greedy"
    revision: str | None = None
    draft_model_config: Mapping[str, Any] | None = None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Capture ids of `extract_hidden_states`, ascending and distinct; EngineError where they are none."""
        where = f"speculative_config: draft_model_config.hf_config.{LAYER_IDS}"
        given = _only(_only(self.draft_model_config, "draft_model_config", "hf_config"), "hf_config", LAYER_IDS)
        if not isinstance(given, list | tuple) or not given:
            raise EngineError(f"{where} is {given!r}, expected layer ids like [2, 15, 27, 30]")
        wrong = [one for one in given if isinstance(one, bool) or not isinstance(one, int) or one < 0]
        if wrong:
            raise EngineError(f"{where} has {wrong[0]!r}, expected whole numbers of at least 0")
        return tuple(sorted(set(given)))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "SpeculativeConfig":
        """Check a user's dict; EngineError names a key that is unknown, misplaced or cannot be honoured."""
        config = {str(key).replace("-", "_"): value for key, value in given.items()}
        own = {item.name for item in fields(cls)}
        for key, value in config.items():
            if key == "tensor_parallel_size":
                raise EngineError(
                    "speculative_config: tensor_parallel_size is not a valid key; the draft's is "
                    "draft_tensor_parallel_size"
                )
            if key in _SAMPLING_KEYS:
                raise EngineError(
                    f"speculative_config: {key} is a sampling parameter; give it with each request (SamplingParams)"
                )
            if key not in own:
                _require_true("speculative_config", key, value, _SPECULATIVE_TRUE, own)
        chosen = cls(**{key: value for key, value in config.items() if key in own})
        chosen._check()
        return chosen

    def _check(self) -> None:
        tokens = self.num_speculative_tokens
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
            raise EngineError(f"speculative_config: num_speculative_tokens={tokens!r}: expected a whole number above 0")
        if self.draft_sample_method not in DRAFT_SAMPLE_METHODS:
            raise EngineError(
                f"speculative_config: draft_sample_method={self.draft_sample_method!r}: expected one of "
                f"{', '.join(DRAFT_SAMPLE_METHODS)}"
            )
        if self.method == EXTRACT_METHOD:
            self._check_extraction()
        elif self.draft_model_config is not None:
            raise EngineError(
                f"speculative_config: draft_model_config is for method {EXTRACT_METHOD!r}, got method={self.method!r}; "
                "a draft's configuration comes from its directory"
            )
        methods = sorted({EXTRACT_METHOD, *METHOD_OF_FAMILY.values()})
        if self.method is not None and self.method not in methods:
            raise EngineError(
                f"speculative_config: method={self.method!r} is not supported by this runtime; it knows {methods}"
            )
        for name in ("model", "revision"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise EngineError(f"speculative_config: {name}={value!r}: expected a string")

    def _check_extraction(self) -> None:
        where = f"speculative_config: method {EXTRACT_METHOD!r} drafts nothing"
        if self.num_speculative_tokens not in (None, 1):
            raise EngineError(f"{where}: num_speculative_tokens={self.num_speculative_tokens}, expected 1")
        if self.model is not None:
            raise EngineError(f"{where}: model={self.model!r}, expected no model")
        if self.draft_sample_method != "greedy":
            raise EngineError(f"{where}: draft_sample_method={self.draft_sample_method!r}, expected greedy")
        _ = self.layer_ids


def check_engine_keywords(given: Mapping[str, Any]) -> None:
    """Accept engine keywords whose value is already true of this engine; EngineError names any other."""
    for key, value in given.items():
        _require_true("LLM", key, value, _ENGINE_TRUE, ENGINE_KEYWORDS)


# Keywords that `LLM` takes and acts on by itself.
ENGINE_KEYWORDS = frozenset(
    {
        "model",
        "tokenizer",
        "speculative_config",
        "dtype",
        "seed",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "trust_remote_code",
        "revision",
        "gpu_memory_utilization",
        "device",
        "per_request_spec_decode_metrics",
        "kv_transfer_config",
    }
)


def _require_true(
    where: str, key: str, value: object, table: Mapping[str, tuple[Any, ...]], others: Iterable[str]
) -> None:
    if key not in table:
        near = difflib.get_close_matches(key, [*table, *others], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise EngineError(f"{where}: unknown key {key!r}{hint}")
    if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in table[key]):
        allowed = " or ".join(repr(one) for one in table[key])
        raise EngineError(f"{where}: {key}={value!r} cannot be honoured by this engine; it runs with {key}={allowed}")


def _only(given: object, where: str, key: str) -> object:
    """The value of the one key that a mapping may have."""
    if not isinstance(given, Mapping):
        raise EngineError(f"speculative_config: {where} is {given!r}, expected {{{key!r}: ...}}")
    others = [name for name in given if name != key]
    if others or key not in given:
        got = ", ".join(repr(name) for name in given) or "nothing"
        raise EngineError(f"speculative_config: {where} has {got}; expected the key {key!r} alone")
    return given[key]
