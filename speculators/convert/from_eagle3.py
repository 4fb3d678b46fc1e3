"""EAGLE-3 drafts of SafeAILab, SpecForge, AngelSlim, NVIDIA's ModelOpt, DeepSpec and whoever writes like them.

One network under two names of its first layer (`midlayer`, `layers.0`). What the producers disagree on and no file says
takes the convention of most of them, with a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from speculators.convert.decoder_layer import decoder_layer, output_bias_missing
from speculators.convert.dequantise import dequantise
from speculators.convert.detect import WRAPPERS
from speculators.convert.dtypes import settle_dtype
from speculators.convert.layer_ids import eagle3_default, lookup, read_layer_ids
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan, LayerIdReading, Ledger, PlannedTensor
from speculators.convert.source import SourceCheckpoint
from speculators.convert.vocabulary import plan_vocabulary
from speculators.errors import FormatError, UsageError
from speculators.formats.decoder import DecoderConfig
from speculators.formats.faults import error_of, fault
from speculators.models.choices import completed
from speculators.models.eagle3.config import Eagle3Config, FusedDraftConfig
from speculators.models.family import VerifierShape

DEFAULT_TOKENS = 3
OPTIONS = ("aux_layer_ids", "layer_ids_mean", "d2t_holds", "speculative_tokens", "norm_before_residual", "dtype")
_NORMS = ("norm_before_fc", "fc_norm", "norm_output")
# Numbers of drafted tokens in producers' configurations.
_TOKENS = ("num_speculative_tokens", "ttt_length")
# Switches of `eagle_config`, the value that this network has, and what the other one means.
_SWITCHES = {
    "use_aux_hidden_state": (True, "the draft reads the verifier's last state instead of fused features"),
    "use_input_layernorm_in_first_layer": (True, "the first layer does not normalise its embeddings"),
    "use_last_layernorm": (True, "the head reads states that no norm has seen"),
    "use_mtp_layernorm": (False, "the features pass through norms of an MTP block"),
    "next_layer_regular": (True, "layers after the first read embeddings too"),
}


@dataclass(frozen=True)
class FusedParts:
    """What the descendants of EAGLE-3 read alike: keys of their configuration, and the layers that feed them."""

    fields: dict[str, Any]
    ids: LayerIdReading


def plan(source: SourceCheckpoint, verifier: ConversionVerifier, options: ConvertOptions) -> CheckpointPlan:
    """Account for every tensor; FormatError names what this network cannot do."""
    options.require_only("an EAGLE-3 draft", *OPTIONS, *_NORMS)
    ledger, shape = opened(source), verifier.shape
    parts = fused_parts(ledger, shape, options)
    parts.fields["norm_output"] = _norm_output(source.config, options, fc_norm=parts.fields["fc_norm"])
    tokens = speculative_tokens(ledger, options, DEFAULT_TOKENS)
    config = completed(Eagle3Config, tokens, shape, **parts.fields)
    return finished(ledger, config, parts.ids, options)


def opened(source: SourceCheckpoint) -> Ledger:
    """A ledger of the tensors under their own names, with quantised ones decoded; refuses what no name can say."""
    ledger = Ledger(source.without_prefixes(*WRAPPERS))
    heads = any(name.startswith("parallel_draft_heads.") for name in ledger.left)
    if heads or lookup(source.config, "eagle_config.parallel_draft_heads_num_layers") not in (None, 0):
        raise FormatError(f"{source.directory} has parallel draft heads, which no family here has; it is not converted")
    if any(file.name.startswith("adapter_model.") for file in source.side_files):
        ledger.note("an adapter of the verifier lies beside the draft, which was trained with it: serve both")
    dequantise(ledger, source.config)
    return ledger


def fused_parts(ledger: Ledger, verifier: VerifierShape, options: ConvertOptions) -> FusedParts:
    """Read the configuration against the tensors, and take the vocabulary's maps."""
    config = ledger.source.config
    _require_network(config, ledger)
    first = first_layer(ledger)
    shapes = {name: ledger.stored(name).shape for name in ledger.left}
    layer = decoder_layer(config, shapes, first_layer=first, verifier=verifier, note=ledger.note)
    width = _verifier_width(config, layer, verifier)
    ids = _layer_ids(ledger, options, verifier, shapes.get("fc.weight", ()), width)
    draft_size = _draft_size(config, shapes, verifier.vocab_size)
    plan_vocabulary(ledger, draft_size, verifier.vocab_size, options.d2t_holds)
    fields = {
        "transformer_layer_config": layer,
        "draft_vocab_size": draft_size,
        "target_hidden_size": width,
        "embed_requires_grad": width is not None,
        "eagle_aux_hidden_state_layer_ids": list(ids.written),
        "norm_before_residual": _norm_before_residual(ledger, options),
        "norm_before_fc": _flag(ledger, options, "norm_before_fc", "input_norm.weight"),
        "fc_norm": _flag(ledger, options, "fc_norm", "fc_norm.0.weight"),
    }
    return FusedParts(fields, ids)


