"""Where vLLM 0.32 takes a well-formed speculator directory for something else than it says, as faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from speculators.formats.config import SpeculatorConfig
from speculators.formats.faults import Fault, fault
from speculators.formats.vllm_reading import INSTEAD, aux_features, causal_layers, default_of

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

    def is_true(self, key: str) -> bool:
        """Whether a top-level key is true, and not merely something that counts as true."""
        return self.raw.get(key) is True


def traps(raw: Mapping[str, Any], config: SpeculatorConfig | None) -> Iterator[Fault]:
    """Yield what is well-formed but read otherwise than written.

    `raw` is the parsed file, `config` what this library makes of it, None where it cannot be read even in part.
    """
    written = Written(raw)
    yield from _second_proposal(written)
    if config is None:
        return
    if written.kind in INSTEAD:
        text = f"vLLM has no reader for speculators_model_type {written.kind!r}"
        yield fault("not-served", f"{text}; {INSTEAD[written.kind]}")
    yield from _absent_keys(written, config)
    for check in _CHECKS.get(written.kind, ()):
        yield from check(written, config)


def _second_proposal(written: Written) -> Iterator[Fault]:
    block = written.raw.get("speculators_config")
    methods = block.get("proposal_methods") if isinstance(block, dict) else None
    if isinstance(methods, list) and len(methods) > 1:
        text = f"{len(methods)} proposal methods; only the first is ever read: remove the others"
        yield fault("second-proposal", text)


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


def _norms_not_forwarded(written: Written, config: SpeculatorConfig) -> Iterator[Fault]:
    if written.is_true("fc_norm"):
        text = "fc_norm is true, which vLLM does not pass on for this type: it refuses the fc_norm.* tensors"
        yield fault("fc-norm-not-read", f"{text}; train with norm_before_fc or without")
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


def _causality_by_layer(written: Written, config: SpeculatorConfig) -> Iterator[Fault]:
    causal = [index for index, one in enumerate(causal_layers(config.to_json())) if one]
    if written.is_true("sliding_window_non_causal") and causal:
        text = "sliding_window_non_causal is true, which vLLM does not read for this type"
        yield fault("causality-not-read", f"{text}: layers {causal} run causally there; write false")


def _markov_head(written: Written, config: SpeculatorConfig) -> Iterator[Fault]:
    kind = written.raw.get("markov_head_type")
    if isinstance(kind, str) and kind != "vanilla":
        text = f"markov_head_type is {kind!r}: vLLM builds a vanilla head and refuses the tensors of any other"
        yield fault("markov-head", f"{text}; train with 'vanilla' to serve there")


def _whole_vocabulary(written: Written, config: SpeculatorConfig) -> Iterator[Fault]:
    if config.num_draft_ids < config.verifier_vocab_size:
        text = f"draft_vocab_size is {config.num_draft_ids} of {config.verifier_vocab_size}"
        why = "vLLM's candidate selector takes draft ids for the verifier's"
        yield fault("reduced-vocabulary", f"{text}, but {why}; train with the whole vocabulary")


def _mask_token(written: Written, config: SpeculatorConfig) -> Iterator[Fault]:
    mask = written.raw.get("mask_token_id")
    if type(mask) is int and mask >= config.verifier_vocab_size:
        text = f"mask_token_id is {mask}; expected a row of the draft's embeddings, below {config.verifier_vocab_size}"
        yield fault("mask-token-id", text)


def _block_size(written: Written, config: SpeculatorConfig) -> Iterator[Fault]:
    most, tokens = config.max_speculative_tokens, config.num_speculative_tokens
    if most is not None and tokens > most:
        text = f"speculative_tokens is {tokens}, but a block of {written.raw.get('block_size')} predicts {most}"
        yield fault("tokens-exceed-block", f"{text}; vLLM goes by the first alone: write {most} or fewer")


Check = Callable[[Written, SpeculatorConfig], Iterator[Fault]]
_EAGLE3: tuple[Check, ...] = (_feature_count, _llama_windows)
_BLOCK: tuple[Check, ...] = (_mask_token, _block_size)
_CHECKS: dict[str, tuple[Check, ...]] = {
    "eagle3": _EAGLE3,
    "peagle": (*_EAGLE3, _norms_not_forwarded, _mask_token),
    "dflash": (*_BLOCK, _anchor_sampling, _one_causality),
    "dflash2": (*_BLOCK, _anchor_sampling, _one_causality, _whole_vocabulary),
    "dspark": (*_BLOCK, _causality_by_layer, _markov_head),
}
