"""DFlash for SmolLM2-135M-Instruct: blocks of four, the anchor and three drafts, filled in one pass.

    accelerate launch recipes/dflash_smollm2_cpu.py [stage ...] [key=value ...] [--plan]

Some ten minutes on two CPU cores; data, schedule and evaluation are those of `minutes_recipe`, as for the quickstart.
"""

from speculators.models.dflash.draft import DFlashDraft
from speculators.models.dflash.objective import DFlashObjective
from speculators.train.quickstart import minutes_recipe
from speculators.train.recipe import run

RECIPE = minutes_recipe(
    DFlashDraft(draft_vocab_size=4096, num_layers=2, block_size=4),
    DFlashObjective(),
    family="dflash",
)

if __name__ == "__main__":
    run(RECIPE)