def first_layer(ledger: Ledger) -> str:
    """What the layer is called that reads embeddings beside states."""
    return "midlayer" if any(name.startswith("midlayer.") for name in ledger.left) else "layers.0"


def finished(ledger: Ledger, config: FusedDraftConfig, ids: LayerIdReading, options: ConvertOptions) -> CheckpointPlan:
    """Take the tensors that the configuration expects, bring them to one dtype and close the ledger."""
    first, layer = first_layer(ledger), config.transformer_layer_config
    for target in config.expected_tensors():
        name = target if first == "layers.0" else _midlayer(target)
        if ledger.has(name) and target not in ledger.planned:
            ledger.copy(name, target)
    _add_zero_biases(ledger, layer)
    dtype = settle_dtype(ledger, options.dtype)
    if "embed_tokens.weight" not in ledger.planned:
        ledger.note("no embeddings are stored; the verifier's are used")
    if "lm_head.weight" not in ledger.planned:
        ledger.note("no head is stored; the verifier's is used")
    return ledger.finish(config.speculators_model_type, config.model_copy(update={"dtype": dtype}), ids)


def speculative_tokens(ledger: Ledger, options: ConvertOptions, default: int) -> int:
    """Tokens a step: the user's, the configuration's, or the default with a note."""
    config = ledger.source.config
    said = next((config[key] for key in _TOKENS if type(config.get(key)) is int and config[key] > 0), None)
    if options.speculative_tokens is None and said is None:
        ledger.note(f"the number of tokens to draft is not written; taken as {default}")
    return options.speculative_tokens or said or default


def _midlayer(target: str) -> str:
    return target.replace("layers.0.", "midlayer.", 1) if target.startswith("layers.0.") else target


def _require_network(config: Mapping[str, Any], ledger: Ledger) -> None:
    for key, (ours, otherwise) in _SWITCHES.items():
        said = lookup(config, f"eagle_config.{key}")
        if said is not None and said is not ours:
            raise FormatError(
                f"{ledger.source.directory}: eagle_config.{key} is {said!r}: {otherwise}, which no family here "
                "does; it is not converted"
            )
    for name in ("fc.weight", "norm.weight"):
        if not ledger.has(name):
            raise error_of([fault("missing-tensor", f"{name} is missing")], ledger.source.directory)


def _verifier_width(config: Mapping[str, Any], layer: DecoderConfig, verifier: VerifierShape) -> int | None:
    said = config.get("target_hidden_size")
    if said not in (None, verifier.hidden_size):
        text = f"target_hidden_size is {said}; {verifier.name_or_path} is {verifier.hidden_size} wide"
        raise error_of([fault("verifier-mismatch", text)], "config.json")
    return None if layer.hidden_size == verifier.hidden_size else verifier.hidden_size


