"""Reading a configuration in spite of its faults, so that all that is wrong with a directory is named at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from pydantic import ConfigDict, ValidationError

from speculators.formats.config import SpeculatorConfig, TensorSpec
from speculators.formats.decoder import DecoderConfig
from speculators.formats.faults import Fault, config_faults

FamilyConfig = Callable[[str], type[SpeculatorConfig] | None]

_LAYERS, _PROPOSALS = "transformer_layer_config", "speculators_config.proposal_methods"
# Stand-ins for wrong values on which no tensor depends, so that the tensors can be compared all the same.
_STAND_INS: dict[str, Any] = {
    "architectures": ["Draft"],
    "speculators_version": "0",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "norm_before_residual": False,
    "sample_from_anchor": False,
    "sliding_window_non_causal": True,
    "mask_token_id": 0,
    "speculators_config.default_proposal_method": "greedy",
    _PROPOSALS: [{"speculative_tokens": 1}],
    "speculators_config.verifier": {"name_or_path": "unknown", "architectures": []},
    "speculators_config.verifier.name_or_path": "unknown",
    "speculators_config.verifier.architectures": [],
    f"{_LAYERS}.rms_norm_eps": 1e-6,
    f"{_LAYERS}.hidden_act": "silu",
    f"{_LAYERS}.max_position_embeddings": 2048,
    f"{_LAYERS}.rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_LAYER_ID_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")


class AnyFamily(SpeculatorConfig):
    """What all families that engines serve have in common; keys of a family that is not known are not judged."""

    model_config = ConfigDict(extra="ignore")

    transformer_layer_config: DecoderConfig

    @property
    def verifier_hidden_size(self) -> int:
        """Width of the draft's states, which is mostly the verifier's."""
        return self.transformer_layer_config.hidden_size

    @property
    def verifier_vocab_size(self) -> int:
        """Rows of the verifier's embedding table."""
        return self.transformer_layer_config.vocab_size

    def network(self) -> str:
        """Nothing is known of the network."""
        return "unknown"

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """No tensor is known."""
        return {}


def read_in_spite(raw: dict[str, Any], family: type[SpeculatorConfig] | None) -> tuple[list[Fault], Any]:
    """Return a configuration's faults, and the configuration itself as far as it can be read in spite of them.

    `family` is the class of its type, None for a type that is not known: then what all families share is judged, and
    None is returned in the place of a configuration.
    """
    found: list[Fault] = []
    candidate = copy.deepcopy(raw)
    while True:
        try:
            config = (family or AnyFamily).model_validate(candidate)
        except ValidationError as error:
            found += config_faults(error, family or AnyFamily)
            if not _mended(candidate, error):
                return found, None
        else:
            return found, config if family is not None else None


def _mended(candidate: dict[str, Any], error: ValidationError) -> bool:
    """Mend in place what can be mended without touching a tensor's shape; return whether anything was."""
    before = copy.deepcopy(candidate)
    for item in error.errors(include_url=False):
        location = item["loc"]
        key = ".".join(str(part) for part in location)
        if key.startswith(_PROPOSALS):
            _put(candidate, location[:2], copy.deepcopy(_STAND_INS[_PROPOSALS]))
        elif item["type"] == "extra_forbidden":
            _put(candidate, location, None, remove=True)
        elif key in ("speculators_config", "speculators_config.algorithm"):
            _mend_block(candidate)
        elif item["type"] == "contradictions":
            slugs = {slug for slug, _ in item["ctx"]["problems"]}
            _mend_contradictions(candidate, slugs, in_layer=location[:1] == (_LAYERS,))
        elif key in _STAND_INS:
            _put(candidate, location, copy.deepcopy(_STAND_INS[key]))
    return candidate != before


def _put(candidate: Any, location: tuple[int | str, ...], value: object, *, remove: bool = False) -> None:
    """Set or remove what lies at a pydantic location, unless that does not lead through objects and lists alone."""
    *parents, last = location
    for part in parents:
        if not _leads_on(candidate, part) or (isinstance(candidate, dict) and part not in candidate):
            return
        candidate = candidate[part]
    if isinstance(candidate, dict) and remove:
        candidate.pop(last, None)
    elif _leads_on(candidate, last):
        candidate[last] = value


def _leads_on(value: object, part: int | str) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and isinstance(part, int))


def _mend_block(candidate: dict[str, Any]) -> None:
    block = candidate.get("speculators_config")
    block = candidate["speculators_config"] = dict(block) if isinstance(block, dict) else {}
    block |= {"algorithm": candidate.get("speculators_model_type") or "unknown", "default_proposal_method": "greedy"}
    for key in ("proposal_methods", "verifier"):
        block.setdefault(key, copy.deepcopy(_STAND_INS[f"speculators_config.{key}"]))


def _mend_contradictions(candidate: dict[str, Any], slugs: set[str], *, in_layer: bool) -> None:
    layer = candidate.get(_LAYERS)
    layer = layer if isinstance(layer, dict) else {}
    if in_layer:
        dropped: tuple[str, ...] = ("layer_types", "use_sliding_window")
    else:
        dropped = ("num_aux_hidden_states", "num_aux_layers") if "num-aux-hidden-states" in slugs else ()
        _mend_block(candidate)
        if "layer-ids" in slugs:
            for key in _LAYER_ID_KEYS:
                if isinstance(candidate.get(key), list):
                    candidate[key] = sorted(set(candidate[key]))
        if "mask-token-id" in slugs:
            candidate["mask_token_id"] = _STAND_INS["mask_token_id"]
        if "causality-not-read" in slugs:
            candidate["sliding_window_non_causal"] = False
        if "tokens-exceed-block" in slugs:
            candidate["speculators_config"]["proposal_methods"] = copy.deepcopy(_STAND_INS[_PROPOSALS])
    for key in dropped:
        layer.pop(key, None)
