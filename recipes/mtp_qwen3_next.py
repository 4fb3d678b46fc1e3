"""The MTP block of Qwen3-Next-80B-A3B-Instruct, trained on to draft three tokens from its own output (FastMTP).

    accelerate launch --config_file recipes/accelerate/gpu8_ddp.yaml recipes/mtp_qwen3_next.py [key=value ...]

The data are the verifier's own answers. vLLM writes them to where `data.train` looks:

    vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct --tensor-parallel-size 8
    speculators regenerate-responses --endpoint http://127.0.0.1:8000/v1 \
        --data hf:HuggingFaceH4/ultrachat_200k:default:train_sft --output answers/qwen3_next.jsonl \
        --max-tokens 2048

The states, 4 KB a token, come from vLLM's engine over all eight GPUs; training then reads the verifier's embedding,
head and MTP block, and none of its layers. This runtime does not serve linear attention, so that nothing is decoded
here: write the block back into a copy of the verifier (`speculators stitch-mtp`) and measure that with vLLM.
Published for MiMo-7B-RL (arXiv 2509.18362; greedy, 3 tokens): acceptance length 1.83 before and 2.73 after; none for
this verifier.
"""

from speculators.models.mtp.draft import MtpDraft
from speculators.models.mtp.objective import MtpObjective
from speculators.train.config import TrainConfig
from speculators.train.recipe import DataConfig, ExtractConfig, Recipe, run

RECIPE = Recipe(
    name="mtp_qwen3_next",
    verifier="Qwen/Qwen3-Next-80B-A3B-Instruct",
    family="mtp",
    draft=MtpDraft(num_speculative_tokens=3),
    objective=MtpObjective(num_steps=3, step_decay=0.6),
    warm_start="verifier",
    data=DataConfig(train=("answers/qwen3_next.jsonl",), max_length=4096, validation_rows=512),
    extract=ExtractConfig(source="vllm", vllm_keywords={"tensor_parallel_size": 8}),
    train=TrainConfig(
        epochs=3,
        row_length=4096,
        accumulation=2,
        learning_rate=5e-05,
        warmup_ratio=0.05,
        measure_prompts=0,
        checkpoint_every=1000,
    ),
)

if __name__ == "__main__":
    run(RECIPE)
