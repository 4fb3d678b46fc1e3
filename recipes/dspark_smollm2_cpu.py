"""DSpark for SmolLM2-135M-Instruct: three drafts, each biased by the token before it, with a confidence of its own.

    accelerate launch recipes/dspark_smollm2_cpu.py [stage ...] [key=value ...] [--plan]

Some ten minutes on two CPU cores; data, schedule and evaluation are those of `minutes_recipe`, as for the quickstart.
"""

from speculators.models.dspark.draft import DSparkDraft
from speculators.models.dspark.objective import DSparkObjective
from speculators.train.quickstart import minutes_recipe
from speculators.train.recipe import run

RECIPE = minutes_recipe(
    DSparkDraft(draft_vocab_size=4096, num_layers=2, block_size=3),
    DSparkObjective(max_anchors=64, max_blocks=320),
    family="dspark",
    # Of so small a draft, Muon takes a third of the time: four polynomials of its best are as good as five alike.
    train={"orthogonalisation": "polar_express", "ns_steps": 4, "learning_rate": 3e-3},
)

if __name__ == "__main__":
    run(RECIPE)
