"""Keywords of vLLM's engine that this one answers by itself: those whose values are true of it, or change no token."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from speculators.errors import EngineError
from speculators.runtime.schema import Anything, Flag, Key, Whole, nearest

logger = logging.getLogger(__name__)

# Keywords that `LLM` takes and acts on by itself.
TAKEN = frozenset(
    {
        "model",
        "tokenizer",
        "speculative_config",
        "dtype",
        "seed",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_prefix_caching",
        "trust_remote_code",
        "revision",
        "gpu_memory_utilization",
        "device",
        "per_request_spec_decode_metrics",
        "kv_transfer_config",
        "additional_config",
    }
)
# What vLLM's compilation may be told that changes how fast it computes, not what.
_COMPILATION = ("level", "mode", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
_ONE_DEVICE = "it runs in one process, on one device"
_AS_STORED = "weights are computed with as they are stored, in one dtype"
_NO_MEMORY_ELSEWHERE = "weights, keys and values stay on the device"


@dataclass(frozen=True)
class Compilation:
    """How vLLM captures and compiles: a level, or a mapping of keys that change no token."""

    expected: ClassVar[str] = f"a whole number, or an object with keys of {', '.join(_COMPILATION)}"

    def read(self, value: object) -> object:
        """The value."""
        if isinstance(value, Mapping):
            wrong = [name for name in value if name not in _COMPILATION]
            if wrong:
                raise ValueError(f"it has {wrong[0]!r}")
        elif isinstance(value, bool) or not isinstance(value, int):
            raise ValueError
        return value


KEYWORDS: Mapping[str, Key] = {
    "enforce_eager": Key(Flag(), "neutral", "everything runs eagerly; graphs would change no token"),
    "enable_chunked_prefill": Key(Flag(), "refused", "long prompts are always computed in pieces", honoured=(True,)),
    "enable_prompt_tokens_details": Key(Flag(), "refused", "an answer tells what was cached", honoured=(True,)),
    "async_scheduling": Key(Flag(), "refused", "a step starts when the one before it has ended", honoured=(False,)),
    "disable_log_stats": Key(Flag(), "neutral", "counts are kept, and logged by who asks for them"),
    "distributed_executor_backend": Key(Anything(), "refused", _ONE_DEVICE, honoured=("uni", "mp")),
    "tensor_parallel_size": Key(Whole(1), "refused", _ONE_DEVICE, honoured=(1,)),
    "pipeline_parallel_size": Key(Whole(1), "refused", _ONE_DEVICE, honoured=(1,)),
    "data_parallel_size": Key(Whole(1), "refused", _ONE_DEVICE, honoured=(1,)),
    "enable_expert_parallel": Key(Flag(), "refused", _ONE_DEVICE, honoured=(False,)),
    "compilation_config": Key(Compilation(), "neutral", "nothing is captured or compiled, which changes no token"),
    "quantization": Key(Anything(), "refused", _AS_STORED, honoured=()),
    "kv_cache_dtype": Key(Anything(), "refused", _AS_STORED, honoured=("auto",)),
    "swap_space": Key(Anything(), "refused", _NO_MEMORY_ELSEWHERE, honoured=(0,)),
    "cpu_offload_gb": Key(Anything(), "refused", _NO_MEMORY_ELSEWHERE, honoured=(0,)),
    "enable_lora": Key(Flag(), "refused", "a verifier is served as it is", honoured=(False,)),
    "skip_tokenizer_init": Key(Flag(), "refused", "the tokenizer is read with the verifier", honoured=(False,)),
    "tokenizer_mode": Key(Anything(), "refused", "the verifier's own tokenizer is used", honoured=("auto",)),
    "load_format": Key(Anything(), "refused", "weights are read from safetensors", honoured=("auto", "safetensors")),
    "hf_overrides": Key(Anything(), "refused", "a model is what its config.json says", honoured=({},)),
    "block_size": Key(Whole(1), "refused", "the cache has a row a request, no blocks", honoured=()),
}


def check_engine_keywords(given: Mapping[str, object]) -> None:
    """Accept engine keywords whose value is already true of this engine; EngineError names any other."""
    for name, value in given.items():
        if name not in KEYWORDS:
            raise EngineError(f"LLM: unknown key {name!r}{nearest(name, [*KEYWORDS, *TAKEN])}")
        description = KEYWORDS[name]
        description.read("LLM", name, value)
        if isinstance(description.kind, Compilation) and value:
            logger.warning("LLM: %s=%r has no effect: %s", name, value, description.about)
