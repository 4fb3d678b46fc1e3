"""Directories in the speculators format itself: of PyPI's package, of its older versions, and of this library.

What a version did not write yet takes what its code did without it; what only training reads is left out. Neither
happens without a note.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from speculators.convert.decoder_layer import DEFAULT_ROPE_THETA
from speculators.convert.dequantise import dequantise
from speculators.convert.dtypes import settle_dtype
from speculators.convert.layer_ids import eagle3_default
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan, LayerIdReading, Ledger
from speculators.convert.source import SourceCheckpoint
from speculators.convert.vocabulary import plan_vocabulary
from speculators.errors import FormatError, UsageError
from speculators.formats.config import DecoderDraftConfig, ProposalConfig, SpeculatorConfig
from speculators.formats.faults import error_of, fault
from speculators.models.family import VerifierShape
from speculators.models.speculator import family_of

_FUSED = {
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "target_hidden_size": None,
}
_BLOCK = {"target_hidden_size": None, "block_size": 8, "draft_vocab_size": 32000}
# Per type, what the classes of its writer take for a key that is not there.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "eagle3": _FUSED | {"embed_requires_grad": False, "draft_vocab_size": 32000},
    "peagle": _FUSED | {"embed_requires_grad": True, "draft_vocab_size": 32000},
    "dflash": _BLOCK | {"sample_from_anchor": False},
    "dflash2": _BLOCK | {
        "sample_from_anchor": False, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
        "selector_top_k": 16, "sliding_window_non_causal": True,
    },
    "dspark": _BLOCK | {
        "sample_from_anchor": True, "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "sliding_window_non_causal": False,
    },
    "mtp": {"num_nextn_predict_layers": 1},
}  # fmt: skip
# Keys that only training reads, and the values of others at which they mean nothing.
_OF_TRAINING = ("enable_sp_ulysses", "auf", "lambda_base_start", "lambda_base_decay_ratio", "num_speculative_steps")
_OF_DOMINO = ("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim")
# Types whose writers save embeddings.
_WITH_EMBEDDINGS = ("eagle", "eagle3")
# Tensors of the verifier that the writers' training holds beside the draft.
_OF_THE_VERIFIER = re.compile(r"verifier_(lm_head|norm)\..*")
_OLD_EAGLE = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
_OPTIONS = (
    "aux_layer_ids", "d2t_holds", "speculative_tokens", "norm_before_residual", "norm_before_fc", "fc_norm",
    "norm_output", "mask_token_id", "block_size", "sample_from_anchor", "sliding_window_non_causal", "markov_head_type",
    "dtype",
)  # fmt: skip


def plan(source: SourceCheckpoint, verifier: ConversionVerifier, options: ConvertOptions) -> CheckpointPlan:
    """Account for every tensor; FormatError for a type that has no family here, and for what no key can say."""
    options.require_only("a speculators directory", *_OPTIONS)
    raw, shape = dict(source.config), verifier.shape
    kind = raw.get("speculators_model_type")
    old_eagle = kind == "eagle" and "transformer_layer_config" in raw
    ledger = Ledger(source.renamed(_eagle_name) if old_eagle else source)
    dequantise(ledger, raw)
    family = family_of(kind, source.directory)
    if old_eagle:
        raw = _eagle_keys(ledger, raw)
    ids = _layer_ids(ledger, raw, family.config, options, shape)
    _complete(ledger, raw, str(kind), options)
    raw["speculators_config"] = _speculators_block(ledger, raw, shape, options)
    raw.pop("speculators_version", None)
    raw["dtype"] = raw.get("dtype") or raw.pop("torch_dtype", None) or "bfloat16"
    config = family.config.from_json(raw, source.directory)
    _require_verifier(config, shape)
    for name in [name for name in ledger.left if _OF_THE_VERIFIER.fullmatch(name)]:
        ledger.drop(name, "the verifier's own, which the writer's training kept beside the draft")
    _take_tensors(ledger, config, verifier, options)
    exact = [name for name, spec in config.expected_tensors().items() if spec.kind == "float32"]
    dtype = settle_dtype(ledger, options.dtype, exact)
    return ledger.finish(str(kind), config.model_copy(update={"dtype": dtype}), ids)


def _layer_ids(
    ledger: Ledger,
    raw: dict[str, Any],
    config_type: type[SpeculatorConfig],
    options: ConvertOptions,
    verifier: VerifierShape,
) -> LayerIdReading | None:
    """Depths, as this format says them; where it says none, those that every reader of it takes then."""
    if not issubclass(config_type, DecoderDraftConfig):
        if options.aux_layer_ids is not None:
            raise UsageError("aux_layer_ids is given for a draft that reads the verifier's last state alone")
        return None
    key, last = config_type.layer_ids_key, verifier.num_hidden_layers
    said = raw.get(key)
    default = list(eagle3_default(last))
    ids = options.aux_layer_ids or said or default
    if not isinstance(ids, list) or not all(type(item) is int and 0 <= item <= last for item in ids):
        text = f"{key} is {ids!r}; expected depths within 0..{last}, those of {verifier.name_or_path}"
        raise error_of([fault("layer-ids", text)], "config.json")
    origin = "the user's choice" if options.aux_layer_ids else key if said else "default"
    if origin == "default":
        ledger.note(f"no {key} is written; taken as {ids}, what its producer's code and engines take")
    raw[key] = ids
    return LayerIdReading(tuple(said or ids), tuple(ids), origin)


def _complete(ledger: Ledger, raw: dict[str, Any], kind: str, options: ConvertOptions) -> None:
    """Bring the keys to those that are written today: chosen ones, absent ones, and those that only training reads."""
    if raw.get("projector_type", "dflash") != "dflash":
        raise FormatError(f"config.json: projector_type is {raw['projector_type']!r}, which no family here has")
    if raw.get("shift_label"):
        raise FormatError("config.json: shift_label is true; give sample_from_anchor, which says what slots predict")
    left_out = [key for key in (*_OF_TRAINING, *_OF_DOMINO, "projector_type", "shift_label") if key in raw]
    for key in left_out:
        del raw[key]
    if left_out:
        ledger.note(f"left out, since drafting reads none of it: {', '.join(left_out)}")
    chosen = {key: getattr(options, key) for key in _OPTIONS[3:-1] if getattr(options, key) is not None}
    known = family_of(kind, "config.json").config.model_fields
    for key in chosen.keys() - known.keys():
        raise UsageError(f"{key} is given; a speculator of type {kind} has no such key")
    raw |= chosen
    for key, default in _DEFAULTS.get(kind, {}).items():
        if key not in raw:
            raw[key] = default
            if default is not None:
                ledger.note(f"no {key} is written; taken as {default!r}, as its producer's code does")
    if kind == "dflash" and "sliding_window_non_causal" not in raw:
        raw["sliding_window_non_causal"] = _sees_the_block(ledger, raw)
    _complete_layer(ledger, raw)


def _sees_the_block(ledger: Ledger, raw: Mapping[str, Any]) -> bool:
    """Whether slots of a block see each other in files that do not say so: where no layer has a window, they do."""
    layer = raw.get("transformer_layer_config")
    if isinstance(layer, Mapping) and "sliding_attention" in (layer.get("layer_types") or ()):
        raise FormatError(
            "config.json: sliding_window_non_causal is missing, and layers have windows, in which slots of a block may "
            "or may not see each other; say which by the option of that name"
        )
    ledger.note("no sliding_window_non_causal is written; slots of a block see each other, as in its producer's code")
    return True


def _complete_layer(ledger: Ledger, raw: dict[str, Any]) -> None:
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        return
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if layer.get("rope_theta") is None and isinstance(rope, Mapping) and rope.get("rope_theta") is None:
        ledger.note(f"no rope_theta is written; taken as {DEFAULT_ROPE_THETA:g}, as its producer's code does")
        raw["transformer_layer_config"] = {**layer, "rope_theta": DEFAULT_ROPE_THETA}


def _speculators_block(
    ledger: Ledger, raw: Mapping[str, Any], verifier: VerifierShape, options: ConvertOptions
) -> dict[str, Any]:
    """The block of today: one greedy proposal, and the verifier as it was given."""
    block = raw.get("speculators_config")
    if not isinstance(block, Mapping):
        raise error_of([fault("no-speculators-config", "speculators_config is missing")], "config.json")
    methods = block.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
    known = {key: value for key, value in first.items() if key in ProposalConfig.model_fields}
    if options.speculative_tokens is not None:
        known["speculative_tokens"] = options.speculative_tokens
    elif known.get("speculative_tokens") is None:
        known["speculative_tokens"] = 5
        ledger.note("no speculative_tokens is written; taken as 5, as its producer's code does")
    if isinstance(methods, list) and len(methods) > 1:
        ledger.note(f"the first of {len(methods)} proposal methods is kept; engines read no other")
    said = block.get("verifier")
    named = said.get("name_or_path") if isinstance(said, Mapping) else None
    if named not in (None, verifier.name_or_path):
        ledger.note(f"the configuration names the verifier {named!r}; {verifier.name_or_path!r} is written")
    return {
        "algorithm": raw.get("speculators_model_type"),
        "default_proposal_method": known.get("proposal_type", "greedy"),
        "proposal_methods": [known],
        "verifier": {"name_or_path": verifier.name_or_path, "architectures": list(verifier.architectures)},
    }


def _require_verifier(config: SpeculatorConfig, verifier: VerifierShape) -> None:
    for what, mine, theirs in (
        ("hidden size", config.verifier_hidden_size, verifier.hidden_size),
        ("vocabulary size", config.verifier_vocab_size, verifier.vocab_size),
    ):
        if mine != theirs:
            text = f"the draft's verifier has {what} {mine}; {verifier.name_or_path} has {theirs}"
            raise error_of([fault("verifier-mismatch", f"{text}: is it this verifier's draft?")], "config.json")


def _take_tensors(
    ledger: Ledger, config: SpeculatorConfig, verifier: ConversionVerifier, options: ConvertOptions
) -> None:
    if isinstance(config, DecoderDraftConfig):
        plan_vocabulary(ledger, config.draft_vocab_size, config.verifier_vocab_size, options.d2t_holds)
    elif options.d2t_holds is not None:
        raise UsageError("d2t_holds is given for a draft without d2t")
    expected = config.expected_tensors()
    ledger.copy_all(name for name in expected if name not in ledger.planned)
    if config.speculators_model_type in _WITH_EMBEDDINGS and "embed_tokens.weight" not in ledger.planned:
        ledger.note("no embeddings are stored; the verifier's are used")
    if ledger.has("fc.bias") and not ledger.stored("fc.bias").read().any():
        ledger.drop("fc.bias", "a bias of zeros, which changes nothing")
    if ledger.has("lm_head.weight"):
        if not torch.equal(ledger.stored("lm_head.weight").read(), verifier.weights.lm_head):
            text = f"lm_head.weight is another than the head of {verifier.name_or_path}, which such a draft reads"
            raise error_of([fault("unknown-tensor", text)], ledger.source.directory)
        ledger.drop("lm_head.weight", "the same as the verifier's head, which the draft reads")


def _eagle_name(name: str) -> str:
    """What version 0.1 calls the parts of an EAGLE draft, by EAGLE's own names."""
    old = next((old for old in _OLD_EAGLE if name.startswith(old)), None)
    return name if old is None else _OLD_EAGLE[old] + name.removeprefix(old)


