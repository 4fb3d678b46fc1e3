"""Medusa for SmolLM2-135M-Instruct: three heads on the verifier's last state.

    accelerate launch recipes/medusa_smollm2_cpu.py [stage ...] [key=value ...] [--plan]

Some ten minutes on two CPU cores; data, schedule and evaluation are those of `minutes_recipe`, as for the quickstart.
"""

from speculators.models.medusa.draft import MedusaDraft
from speculators.models.medusa.objective import MedusaObjective
from speculators.train.quickstart import minutes_recipe
from speculators.train.recipe import run

RECIPE = minutes_recipe(
    MedusaDraft(num_heads=3, draft_vocab_size=4096),
    MedusaObjective(),
    family="medusa",
)

if __name__ == "__main__":
    run(RECIPE)
