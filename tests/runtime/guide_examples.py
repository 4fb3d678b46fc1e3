"""Every `speculative_config` of vLLM's and vLLM-Ascend's guides to speculative decoding, names replaced.

`VERIFIER` stands for the model that is served and `DRAFT` for what drafts. `serve` marks examples of the command line,
the others are of `LLM`. `refused` is why this engine does not take an example as it is written, a pattern of the error.
"""

from dataclasses import dataclass, field
from typing import Any

VERIFIER, DRAFT = "{verifier}", "{draft}"

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_EXTRACTION: dict[str, Any] = {"method": "extract_hidden_states", "num_speculative_tokens": 1}


@dataclass(frozen=True)
class Example:
    name: str
    speculative_config: dict[str, Any] | None = None
    additional_config: dict[str, Any] | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    extracts_to: bool = False
    serve: bool = False
    refused: str | None = None


def extraction(*layers: int) -> dict[str, Any]:
    return {**_EXTRACTION, "draft_model_config": {"hf_config": {_LAYERS: list(layers)}}}


def ranges(*triples: tuple[int, int, int]) -> list[list[int]]:
    return [list(one) for one in triples]


THREE = ranges((1, 64, 3), (65, 128, 1), (129, 512, 0))
FIVE = ranges((1, 16, 5), (17, 32, 4), (33, 64, 3), (65, 128, 1), (129, 512, 0))
PARD = {"model": DRAFT, "num_speculative_tokens": 12, "method": "draft_model", "parallel_drafting": True}
MODEL = {"model": DRAFT, "num_speculative_tokens": 5, "method": "draft_model"}
MTP = {"method": "mtp", "num_speculative_tokens": 1}
GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY"}
BLOCK = {
    "distributed_executor_backend": "mp",
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.8,
    "enable_prefix_caching": False,
    "compilation_config": GRAPHS,
}
EAGLE_2 = {"method": "eagle", "model": DRAFT, "draft_tensor_parallel_size": 1, "num_speculative_tokens": 2}
DSPARK_7 = {"method": "dspark", "model": DRAFT, "num_speculative_tokens": 7}
SYNTHETIC = {
    "method": "eagle3",
    "model": DRAFT,
    "num_speculative_tokens": 3,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.9, 0.6, 0.3],
}
SUFFIX = {
    "method": "suffix",
    "num_speculative_tokens": 8,
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_cached_requests": 10000,
    "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_min_token_prob": 0.1,
}
BATCH_EAGLE = {
    "method": "eagle",
    "model": DRAFT,
    "num_speculative_tokens": 3,
    "num_speculative_tokens_per_batch_size": THREE,
}
BATCH_EAGLE3 = {
    "method": "eagle3",
    "model": DRAFT,
    "num_speculative_tokens": 3,
    "num_speculative_tokens_per_batch_size": FIVE,
}
LOSSY = {
    "rejection_sampler_config": {
        "enable_block_verify": True,
        "enable_entropy_verify": True,
        "posterior_threshold": 0.95,
        "posterior_alpha": 0.4,
    }
}
ONE_DEVICE = "tensor_parallel_size=.* cannot be honoured by this engine: it runs in one process, on one device"

VLLM = [
    Example("draft model", MODEL, engine={"tensor_parallel_size": 1}),
    Example("draft model, served", MODEL, serve=True),
    Example("eagle", EAGLE_2, engine={"tensor_parallel_size": 4}, refused=ONE_DEVICE),
    Example(
        "eagle3",
        {"model": DRAFT, "draft_tensor_parallel_size": 2, "num_speculative_tokens": 2, "method": "eagle3"},
        refused="draft_tensor_parallel_size=2 cannot be honoured .* it runs with draft_tensor_parallel_size=None or 1",
    ),
    Example("mtp", MTP, engine={"tensor_parallel_size": 1}),
    Example("mtp, served", MTP, serve=True),
    Example(
        "gemma 4 assistant",
        {"method": "mtp", "model": DRAFT, "num_speculative_tokens": 1},
        engine={"max_model_len": 8192},
        serve=True,
    ),
    Example("pard", PARD, engine={"tensor_parallel_size": 1}),
    Example("pard, served", PARD, engine={"seed": 42, "max_model_len": 2048}, serve=True),
    Example("mlp speculator", {"model": DRAFT, "draft_tensor_parallel_size": 1, "method": "mlp_speculator"}),
    Example("ngram", {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}),
    Example("suffix", {"method": "suffix", "num_speculative_tokens": 32}),
    Example("extraction", extraction(1, 2, 3, 4), extracts_to=True),
    Example("extraction, served", extraction(1, 2, 3, 4), extracts_to=True, serve=True),
    Example("schema", MODEL, serve=True),
    Example(
        "ngram keys",
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
        serve=True,
    ),
    Example("suffix keys", SUFFIX, serve=True),
    Example(
        "two vocabularies",
        {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3, "use_heterogeneous_vocab": True},
        engine={"gpu_memory_utilization": 0.5},
    ),
    Example("per batch size", BATCH_EAGLE, serve=True),
    Example("per batch size, eagle3", BATCH_EAGLE3, serve=True),
    Example(
        "adaptive verification",
        {**DSPARK_7, "draft_sample_method": "probabilistic", "enable_adaptive_verification": True},
        engine={"tokenizer_mode": "deepseek_v4", "trust_remote_code": True},
        serve=True,
        refused="tokenizer_mode='deepseek_v4' cannot be honoured by this engine: the verifier's own tokenizer is used",
    ),
    Example(
        "custom class",
        {"method": "custom_class", "model": "your_module.YourCustomProposerClass", "num_speculative_tokens": 3},
    ),
]

