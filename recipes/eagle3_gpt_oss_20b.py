"""EAGLE-3 for gpt-oss-20b, a mixture of experts with attention sinks; the draft's own layer is dense.

    accelerate launch --config_file recipes/accelerate/gpu8_ddp.yaml recipes/eagle3_gpt_oss_20b.py [key=value ...]

The data are the verifier's own answers. vLLM writes them to where `data.train` looks:

    vllm serve openai/gpt-oss-20b
    speculators regenerate-responses --endpoint http://127.0.0.1:8000/v1 \
        --data hf:HuggingFaceH4/ultrachat_200k:default:train_sft --output answers/gpt_oss_20b.jsonl \
        --max-tokens 2048

The states come from vLLM's engine, over all eight GPUs, before training; no prompts are decoded while it trains.
Published (temperature 1, 7 tokens): acceptance length 2.63 on MT-Bench, 2.43 on HumanEval and 3.00 on GSM8K for Red
Hat's draft, 3.20, 3.01 and 3.65 for Nebius's.
"""

from speculators.models.eagle3.draft import Eagle3Draft
from speculators.models.eagle3.objective import Eagle3Objective
from speculators.train.config import TrainConfig
from speculators.train.quickstart import on_held_out_prompts
from speculators.train.recipe import DataConfig, ExtractConfig, Recipe, run

RECIPE = Recipe(
    name="eagle3_gpt_oss_20b",
    verifier="openai/gpt-oss-20b",
    family="eagle3",
    draft=Eagle3Draft(draft_vocab_size=32_000, num_speculative_tokens=3),
    objective=Eagle3Objective(ttt_steps=7),
    data=DataConfig(train=("answers/gpt_oss_20b.jsonl",), max_length=4096, validation_rows=512),
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
