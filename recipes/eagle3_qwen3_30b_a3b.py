"""EAGLE-3 for Qwen3-30B-A3B-Instruct-2507, a mixture of experts; the draft's own layer is dense.

    accelerate launch --config_file recipes/accelerate/gpu8_ddp.yaml recipes/eagle3_qwen3_30b_a3b.py [key=value ...]

The data are the verifier's own answers. vLLM writes them to where `data.train` looks:

    vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507 --tensor-parallel-size 8
    speculators regenerate-responses --endpoint http://127.0.0.1:8000/v1 \
        --data hf:HuggingFaceH4/ultrachat_200k:default:train_sft --output answers/qwen3_30b_a3b.jsonl \
        --max-tokens 2048

Its 61 GB of weights in every training process leave little room, so that the states come from vLLM's engine, over all
eight GPUs, before training; no prompts are decoded while it trains. Published for SpecForge's draft (SGLang, greedy,
batches of 8), 3 and 7 tokens in a chain: acceptance length 2.50 and 2.98 on MT-Bench, 3.35 and 5.12 on HumanEval,
2.64 and 3.15 on GSM8K.
"""

from speculators.models.eagle3.draft import Eagle3Draft
from speculators.models.eagle3.objective import Eagle3Objective
from speculators.train.config import TrainConfig
from speculators.train.quickstart import on_held_out_prompts
from speculators.train.recipe import DataConfig, ExtractConfig, Recipe, run

RECIPE = Recipe(
    name="eagle3_qwen3_30b_a3b",
    verifier="Qwen/Qwen3-30B-A3B-Instruct-2507",
    family="eagle3",
    draft=Eagle3Draft(draft_vocab_size=32_000, num_speculative_tokens=3),
    objective=Eagle3Objective(ttt_steps=7),
    data=DataConfig(train=("answers/qwen3_30b_a3b.jsonl",), max_length=4096, validation_rows=512),
    extract=ExtractConfig(source="vllm", vllm_keywords={"tensor_parallel_size": 8}, aux_dtype="int8"),
    train=TrainConfig(
        epochs=10,
        row_length=4096,
        accumulation=2,
        learning_rate=0.0001,
        warmup_ratio=0.015,
        schedule="linear",
        clip_norm=0.5,
        checkpoint_every=1000,
        measure_every=2000,
        measure_prompts=0,
    ),
    evaluate=on_held_out_prompts(limit=80, max_num_seqs=16),
)

if __name__ == "__main__":
    run(RECIPE)
