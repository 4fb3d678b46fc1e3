"""Tiny verifiers of several kinds, draft models near them, and what the engine makes of both."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerBase

from speculators.models.attention_interface import ATTENTION_NAME
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.proposers.proposer import Proposer
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.verifier_configs import SIZES, TINY

CONTEXT = 64
CONFIGS: Mapping[str, Any] = {
    "dense": lambda: LlamaConfig(**SIZES),
    "tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mixture of experts": TINY["qwen3_moe"],
    "sliding window": TINY["gemma3_text"],
}
# Mixed lengths, some of them repetitive; more than the largest batch.
PROMPTS = [[(3 + 7 * i + j * (i + 2)) % 61 + 3 for j in range(1 + (5 * i) % 17)] for i in range(12)] + [
    [5, 9, 5, 9, 5, 9, 5],
    [11, 12, 13, 11, 12, 13, 11, 12],
    [4],
    [40] * 9,
    [7, 8],
    [50, 51, 52],
]


def model_of(
    config: PreTrainedConfig,
    *,
    seed: int = 0,
    noise: float = 0.0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str = "random",
) -> Verifier:
    """A random float32 model; with `noise`, the model of the same seed with that much noise on every weight."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32)
    generator, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * drawn if "norm" in key else 0.25 * drawn)
            if noise:
                parameter.add_(noise * torch.randn(parameter.shape, generator=other))
    return Verifier(model, tokenizer, name_or_path=name)


def answers(
    verifier: Verifier,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    batch: int,
    max_model_len: int = CONTEXT,
) -> tuple[list[RequestOutput], Engine]:
    """What the engine answers to all prompts, `batch` of them at once, and the engine with its counts."""
    limits = EngineLimits(max_num_seqs=batch, max_model_len=max_model_len, max_num_batched_tokens=24)
    engine = Engine(verifier, proposer, limits=limits, metrics_level="summary")
    for i, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, wanted)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return [done[str(i)] for i in range(len(prompts))], engine


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The ids that each prompt was answered with."""
    return [output.outputs[0].token_ids for output in outputs]


def greedy_params(length: int = 14) -> list[SamplingParams]:
    """Greedy parameters for `PROMPTS`, whose answers end at different places."""
    return [
        SamplingParams(temperature=0, max_tokens=3 + (7 * i) % length, ignore_eos=True) for i in range(len(PROMPTS))
    ]
