"""An MLP speculator as IBM's accelerators are written: every step under its own name, tied or not."""

from __future__ import annotations

from typing import Any

from speculators.convert.plan import CheckpointPlan, Ledger, PlannedTensor
from speculators.convert.source import SourceCheckpoint
from speculators.errors import FormatError
from speculators.formats.config import SpeculatorConfig
from speculators.models.mlp_speculator.config import MlpSpeculatorConfig

_PREFIX = "speculator."


def plan(speculator: SourceCheckpoint, config: SpeculatorConfig, layout: str) -> CheckpointPlan:
    """Account for every tensor; FormatError for a speculator of another family.

    Tied weights are written once a step: IBM's runtimes read one tensor a step, whether the steps share it or not.
    """
    if not isinstance(config, MlpSpeculatorConfig):
        kind = config.speculators_model_type
        raise FormatError(f"{speculator.directory} is a speculator of type {kind}; {layout} holds MLP speculators")
    ledger = Ledger(speculator)
    for name, original in config.copies().items():
        if not ledger.has(name):
            again = PlannedTensor.copy(ledger.stored(original))
            ledger.plan(_PREFIX + name, again, f"{original}, with which it is tied")
    ledger.copy_all(config.expected_tensors(), lambda name: _PREFIX + name)
    return ledger.finish_foreign(layout, _config(config))


def _config(config: MlpSpeculatorConfig) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": config.vocab_size,
        "emb_dim": config.emb_dim,
        "inner_dim": config.inner_dim,
        "n_predict": config.n_predict,
        "top_k_tokens_per_head": config.top_k_tokens_per_head,
        "n_candidates": config.n_candidates,
        "tie_weights": config.tie_weights,
        "scale_input": config.scale_input,
        "torch_dtype": config.dtype,
    }
