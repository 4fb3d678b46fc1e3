"""DFlash 2 for Qwen3-8B without thinking: seven drafts, chosen among each slot's sixteen likeliest tokens.

    accelerate launch --config_file recipes/accelerate/gpu8_ddp.yaml recipes/dflash2_qwen3_8b.py [key=value ...]

The data are the verifier's own answers. vLLM writes them to where `data.train` looks:

    vllm serve Qwen/Qwen3-8B
    speculators regenerate-responses --endpoint http://127.0.0.1:8000/v1 \
        --data hf:mlabonne/open-perfectblend --output answers/qwen3_8b_perfectblend.jsonl \
        --max-tokens 2048 --chat-template-kwargs '{"enable_thinking": false}'

Optimizer, rate, epochs and D-PACE weights are those of Red Hat's draft for this verifier; no acceptance is published.
"""

from speculators.models.dflash2.draft import DFlash2Draft
from speculators.models.dflash2.objective import DFlash2Objective
from speculators.train.config import TrainConfig
from speculators.train.quickstart import on_held_out_prompts
from speculators.train.recipe import DataConfig, ExtractConfig, Recipe, run

RECIPE = Recipe(
    name="dflash2_qwen3_8b",
    verifier="Qwen/Qwen3-8B",
    family="dflash2",
    draft=DFlash2Draft(
        num_layers=5,
        block_size=8,
        aux_layer_ids=[2, 10, 18, 26, 34],
        sliding_window=2048,
        selector_rank=256,
        selector_top_k=16,
    ),
    objective=DFlash2Objective(max_anchors=512, position_weights="dpace"),
    data=DataConfig(
        train=("answers/qwen3_8b_perfectblend.jsonl",),
        max_length=4096,
        validation_rows=512,
        template_options={"enable_thinking": False},
    ),
    extract=ExtractConfig(online=True),
    train=TrainConfig(
        epochs=7,
        row_length=4096,
        accumulation=4,
        learning_rate=0.0006,
        warmup_ratio=0.04,
        clip_norm=1.0,
        checkpoint_every=1000,
        measure_every=2000,
        optimizer="muon",
    ),
    evaluate=on_held_out_prompts(limit=80, max_num_seqs=16),
)

if __name__ == "__main__":
    run(RECIPE)