ASCEND = [
    Example("eagle3", {"method": "eagle3", "model": DRAFT, "num_speculative_tokens": 3}),
    Example("eagle3, served", {"method": "eagle3", "model": DRAFT, "num_speculative_tokens": 3}, serve=True),
    Example("ngram", {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}),
    Example(
        "eagle",
        EAGLE_2,
        engine={"tensor_parallel_size": 4, "distributed_executor_backend": "mp", "enforce_eager": True},
        refused=ONE_DEVICE,
    ),
    Example("eagle, served", EAGLE_2, engine={"tensor_parallel_size": 4}, serve=True, refused=ONE_DEVICE),
    Example(
        "mtp",
        {"method": "mtp", "num_speculative_tokens": 2, "disable_padded_drafter_batch": False},
        engine={"tensor_parallel_size": 16, "enable_expert_parallel": True, "quantization": "ascend"},
        refused=ONE_DEVICE,
    ),
    Example(
        "mtp, served",
        {"num_speculative_tokens": 2, "method": "mtp", "disable_padded_drafter_batch": False},
        engine={"data_parallel_size": 1, "tensor_parallel_size": 16, "quantization": "ascend"},
        serve=True,
        refused=ONE_DEVICE,
    ),
    Example("dflash", {"method": "dflash", "model": DRAFT, "num_speculative_tokens": 7}, engine=BLOCK),
    Example("dflash, served", {"method": "dflash", "model": DRAFT, "num_speculative_tokens": 7}, serve=True),
    Example("dspark", {**DSPARK_7, "enforce_eager": True}, engine=BLOCK),
    Example("dspark, served", {**DSPARK_7, "enforce_eager": True}, serve=True),
    Example("adaptive verification", {**DSPARK_7, "enable_adaptive_verification": True}, serve=True),
    Example(
        "window, served",
        {**DSPARK_7, "enforce_eager": True},
        {"draft_window_size": 2048},
        engine={"tensor_parallel_size": 8, "compilation_config": GRAPHS},
        serve=True,
        refused=ONE_DEVICE,
    ),
    Example("window", {**DSPARK_7, "enforce_eager": True}, {"draft_window_size": 2048}),
    Example("suffix", {"method": "suffix", "num_speculative_tokens": 15}, engine={"enforce_eager": True}),
    Example("suffix, served", {"method": "suffix", "num_speculative_tokens": 15}, serve=True),
    Example("extraction", extraction(2, 18, 34), extracts_to=True),
    Example("extraction, served", extraction(2, 18, 34), extracts_to=True, serve=True),
    Example(
        "confidence",
        DSPARK_7,
        {
            "dynamic_spec_config": {
                "method": "dspark",
                "method_params": {
                    "initial_verify_budget_per_req": 5,
                    "budget_update_interval": 50,
                    "budget_threshold": 0.7,
                },
            }
        },
        engine={**BLOCK, "max_num_seqs": 8, "compilation_config": {"cudagraph_mode": "FULL"}},
    ),
    Example("per batch size", BATCH_EAGLE, serve=True),
    Example("per batch size, eagle3", BATCH_EAGLE3, serve=True),
    # The guide leaves the speculation out: a speculator is served.
    Example("lossy rules", {"num_speculative_tokens": 3}, LOSSY),
    Example("lossy rules, served", {"num_speculative_tokens": 3}, LOSSY, serve=True),
    Example("synthetic", SYNTHETIC),
    Example("synthetic, served", SYNTHETIC, serve=True),
]

# The guide to this format serves speculators without a word about speculation, and extracts states.
FORMAT = [
    Example("a speculator", None),
    Example("extraction", extraction(1, 2, 3, 4), extracts_to=True),
]

GUIDES = {"vllm": VLLM, "vllm-ascend": ASCEND, "speculators": FORMAT}
EXAMPLES = [(f"{guide}: {one.name}", one) for guide, examples in GUIDES.items() for one in examples]
