"""MLPSpeculator for SmolLM2-135M-Instruct: a recurrence over three drafts, from the verifier's last state.

    accelerate launch recipes/mlp_speculator_smollm2_cpu.py [stage ...] [key=value ...] [--plan]

On two CPU cores; data, schedule and evaluation are those of `hour_recipe`, as for all families.
"""

from speculators.models.mlp_speculator.draft import MlpSpeculatorDraft
from speculators.models.mlp_speculator.objective import MlpSpeculatorObjective
from speculators.train.quickstart import hour_recipe
from speculators.train.recipe import run

RECIPE = hour_recipe(
    MlpSpeculatorDraft(n_predict=3),
    MlpSpeculatorObjective(),
    family="mlp_speculator",
)

if __name__ == "__main__":
    run(RECIPE)
