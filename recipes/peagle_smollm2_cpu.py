"""P-EAGLE for SmolLM2-135M-Instruct: three drafts in one pass of two layers.

    accelerate launch recipes/peagle_smollm2_cpu.py [stage ...] [key=value ...] [--plan]

On two CPU cores; data, schedule and evaluation are those of `hour_recipe`, as for all families.
"""

from speculators.models.peagle.draft import PEagleDraft
from speculators.models.peagle.objective import PEagleObjective
from speculators.train.quickstart import hour_recipe
from speculators.train.recipe import run

RECIPE = hour_recipe(
    PEagleDraft(draft_vocab_size=8192, num_layers=2, num_speculative_tokens=3),
    PEagleObjective(num_depths=3),
    family="peagle",
)

if __name__ == "__main__":
    run(RECIPE)