def _layer_ids(
    ledger: Ledger, options: ConvertOptions, verifier: VerifierShape, fc: tuple[int, ...], width: int | None
) -> LayerIdReading:
    feature = width or verifier.hidden_size
    count, rest = divmod(fc[1] if len(fc) == 2 else 0, feature)
    if rest or not count:
        text = f"fc.weight is {list(fc)}; expected a multiple of the verifier's {feature} as its columns"
        raise error_of([fault("fc-width", text)], ledger.source.directory)
    said = ledger.source.config.get("num_aux_hidden_states")
    if said not in (None, count):
        text = f"num_aux_hidden_states is {said}; fc.weight reads {count} layers"
        raise error_of([fault("num-aux-hidden-states", text)], "config.json")
    default = eagle3_default(verifier.num_hidden_layers)
    ids = read_layer_ids(ledger.source.config, options, default, verifier.num_hidden_layers)
    if len(ids.written) != count:
        text = f"fc.weight reads {count} layers; {ids.source} names {list(ids.written)}: give aux_layer_ids"
        raise error_of([fault("layer-ids", text)], ledger.source.directory)
    if ids.source == "default":
        ledger.note(
            f"the layers that feed the draft are not written; taken as depths {list(ids.written)}, the default of "
            "every producer of such drafts"
        )
    return ids


def _draft_size(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], vocab_size: int) -> int:
    head, said = shapes.get("lm_head.weight"), config.get("draft_vocab_size")
    found = head[0] if head else vocab_size
    if head is None and (said or vocab_size) != vocab_size:
        text = f"lm_head.weight is missing, and draft_vocab_size {said} is not the verifier's {vocab_size}"
        raise error_of([fault("no-lm-head", text)], "config.json")
    if said not in (None, found):
        text = f"draft_vocab_size is {said}; lm_head.weight has {found} rows"
        raise error_of([fault("contradiction", text)], "config.json")
    return found


def _norm_before_residual(ledger: Ledger, options: ConvertOptions) -> bool:
    config = ledger.source.config
    said = config.get("norm_before_residual", lookup(config, "eagle_config.norm_before_residual"))
    if options.norm_before_residual is not None:
        return options.norm_before_residual
    if isinstance(said, bool):
        return said
    if said is not None:
        text = f"norm_before_residual is {said!r}; expected true or false"
        raise error_of([fault("bad-value", text)], "config.json")
    ledger.note(
        "norm_before_residual is not written; taken as false, as SafeAILab, SpecForge, AngelSlim and DeepSpec train. "
        "Heads that NVIDIA exports from Megatron need true"
    )
    return False


def _flag(ledger: Ledger, options: ConvertOptions, key: str, tensor: str) -> bool:
    """Whether a norm is there, which its tensor tells; nobody may say otherwise."""
    found, said = ledger.has(tensor), ledger.source.config.get(key)
    if getattr(options, key) not in (None, found):
        raise UsageError(f"{key} is {getattr(options, key)}; {tensor} is {'there' if found else 'not there'}")
    if isinstance(said, bool) and said is not found:
        text = f"{key} is {said}, and {tensor} is {'there' if found else 'missing'}"
        raise error_of([fault("contradiction", text)], "config.json")
    return found


def _norm_output(config: Mapping[str, Any], options: ConvertOptions, *, fc_norm: bool) -> bool:
    """Whether a step takes the state after the norm.

    SpecForge's key of this name says that the head reads normed states, as it always does here; only in an EAGLE-3.1,
    which has a norm a feature too, it says that the next step does as well.
    """
    if options.norm_output is not None:
        return options.norm_output
    said = config.get("norm_output")
    if said is False:
        raise FormatError(
            "config.json: norm_output is false: to SpecForge the head reads states that no norm has seen, which is not "
            "converted; to vLLM the next step takes the state before the norm: if that is meant, give norm_output false"
        )
    return fc_norm and said is True


def _add_zero_biases(ledger: Ledger, layer: DecoderConfig) -> None:
    shapes = {name: tensor.shape for name, tensor in ledger.planned.items()}
    for index in range(layer.num_hidden_layers):
        attention = f"layers.{index}.self_attn"
        if output_bias_missing(layer, shapes, attention):
            like = ledger.planned[f"{attention}.q_proj.bias"].dtype
            zeros = PlannedTensor.zeros((layer.hidden_size,), like)
            ledger.plan(f"{attention}.o_proj.bias", zeros, "zeros, as the output projection has no bias")
