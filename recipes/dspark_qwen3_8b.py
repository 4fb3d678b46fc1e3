"""DSpark for Qwen3-8B without thinking: seven drafts, each biased by the token before it, and a confidence.

    accelerate launch --config_file recipes/accelerate/gpu8_ddp.yaml recipes/dspark_qwen3_8b.py [key=value ...]

The data are the verifier's own answers. vLLM writes them to where `data.train` looks:

    vllm serve Qwen/Qwen3-8B
    speculators regenerate-responses --endpoint http://127.0.0.1:8000/v1 \
        --data hf:mlabonne/open-perfectblend --output answers/qwen3_8b_perfectblend.jsonl \
        --max-tokens 2048 --chat-template-kwargs '{"enable_thinking": false}'

As in arXiv 2607.05147, which weighs the distance |p - q| with 0.9: here 1.8, `tv` being half of it. Its Table 1
(temperature 1, 1.3 million prompts) has acceptance length 3.72 on MT-Bench, 5.52 on HumanEval and 6.17 on GSM8K. With
`warm_start=out/dflash_qwen3_8b/speculator` the backbone is that of the recipe for DFlash.
"""

from speculators.models.dspark.draft import DSparkDraft
from speculators.models.dspark.objective import DSparkObjective
from speculators.train.config import TrainConfig
from speculators.train.quickstart import on_held_out_prompts
from speculators.train.recipe import DataConfig, ExtractConfig, Recipe, run

RECIPE = Recipe(
    name="dspark_qwen3_8b",
    verifier="Qwen/Qwen3-8B",
    family="dspark",
    draft=DSparkDraft(num_layers=5, block_size=7, aux_layer_ids=[2, 10, 18, 26, 34], markov_rank=256),
    objective=DSparkObjective(max_anchors=512, decay_gamma=4.0, loss={"ce": 0.1, "tv": 1.8}),
    data=DataConfig(
        train=("answers/qwen3_8b_perfectblend.jsonl",),
        max_length=4096,
        validation_rows=512,
        template_options={"enable_thinking": False},
    ),
    extract=ExtractConfig(online=True),
    train=TrainConfig(
        epochs=10,
        row_length=4096,
        accumulation=16,
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
