"""MLPSpeculator for SmolLM2-135M-Instruct: a recurrence over three drafts, from the verifier's last state.

    accelerate launch recipes/mlp_speculator_smollm2_cpu.py [stage ...] [key=value ...] [--plan]

Some ten minutes on two CPU cores; data, schedule and evaluation are those of `minutes_recipe`, as for the quickstart.
"""

from speculators.models.mlp_speculator.draft import MlpSpeculatorDraft
from speculators.models.mlp_speculator.objective import MlpSpeculatorObjective
from speculators.train.quickstart import minutes_recipe
from speculators.train.recipe import run

RECIPE = minutes_recipe(
    MlpSpeculatorDraft(n_predict=3),
    MlpSpeculatorObjective(),
    family="mlp_speculator",
)

if __name__ == "__main__":
    run(RECIPE)
