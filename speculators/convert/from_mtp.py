"""A verifier's own MTP block as a speculator: from the verifier's checkpoint, of which nothing else is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from speculators.convert.dequantise import dequantise
from speculators.convert.dtypes import settle_dtype
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan, Ledger, PlannedTensor
from speculators.convert.source import SourceCheckpoint, SourceTensor
from speculators.formats.faults import error_of, fault
from speculators.formats.mtp_names import Change, NativeLayout, Origin, find_layout
from speculators.formats.verifier_weights import EMBEDDING_NAMES, VerifierWeights, load_verifier_weights
from speculators.models.family import VerifierShape
from speculators.models.mtp.draft import MtpDraft
from speculators.models.mtp.native import from_native

DEFAULT_TOKENS = 3
_TOKENS = "num_speculative_steps"
# Keys of other drafts' and other verifiers' configurations that change numbers, and the values at which they do not.
_FOREIGN = {
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
    "logit_scale": 1.0,
}
_LAYER = re.compile(r"(?:model\.|model\.language_model\.|language_model\.model\.)layers\.(\d+)\.")
_DENSE = re.compile(_LAYER.pattern + r"mlp\.up_proj\.weight")
_SAME = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")


def plan(source: SourceCheckpoint, verifier: ConversionVerifier, options: ConvertOptions) -> CheckpointPlan:
    """Account for every tensor; FormatError where there is no block, or one that is not understood or not whole."""
    options.require_only("an MTP block", "speculative_tokens", "dtype")
    ledger, shape = Ledger(source), verifier.shape
    own = VerifierShape.from_config_dict(source.config, str(source.directory))
    _require_same(own, shape)
    _require_widths(source, own.raw)
    _require_known_keys(own.raw)
    _require_rows(source, own)
    layout = find_layout(ledger.left, shape.num_hidden_layers)
    if layout is None:
        text = f"no MTP block is there behind its {shape.num_hidden_layers} layers; expected a verifier that has one"
        raise error_of([fault("missing-tensor", text)], source.directory)
    _require_all_layers(ledger, layout, shape)
    for name in [name for name in ledger.left if not name.startswith(layout.prefix)]:
        ledger.drop(name, "a weight of the verifier's own, which a speculator does not repeat")
    _drop_repeats(ledger, layout, verifier)
    dequantise(ledger, source.config)
    for name, origin in layout.origins(ledger.left).items():
        ledger.plan(name, _planned(name, origin, [ledger.take(part) for part in origin.names]))
    config = MtpDraft(num_speculative_tokens=_tokens(ledger, options)).resolve(shape)
    exact = [name for name, spec in config.expected_tensors().items() if spec.kind == "float32"]
    dtype = settle_dtype(ledger, options.dtype, exact)
    return ledger.finish("mtp", config.model_copy(update={"dtype": dtype}))


def _require_same(own: VerifierShape, verifier: VerifierShape) -> None:
    for key in _SAME:
        mine, theirs = getattr(own, key), getattr(verifier, key)
        if mine != theirs:
            text = f"{key} is {mine!r} beside the block and {theirs!r} in {verifier.name_or_path}"
            raise error_of([fault("verifier-mismatch", f"{text}: is it this verifier's block?")], "config.json")


def _require_rows(source: SourceCheckpoint, own: VerifierShape) -> None:
    for name in EMBEDDING_NAMES:
        rows = (source.shape(name) or (own.vocab_size,))[0]
        if rows != own.vocab_size:
            text = f"vocab_size is {own.vocab_size}, and {name} has {rows} rows"
            raise error_of([fault("contradiction", text)], "config.json")


def _require_widths(source: SourceCheckpoint, config: Mapping[str, Any]) -> None:
    """Refuse a width of the MLP that dense layers do not have, which a block of experts would carry along unread."""
    said = config.get("intermediate_size")
    for name, tensor in source.tensors.items():
        if _DENSE.fullmatch(name) and said is not None and tensor.shape[:1] != (said,):
            text = f"intermediate_size is {said!r}, and {name} is {list(tensor.shape)}"
            raise error_of([fault("contradiction", text)], "config.json")


def _require_known_keys(config: Mapping[str, Any]) -> None:
    for key in (key for key, neutral in _FOREIGN.items() if config.get(key) not in (None, neutral)):
        text = f"{key} is {config[key]!r}, which no MTP block has; is it the verifier's own configuration?"
        raise error_of([fault("contradiction", text)], "config.json")


def _require_all_layers(ledger: Ledger, layout: NativeLayout, verifier: VerifierShape) -> None:
    """Refuse a number of layers that is not the checkpoint's: it says where the block stands and what it is like."""
    others = [name for name in ledger.left if not name.startswith(layout.prefix)]
    found = {int(match[1]) for name in others if (match := _LAYER.match(name))}
    count = verifier.num_hidden_layers
    missing = next((index for index in range(count) if index not in found), None)
    wrong = min([index for index in found if index >= count], default=None) if missing is None else missing
    if found and wrong is not None:
        text = f"num_hidden_layers is {count}; layer {wrong} is {_there(wrong in found)}"
        raise error_of([fault("contradiction", text)], ledger.source.directory)


