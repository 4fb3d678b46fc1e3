"""EAGLE-3 for Qwen3-8B without thinking: seven steps of its own output.

    accelerate launch --config_file recipes/accelerate/gpu8_ddp.yaml recipes/eagle3_qwen3_8b.py [key=value ...]

The data are the verifier's own answers. vLLM writes them to where `data.train` looks:

    vllm serve Qwen/Qwen3-8B
    speculators regenerate-responses --endpoint http://127.0.0.1:8000/v1 \
        --data hf:HuggingFaceH4/ultrachat_200k:default:train_sft --output answers/qwen3_8b.jsonl \
        --max-tokens 2048 --chat-template-kwargs '{"enable_thinking": false}'

Published: AngelSlim's draft in vLLM, acceptance length 1.99 on the mean of its tasks; the EAGLE-3 baseline of
DSpark's paper (arXiv 2607.05147, Table 1; temperature 1, 7 tokens, 1.3 million prompts) 2.66 on MT-Bench, 4.33 on
HumanEval, 5.30 on GSM8K.
"""

from speculators.models.eagle3.draft import Eagle3Draft
from speculators.models.eagle3.objective import Eagle3Objective
from speculators.train.config import TrainConfig
from speculators.train.quickstart import on_held_out_prompts
from speculators.train.recipe import DataConfig, ExtractConfig, Recipe, run

RECIPE = Recipe(
    name="eagle3_qwen3_8b",
    verifier="Qwen/Qwen3-8B",
    family="eagle3",
    draft=Eagle3Draft(draft_vocab_size=32_000, num_speculative_tokens=3),
    objective=Eagle3Objective(ttt_steps=7),
    data=DataConfig(
        train=("answers/qwen3_8b.jsonl",),
        max_length=4096,
        validation_rows=512,
        template_options={"enable_thinking": False},
    ),
    extract=ExtractConfig(online=True),
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
    ),
    evaluate=on_held_out_prompts(limit=80, max_num_seqs=16),
)

if __name__ == "__main__":
    run(RECIPE)
