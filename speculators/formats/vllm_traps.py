"""Where vLLM 0.32 takes a well-formed speculator directory for something else than it says, as faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from speculators.formats.config import SpeculatorConfig
from speculators.formats.faults import Fault, fault
from speculators.formats.vllm_reading import INSTEAD, aux_features, default_of

# Keys that only other writers add; where one is there, the meaning of a flag may be that writer's.
_OF_OTHER_WRITERS = frozenset({"auto_map", "transformers_version"})
_ABSENT = {"sample_from_anchor": "no-sample-from-anchor"}


class Written:
    """A `config.json` as it stands, whatever its values are; what is not of the type asked for counts as not there."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        layer = raw.get("transformer_layer_config")
        self.layer: Mapping[str, Any] = layer if isinstance(layer, dict) else {}
        kind = raw.get("speculators_model_type")
        self.kind = kind if isinstance(kind, str) else ""
        block = raw.get("speculators_config")
        methods = block.get("proposal_methods") if isinstance(block, dict) else None
        self.proposals: list[Any] = methods if isinstance(methods, list) else []

    def is_true(self, key: str) -> bool:
        """Whether a top-level key is true, and not merely something that counts as true."""
        return self.raw.get(key) is True


def traps(raw: Mapping[str, Any], config: SpeculatorConfig | None) -> Iterator[Fault]:
    """Yield what is well-formed but read otherwise than written.

    `raw` is the parsed file, `config` what this library makes of it, None where it cannot be read even in part.
    """
    written = Written(raw)
    yield from _second_proposal(written)
    yield from _acceptance_rule(written)
    if config is None:
        return
    if written.kind in INSTEAD:
        text = f"vLLM has no reader for speculators_model_type {written.kind!r}"
        yield fault("not-served", f"{text}; {INSTEAD[written.kind]}")
    yield from _absent_keys(written, config)
    for check in _CHECKS.get(written.kind, ()):
        yield from check(written, config)


def _second_proposal(written: Written) -> Iterator[Fault]:
    if len(written.proposals) > 1:
        text = f"{len(written.proposals)} proposal methods; only the first is ever read: remove the others"
        yield fault("second-proposal", text)


def _acceptance_rule(written: Written) -> Iterator[Fault]:
    """What these two keys ask for would change the output's distribution, which no engine does."""
    first = written.proposals[0] if written.proposals and isinstance(written.proposals[0], dict) else {}
    for key, lossless in (("verifier_accept_k", 1), ("accept_tolerance", 0)):
        value = first.get(key)
        if isinstance(value, int | float) and value != lossless:
            text = f"{key} is {value}, which engines do not read: they accept what keeps the verifier's distribution"
            yield fault("acceptance-not-read", f"{text}; write {lossless}")


def _absent_keys(written: Written, config: SpeculatorConfig) -> Iterator[Fault]:
    """Defaults of vLLM that are not those of the family; a key that the family demands is missed elsewhere."""
    for key, field in type(config).model_fields.items():
        differs, theirs = default_of(written.kind, key)
        if key in written.raw or not differs or field.is_required() or getattr(config, key) == theirs:
            continue
        text = f"{key} is absent, which vLLM reads as {theirs} and this library as {getattr(config, key)}; write it"
        yield fault(_ABSENT.get(key, "default-differs"), text)


def _feature_count(written: Written, config: SpeculatorConfig) -> Iterator[Fault]:
    wanted = len(config.aux_layer_ids)
    counted = aux_features(written.kind, written.layer, config.aux_layer_ids)
    if counted != wanted and written.layer.get("num_aux_hidden_states") is None:
        text = f"{wanted} layer ids, but vLLM's llama draft counts {counted} features"
        hint = f"write num_aux_hidden_states: {wanted} into transformer_layer_config"
        yield fault("num-aux-hidden-states", f"{text}; {hint}")


def _llama_windows(written: Written, config: SpeculatorConfig) -> Iterator[Fault]:
    if written.layer.get("model_type") == "llama" and "sliding_attention" in (written.layer.get("layer_types") or ()):
        text = "layer_types has sliding_attention, which vLLM's llama draft ignores: it attends to everything"
        yield fault("sliding-window-ignored", f"{text}; use qwen3 layers or full_attention")


def _norm_output(written: Written, config: SpeculatorConfig) -> Iterator[Fault]:
    if written.is_true("norm_output"):
        text = "norm_output is true, which vLLM does not pass on for this type; one pass recycles no state"
        yield fault("norm-output-not-read", f"{text}: set it to false")


def _anchor_sampling(written: Written, config: SpeculatorConfig) -> Iterator[Fault]:
    if written.is_true("sample_from_anchor"):
        text = "sample_from_anchor is true: vLLM's newer runner refuses it for this type, the older one ignores it"
        yield fault("anchor-sampling", f"{text}; train with false, or as dspark")


def _one_causality(written: Written, config: SpeculatorConfig) -> Iterator[Fault]:
    """One flag holds for all layers in vLLM and here; elsewhere layers without a window always see the whole block."""
    types = config.to_json()["transformer_layer_config"]["layer_types"]
    mixed = len(set(types)) > 1 or bool(_OF_OTHER_WRITERS & written.raw.keys())
    if written.raw.get("sliding_window_non_causal") is False and "full_attention" in types and mixed:
        text = "sliding_window_non_causal is false, by which vLLM runs every layer causally, full_attention ones too"
        hint = "where those were trained to see the whole block, this format cannot say so: write true, or train again"
        yield fault("mixed-causality", f"{text}; {hint}")


def _markov_head(written: Written, config: SpeculatorConfig) -> Iterator[Fault]:
    kind = written.raw.get("markov_head_type")
    if isinstance(kind, str) and kind != "vanilla":
        text = f"markov_head_type is {kind!r}: vLLM builds a vanilla head and refuses the tensors of any other"
        yield fault("markov-head", f"{text}; train with 'vanilla' to serve there")


Check = Callable[[Written, SpeculatorConfig], Iterator[Fault]]
_EAGLE3: tuple[Check, ...] = (_feature_count, _llama_windows)
_BLOCK: tuple[Check, ...] = (_anchor_sampling, _one_causality)
# What two values of one file say against each other is the family's to refuse (`SpeculatorConfig.disagreements`).
_CHECKS: dict[str, tuple[Check, ...]] = {
    "eagle3": _EAGLE3,
    "peagle": (*_EAGLE3, _norm_output),
    "dflash": _BLOCK,
    "dflash2": _BLOCK,
    "dspark": (_markov_head,),
}
