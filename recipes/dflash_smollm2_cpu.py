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
    # In so few steps the verifier's likeliest token teaches more than its distribution: after 271 rows of 1024 tokens,
    # in blocks of eight, 1.65 tokens a verification are expected against 1.51.
    DFlashObjective(loss={"ce": 1.0}, position_weights="dpace", max_anchors=64, max_blocks=256),
    family="dflash",
    # Of so small a draft, Muon takes a third of the time: four polynomials of its best are as good as five alike.
    train={"orthogonalisation": "polar_express", "ns_steps": 4, "learning_rate": 3e-3},
)

if __name__ == "__main__":
    run(RECIPE)
