"""What the configuration of `accelerate launch` asks for, as it reaches a process: done, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from speculators.errors import UsageError
from speculators.train.config import ComputeDtype, Strategy, TrainConfig

# What is off says one of these.
_OFF = ("", "no", "false", "none")
_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed; use MULTI_GPU, or FSDP with fsdp_version 2",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM; use MULTI_GPU, or FSDP with fsdp_version 2",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config; use MULTI_GPU, or FSDP with fsdp_version 2",
    "ACCELERATE_DYNAMO_BACKEND": "compilation; leave dynamo_config out",
    _ACCUMULATION: "gradient accumulation; set train.accumulation instead",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient clipping; set train.clip_norm instead",
    "FSDP_OFFLOAD_PARAMS": "fsdp_offload_params; set it to false",
    "FSDP_ACTIVATION_CHECKPOINTING": "fsdp_activation_checkpointing; set it to false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "fsdp_activation_checkpointing_offload; set it to false",
}


def require_honoured(environment: Mapping[str, str]) -> None:
    """Raise UsageError, naming it, where the configuration asks for what this loop does not do."""
    for name, asked in _REFUSED.items():
        # A count of one pass is none that accumulates; of a switch, 1 is on, as is a gradient's norm of 1.
        off = (*_OFF, "1") if name == _ACCUMULATION else _OFF
        if environment.get(name, "").lower() not in off:
            raise UsageError(f"accelerate's configuration asks for {asked}")


def launched_strategy(strategy: Strategy, environment: Mapping[str, str]) -> Strategy:
    """How several processes hold a draft, "auto" being what the configuration says; UsageError for FSDP's version 1."""
    if strategy != "auto":
        return strategy
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return "ddp"
    version = environment.get("FSDP_VERSION", "1")
    if version != "2":
        raise UsageError(f"accelerate's configuration has fsdp_version {version}; expected 2 (torch's fully_shard)")
    return "fsdp2"


def launched_dtype(config: TrainConfig, environment: Mapping[str, str]) -> ComputeDtype:
    """The recipe's `compute_dtype`, "auto" being the configuration's where that has one; UsageError for both."""
    asked = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if asked == "no":
        return config.compute_dtype
    if asked != "bf16" or config.compute_dtype == "float32":
        raise UsageError(
            f"accelerate's configuration has mixed_precision {asked} and the recipe train.compute_dtype "
            f"{config.compute_dtype}; expected bf16 or no, and the two to agree"
        )
    return "bfloat16"