def _there(found: bool) -> str:
    return "there besides" if found else "missing"


def _drop_repeats(ledger: Ledger, layout: NativeLayout, verifier: ConversionVerifier) -> None:
    """Leave out the block's own embedding and head, having seen that they are the verifier's."""
    repeats = layout.repeats(ledger.left)
    if not repeats:
        return
    weights = _weights(ledger, verifier)
    for name, what in repeats.items():
        if not torch.equal(ledger.stored(name).read(), getattr(weights, what)):
            text = f"{name} is another than the verifier's {what}, which a draft here shares with it"
            raise error_of([fault("unknown-tensor", text)], ledger.source.directory)
        ledger.drop(name, f"the same as the verifier's {what}, which the draft shares")


def _weights(ledger: Ledger, verifier: ConversionVerifier) -> VerifierWeights:
    """Of the verifier, or of the same directory where that needs no download."""
    own = not verifier.is_here and any(name in ledger.source.tensors for name in EMBEDDING_NAMES)
    return load_verifier_weights(ledger.source.directory) if own else verifier.weights


def _tokens(ledger: Ledger, options: ConvertOptions) -> int:
    said = options.speculative_tokens or ledger.source.config.get(_TOKENS)
    if said is None:
        ledger.note(f"no {_TOKENS} is written; {DEFAULT_TOKENS} tokens a step are drafted")
        return DEFAULT_TOKENS
    if type(said) is not int or said <= 0:
        raise error_of([fault("bad-value", f"{_TOKENS} is {said!r}; expected a whole number above 0")], "config.json")
    return said


def _planned(name: str, origin: Origin, parts: list[SourceTensor]) -> PlannedTensor:
    """One of our tensors; experts are stacked while they are written, so that no more than one is held."""
    kinds = {(part.shape, part.dtype) for part in parts}
    if len(kinds) > 1:
        found = " and ".join(f"{dtype} {list(shape)}" for shape, dtype in sorted(kinds))
        raise error_of([fault("tensor-shape", f"experts of {name} are {found}; expected them alike")], "MTP block")
    (shape, dtype) = kinds.pop()
    if origin.change is Change.COPY:
        return PlannedTensor.copy(parts[0])
    if origin.change is Change.SWAP_HALVES:
        return PlannedTensor(shape, dtype, partial(_made, name, origin, parts[0].read))
    if len(shape) != 2:
        raise error_of([fault("tensor-shape", f"experts of {name} are {list(shape)}; expected matrices")], "MTP block")
    experts = len(parts) // (2 if origin.change is Change.STACK_PAIRS else 1)
    rows = shape[0] * len(parts) // experts
    return PlannedTensor.stacked((experts, rows, shape[1]), [PlannedTensor.copy(part) for part in parts])


def _made(name: str, origin: Origin, read: Callable[[], Tensor]) -> Tensor:
    return from_native({name: origin}, lambda _: read())[name]
