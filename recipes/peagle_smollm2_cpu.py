"""P-EAGLE for SmolLM2-135M-Instruct: three drafts in one pass of two layers.

    accelerate launch recipes/peagle_smollm2_cpu.py [stage ...] [key=value ...] [--plan]

Some ten minutes on two CPU cores; data, schedule and evaluation are those of `minutes_recipe`, as for the quickstart.
"""

from speculators.models.peagle.draft import PEagleDraft
from speculators.models.peagle.objective import PEagleObjective
from speculators.train.quickstart import minutes_recipe
from speculators.train.recipe import run

RECIPE = minutes_recipe(
    PEagleDraft(draft_vocab_size=4096, num_layers=2, num_speculative_tokens=3),
    PEagleObjective(num_depths=3),
    family="peagle",
)

if __name__ == "__main__":
    run(RECIPE)
