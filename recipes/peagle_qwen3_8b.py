"""P-EAGLE for Qwen3-8B without thinking: eight drafts in one pass of four layers.

    accelerate launch --config_file recipes/accelerate/gpu8_ddp.yaml recipes/peagle_qwen3_8b.py [key=value ...]

The data are the verifier's own answers. vLLM writes them to where `data.train` looks:

    vllm serve Qwen/Qwen3-8B
    speculators regenerate-responses --endpoint http://127.0.0.1:8000/v1 \
        --data hf:HuggingFaceH4/ultrachat_200k:default:train_sft --output answers/qwen3_8b.jsonl \
        --max-tokens 2048 --chat-template-kwargs '{"enable_thinking": false}'

Layers, rate and epochs are those of Red Hat's draft for this verifier, whose acceptance is not published. For
gpt-oss-120b (5 tokens) acceptance lengths are 2.68 on MT-Bench, 3.15 on HumanEval and 3.55 on GSM8K.
"""

from speculators.models.peagle.draft import PEagleDraft
from speculators.models.peagle.objective import PEagleObjective
from speculators.train.config import TrainConfig
from speculators.train.quickstart import on_held_out_prompts
from speculators.train.recipe import DataConfig, ExtractConfig, Recipe, run

RECIPE = Recipe(
    name="peagle_qwen3_8b",
    verifier="Qwen/Qwen3-8B",
    family="peagle",
    draft=PEagleDraft(
        draft_vocab_size=32_000, num_layers=4, aux_layer_ids=[2, 10, 18, 26, 34], num_speculative_tokens=8
    ),
    objective=PEagleObjective(num_depths=8, down_sample_ratio=0.7),
    data=DataConfig(
        train=("answers/qwen3_8b.jsonl",),
        max_length=8192,
        validation_rows=512,
        template_options={"enable_thinking": False},
    ),
    extract=ExtractConfig(online=True),
    train=TrainConfig(
        epochs=5,
        row_length=8192,
        accumulation=1,
        learning_rate=0.0006,
        warmup_ratio=0.04,
        clip_norm=1.0,
        checkpoint_every=1000,
        measure_every=2000,
    ),
    evaluate=on_held_out_prompts(limit=80, max_num_seqs=16),
)

if __name__ == "__main__":
    run(RECIPE)
