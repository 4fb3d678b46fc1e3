"""DFlash for Qwen3-8B without thinking: seven drafts after the anchor, filled in one pass of five layers.

    accelerate launch --config_file recipes/accelerate/gpu8_ddp.yaml recipes/dflash_qwen3_8b.py [key=value ...]

The data are the verifier's own answers. vLLM writes them to where `data.train` looks:

    vllm serve Qwen/Qwen3-8B
    speculators regenerate-responses --endpoint http://127.0.0.1:8000/v1 \
        --data hf:mlabonne/open-perfectblend --output answers/qwen3_8b_perfectblend.jsonl \
        --max-tokens 2048 --chat-template-kwargs '{"enable_thinking": false}'

Published: acceptance length 3.11 on MT-Bench, 4.64 on HumanEval and 5.33 on GSM8K (arXiv 2607.05147, Table 1;
temperature 1, 1.3 million prompts). A run of 20,000 conversations and three epochs reached .665, .474, .338, .243,
.180, .141 and .115 of the positions of a block.
"""

from speculators.models.dflash.draft import DFlashDraft
from speculators.models.dflash.objective import DFlashObjective
from speculators.train.config import TrainConfig
from speculators.train.quickstart import on_held_out_prompts
from speculators.train.recipe import DataConfig, ExtractConfig, Recipe, run

RECIPE = Recipe(
    name="dflash_qwen3_8b",
    verifier="Qwen/Qwen3-8B",
    family="dflash",
    draft=DFlashDraft(num_layers=5, block_size=8, aux_layer_ids=[2, 10, 18, 26, 34]),
    objective=DFlashObjective(max_anchors=512, decay_gamma=4.0),
    data=DataConfig(
        train=("answers/qwen3_8b_perfectblend.jsonl",),
        max_length=4096,
        validation_rows=512,
        template_options={"enable_thinking": False},
    ),
    extract=ExtractConfig(online=True),
    train=TrainConfig(
        epochs=6,
        row_length=4096,
        accumulation=4,
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
