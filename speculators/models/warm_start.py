"""A draft that starts from a trained speculator: of its own family, or of one that its family can go on from."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel

from speculators.errors import UsageError
from speculators.formats.config import SpeculatorConfig
from speculators.formats.verifier_weights import VerifierWeights
from speculators.models import FAMILIES
from speculators.models.speculator import Speculator

# What may change with the same tensors: who wrote the file for which server, how far attention reaches, how many tokens
# a step drafts, and what only random initial values depend on.
_FREE = frozenset({
    "architectures", "speculators_model_type", "speculators_version", "speculators_config", "dtype",
    "block_size", "sample_from_anchor", "sliding_window_non_causal", "confidence_temperatures",
    "layer_types", "sliding_window", "use_sliding_window", "is_causal", "max_window_layers", "max_position_embeddings",
    "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "attention_dropout",
    "use_cache", "pretraining_tp", "num_aux_hidden_states", "num_aux_layers",
})  # fmt: skip


def require_same_tensors(config: SpeculatorConfig, given: SpeculatorConfig) -> None:
    """Raise UsageError, naming every value that differs, where a draft of `config` cannot take over `given`'s tensors.

    Only the two configurations are read. Families must be the same, or `given`'s the one that `config`'s goes on from;
    then what `config` has beyond it starts afresh and is not compared.
    """
    kind, other = config.speculators_model_type, given.speculators_model_type
    if other not in (kind, FAMILIES[kind].starts_from):
        known = " or ".join(f"family {name!r}" for name in (kind, FAMILIES[kind].starts_from) if name)
        raise UsageError(f"a {kind} draft cannot start from one of family {other!r}; expected one of {known}")
    ours, theirs = _meaning(config), _meaning(given)
    compared = sorted(ours.keys() & theirs.keys() if kind != other else ours.keys() | theirs.keys())
    different = [
        f"{key} is {ours.get(key)!r}, that draft's {theirs.get(key)!r}"
        for key in compared
        if ours.get(key) != theirs.get(key)
    ]
    if different:
        raise UsageError(
            f"a {kind} draft started from another takes over its tensors and what they mean; {'; '.join(different)}"
        )


def started_from(given: Speculator, config: SpeculatorConfig, weights: VerifierWeights, *, seed: int = 0) -> Speculator:
    """A float32 draft of `config` with the tensors and the vocabulary map of `given`, never rebuilt.

    Of a draft of another family the shared part is taken, bit for bit, and the rest is drawn from `seed`. UsageError as
    from `require_same_tensors`.
    """
    require_same_tensors(config, given.config)
    family, other = FAMILIES[config.speculators_model_type], given.config.speculators_model_type
    if other == family.name:
        return Speculator.create(config, weights, seed=seed, start_from=given)
    whole = given.attach_verifier(weights).to("cpu", torch.float32)
    started: Speculator = family.start_from(other)(whole, config, seed=seed)
    return started


def _meaning(config: SpeculatorConfig) -> dict[str, Any]:
    """What the tensors of a draft mean, by key; keys of its decoder layers stand beside the others."""
    parts: list[BaseModel] = [config]
    layer = getattr(config, "transformer_layer_config", None)
    if isinstance(layer, BaseModel):
        parts.append(layer)
    # Keys that a verifier's configuration carries besides the known ones are its own business.
    keys = {key: part for part in parts for key in type(part).model_fields if key not in _FREE}
    return {key: getattr(part, key) for key, part in keys.items() if key != "transformer_layer_config"}
