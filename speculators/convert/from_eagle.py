"""EAGLE-1, EAGLE-2 and HASS drafts, which share one layout; what varies is told by tensors, never by who wrote them."""

from __future__ import annotations

from speculators.convert.decoder_layer import decoder_layer
from speculators.convert.dtypes import settle_dtype
from speculators.convert.from_eagle3 import opened, speculative_tokens
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan, Ledger
from speculators.convert.source import SourceCheckpoint
from speculators.errors import FormatError
from speculators.formats.decoder import DecoderConfig
from speculators.formats.faults import error_of, fault
from speculators.models.choices import completed
from speculators.models.eagle.config import LAYER_KEYS, EagleConfig
from speculators.models.family import VerifierShape

DEFAULT_TOKENS = 3
_NORMS = ("embed_layernorm", "post_embedding_layernorm")


def plan(source: SourceCheckpoint, verifier: ConversionVerifier, options: ConvertOptions) -> CheckpointPlan:
    """Account for every tensor; FormatError names what this network cannot do."""
    options.require_only("an EAGLE draft", "speculative_tokens", "dtype")
    ledger, shape = opened(source), verifier.shape
    shapes = {name: ledger.stored(name).shape for name in ledger.left}
    layer = decoder_layer(source.config, shapes, first_layer="layers.0", verifier=shape, note=ledger.note)
    _require_eagle(layer, shape)
    fields = {
        **{key: getattr(layer, key) for key in LAYER_KEYS},
        "bias": _fc_bias(ledger),
        "qkv_bias": layer.attention_bias,
        **{name: ledger.has(f"{name}.weight") for name in _NORMS},
    }
    if len({fields[name] for name in _NORMS}) > 1:
        there, absent = sorted(_NORMS, key=lambda name: not fields[name])
        ledger.note(f"{there}.weight is there without {absent}.weight, which producers train together; is it lost?")
    _drop_zero_biases(ledger, layer)
    config = completed(EagleConfig, speculative_tokens(ledger, options, DEFAULT_TOKENS), shape, **fields)
    ledger.copy_all(config.expected_tensors())
    dtype = settle_dtype(ledger, options.dtype)
    if "embed_tokens.weight" not in ledger.planned:
        ledger.note("no embeddings are stored; the verifier's are used")
    return ledger.finish("eagle", config.model_copy(update={"dtype": dtype}))


def _require_eagle(layer: DecoderConfig, verifier: VerifierShape) -> None:
    if layer.hidden_size != verifier.hidden_size:
        text = f"the draft is {layer.hidden_size} wide; {verifier.name_or_path} is {verifier.hidden_size}"
        raise error_of([fault("verifier-mismatch", text)], "config.json")
    if layer.model_type != "llama":
        raise FormatError(
            "the attention normalises queries and keys, which an EAGLE draft does not; it is not converted"
        )
    if "sliding_attention" in layer.layer_types:
        raise FormatError("config.json: layer_types has sliding_attention, which an EAGLE draft does not have")


def _fc_bias(ledger: Ledger) -> bool:
    found, said = ledger.has("fc.bias"), ledger.source.config.get("bias")
    if said is found or (said is None and found):
        return found
    if said is None:
        text = "fc.bias is missing, and its producer takes bias as true where it is not written; write bias false if so"
        raise error_of([fault("missing-tensor", text)], ledger.source.directory)
    text = f"bias is {said!r}, and fc.bias is {'there' if found else 'missing'}"
    raise error_of([fault("contradiction", text)], "config.json")


def _drop_zero_biases(ledger: Ledger, layer: DecoderConfig) -> None:
    for index in range(layer.num_hidden_layers):
        name = f"layers.{index}.self_attn.o_proj.bias"
        if not ledger.has(name):
            continue
        if ledger.stored(name).read().any():
            raise FormatError(
                f"{ledger.source.directory}: {name} is not zero; the output of an EAGLE layer has no bias"
            )
        ledger.drop(name, "zeros, and the output of an EAGLE layer has no bias")
