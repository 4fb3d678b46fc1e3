"""EAGLE-3 for Llama-3.1-8B-Instruct, as SpecForge trains it: seven steps of its own output.

    accelerate launch --config_file recipes/accelerate/gpu8_ddp.yaml recipes/eagle3_llama31_8b.py [key=value ...]

The data are the verifier's own answers. vLLM writes them to where `data.train` looks:

    vllm serve meta-llama/Llama-3.1-8B-Instruct
    speculators regenerate-responses --endpoint http://127.0.0.1:8000/v1 \
        --data hf:HuggingFaceH4/ultrachat_200k:default:train_sft --output answers/llama31_8b.jsonl \
        --max-tokens 2048

Published for SpecForge's draft (SGLang, greedy, one request at a time), drafting 3 and 7 tokens in a chain:
acceptance length 2.90 and 3.86 on MT-Bench, 3.34 and 4.91 on HumanEval, 2.55 and 2.97 on GSM8K.
"""

from speculators.models.eagle3.draft import Eagle3Draft
from speculators.models.eagle3.objective import Eagle3Objective
from speculators.train.config import TrainConfig
from speculators.train.quickstart import on_held_out_prompts
from speculators.train.recipe import DataConfig, ExtractConfig, Recipe, run

RECIPE = Recipe(
    name="eagle3_llama31_8b",
    verifier="meta-llama/Llama-3.1-8B-Instruct",
    family="eagle3",
    draft=Eagle3Draft(draft_vocab_size=32_000, num_speculative_tokens=3),
    objective=Eagle3Objective(ttt_steps=7),
    data=DataConfig(train=("answers/llama31_8b.jsonl",), max_length=4096, validation_rows=512),
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
