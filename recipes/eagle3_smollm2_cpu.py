"""EAGLE-3 for SmolLM2-135M-Instruct on two CPU cores, within an hour.

    accelerate launch recipes/eagle3_smollm2_cpu.py [stage ...] [key=value ...] [--plan]

The verifier wrote the shipped conversations itself (recipes/data). Other prompts are measured with
`evaluate evaluate.data.<name>=PROMPTS.jsonl`.
"""

from speculators.models.eagle3.draft import Eagle3Draft
from speculators.models.eagle3.objective import Eagle3Objective
from speculators.train.quickstart import hour_recipe
from speculators.train.recipe import run

RECIPE = hour_recipe(
    Eagle3Draft(
        draft_vocab_size=8192,
        norm_before_fc=True,
        norm_output=True,
        norm_before_residual=True,
        num_speculative_tokens=3,
    ),
    Eagle3Objective(ttt_steps=3),
    family="eagle3",
)

if __name__ == "__main__":
    run(RECIPE)