def _flag(keys: Mapping[str, Any], key: str) -> Any:
    """What a key says, false where it says nothing; the schema refuses all but true and false."""
    return False if keys.get(key) is None else keys[key]


def _eagle_keys(ledger: Ledger, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Version 0.1's keys of an EAGLE draft as those of today: the layer's stand at the top level."""
    if raw.get("layernorms"):
        raise FormatError("config.json: layernorms is true, a norm before the layer that no EAGLE draft here has")
    layer = raw["transformer_layer_config"]
    if not isinstance(layer, Mapping) or layer.get("model_type", "llama") != "llama":
        text = "transformer_layer_config is no llama layer, which an EAGLE draft is made of"
        raise error_of([fault("layer-config", text)], "config.json")
    known = family_of("eagle", "config.json").config.model_fields
    fields = {key: value for key, value in layer.items() if key in known and key not in ("architectures", "dtype")}
    heads, hidden = layer.get("num_attention_heads"), layer.get("hidden_size")
    if fields.get("head_dim") is None and type(heads) is int and type(hidden) is int and heads > 0:
        fields["head_dim"] = hidden // heads
    if fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = heads
    theta = layer.get("rope_theta")
    if theta is None:
        ledger.note(f"no rope_theta is written; taken as {DEFAULT_ROPE_THETA:g}, as its producer's code does")
    scaling = layer.get("rope_scaling")
    if scaling is not None:
        raise FormatError(f"config.json: rope_scaling is {scaling!r}; write it as rope_parameters")
    ledger.note("keys and names of version 0.1 are written as those of today")
    return {
        "speculators_model_type": "eagle",
        "architectures": ["EagleDraftModel"],
        "speculators_config": raw.get("speculators_config"),
        "dtype": raw.get("dtype") or raw.get("torch_dtype"),
        "rope_parameters": {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA if theta is None else theta},
        "bias": _flag(raw, "fusion_bias"),
        "qkv_bias": _flag(layer, "attention_bias"),
        **fields,
    }
