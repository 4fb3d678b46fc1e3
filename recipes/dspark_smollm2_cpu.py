"""DSpark for SmolLM2-135M-Instruct: three drafts, each biased by the token before it, with a confidence of its own.

    accelerate launch recipes/dspark_smollm2_cpu.py [stage ...] [key=value ...] [--plan]

On two CPU cores; data, schedule and evaluation are those of `hour_recipe`, as for all families.
"""

from speculators.models.dspark.draft import DSparkDraft
from speculators.models.dspark.objective import DSparkObjective
from speculators.train.quickstart import hour_recipe
from speculators.train.recipe import run

RECIPE = hour_recipe(
    DSparkDraft(draft_vocab_size=8192, num_layers=2, block_size=3),
    DSparkObjective(),
    family="dspark",
)

if __name__ == "__main__":
    run(RECIPE)
