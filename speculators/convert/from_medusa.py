"""Medusa heads: Medusa's own files, whole models trained with their heads, ModelOpt's heads, and the names vLLM has.

Three ways to name one network: `0.1.linear.weight` (head 0, layer 1) with `0.2.weight` as that head's output matrix,
the same behind a prefix, and vLLM's `blocks.0.layers.1.weight` with `lm_heads.0.weight`. The tensors say how many heads
and layers there are, since configurations are often out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from speculators.convert.dequantise import dequantise
from speculators.convert.dtypes import settle_dtype
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan, Ledger, PlannedTensor
from speculators.convert.source import DTYPE_OF_TORCH, SourceCheckpoint
from speculators.errors import FormatError
from speculators.formats.faults import error_of, fault
from speculators.formats.verifier_weights import EMBEDDING_NAMES, HEAD_NAMES
from speculators.models.choices import completed
from speculators.models.family import VerifierShape
from speculators.models.medusa.config import MedusaConfig

_PREFIX = r"(?:module\.)?(?:parallel_draft_heads\.)?(?:(?:medusa_heads?|heads)\.)?"
_NUMBERED = re.compile(_PREFIX + r"(\d+)\.(?:medusa_layers\.)?(\d+)\.(linear\.)?(weight|bias)")
_LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
# Layers that one copy of weights may stand for; no head has nearly as many.
_MOST_REPEATED = 64
_OUTPUT = re.compile(r"lm_heads\.(\d+)\.weight")
_SHARED, _MAP = "lm_head.weight", "token_map"
# Where a whole model keeps its own layers.
_OF_THE_VERIFIER = ("model.", "lm_head.")


@dataclass(frozen=True)
class _Heads:
    """What the names say: counts, whether layers have biases, whether each head has an output matrix of its own."""

    num_heads: int
    num_layers: int
    bias: bool
    own_outputs: bool


def plan(source: SourceCheckpoint, verifier: ConversionVerifier, options: ConvertOptions) -> CheckpointPlan:
    """Account for every tensor; FormatError where heads are not alike, not whole, or not this verifier's."""
    options.require_only("Medusa heads", "speculative_tokens", "dtype")
    ledger, shape = Ledger(source.renamed(_known_as)), verifier.shape
    dequantise(ledger, source.config)
    heads = _read_heads(ledger)
    _drop_verifier(ledger, heads, verifier)
    heads = _with_repeated_layers(ledger, heads)
    _require_agreement(ledger, heads)
    width = _width(ledger, shape)
    config = completed(
        MedusaConfig,
        options.speculative_tokens or heads.num_heads,
        shape,
        medusa_num_heads=heads.num_heads,
        medusa_num_layers=heads.num_layers,
        medusa_fc_bias=heads.bias,
        original_lm_head=not heads.own_outputs,
        hidden_size=width,
        vocab_size=shape.vocab_size,
        truncated_vocab_size=_drafted(ledger, heads, shape),
        base_model_name_or_path=shape.name_or_path,
    )
    _plan_outputs(ledger, config, verifier)
    ledger.copy_all(config.expected_tensors())
    _note_base(ledger, shape)
    dtype = settle_dtype(ledger, options.dtype)
    return ledger.finish("medusa", config.model_copy(update={"dtype": dtype}))


def _known_as(name: str) -> str:
    """A layer's or an output matrix' name in vLLM, which is ours; other names as they are."""
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return name.removeprefix("module.")
    head, layer, kind = int(match[1]), int(match[2]), match[4]
    # Without `linear` it is no layer but what stands behind the last one: the head's output.
    return f"blocks.{head}.layers.{layer}.{kind}" if match[3] else f"lm_heads.{head}.{kind}"


def _read_heads(ledger: Ledger) -> _Heads:
    layers = {(int(match[1]), int(match[2]), match[3]) for name in ledger.left if (match := _LAYER.fullmatch(name))}
    outputs = {int(match[1]) for name in ledger.left if (match := _OUTPUT.fullmatch(name))}
    if not layers:
        text = "no Medusa head is there; expected tensors such as 0.0.linear.weight"
        raise error_of([fault("missing-tensor", text)], ledger.source.directory)
    num_heads = 1 + max(head for head, _, _ in layers | {(head, 0, "") for head in outputs})
    num_layers = 1 + max(layer for _, layer, _ in layers)
    bias = any(kind == "bias" for _, _, kind in layers)
    kinds = ("weight", "bias") if bias else ("weight",)
    wanted = [(head, layer, kind) for head in range(num_heads) for layer in range(num_layers) for kind in kinds]
    missing = [
        f"blocks.{head}.layers.{layer}.{kind}" for head, layer, kind in wanted if (head, layer, kind) not in layers
    ]
    if outputs:
        missing += [f"lm_heads.{head}.weight" for head in range(num_heads) if head not in outputs]
    if missing:
        text = "{} is missing; the heads have to be alike"
        raise error_of([fault("missing-tensor", text.format(name)) for name in missing], ledger.source.directory)
    return _Heads(num_heads, num_layers, bias, bool(outputs))


def _drop_verifier(ledger: Ledger, heads: _Heads, verifier: ConversionVerifier) -> None:
    """Leave out the model that heads were saved with, which has to be the verifier."""
    own = [name for name in ledger.left if name.startswith(_OF_THE_VERIFIER)]
    if not heads.own_outputs and _SHARED in own and len(own) == 1:
        return
    _require_same_model(ledger, own, verifier)
    for name in own:
        if heads.own_outputs or name != _SHARED:
            ledger.drop(name, "a weight of the model that the heads were saved with, which is the verifier")


def _require_same_model(ledger: Ledger, own: list[str], verifier: ConversionVerifier) -> None:
    if not own:
        return
    if not verifier.is_here:
        ledger.note(
            "the heads were saved with the whole model that they were trained with; whether it is the verifier could "
            "not be seen without its weights"
        )
        return
    known = dict.fromkeys(EMBEDDING_NAMES, "embed_tokens") | dict.fromkeys(HEAD_NAMES, "lm_head")
    for name in (name for name in own if name in known):
        if not torch.equal(ledger.stored(name).read(), getattr(verifier.weights, known[name])):
            text = f"{name} is another than the {known[name]} of {verifier.name_or_path}"
            hint = "the heads were trained with the model beside them: give that as the verifier"
            raise error_of([fault("verifier-mismatch", f"{text}; {hint}")], ledger.source.directory)


def _with_repeated_layers(ledger: Ledger, heads: _Heads) -> _Heads:
    """Medusa's own code gives all layers of a head one set of weights, of which a file may hold one copy."""
    stored = [ledger.stored(name).name for name in ledger.left if _OUTPUT.fullmatch(name)]
    places = {int(match[2]) for name in stored if (match := _NUMBERED.fullmatch(name))}
    said = _count(ledger.source.config, "medusa_num_layers", "num_hidden_layers")
    if places in (set(), {heads.num_layers}):
        return heads
    if heads.num_layers != 1 or said is None or places != {said} or said > _MOST_REPEATED:
        text = f"output matrices have the numbers {sorted(places)} and each head {heads.num_layers} layers"
        hint = "expected one number, that of the layers before it"
        raise error_of([fault("missing-tensor", f"{text}; {hint}")], ledger.source.directory)
    for name in [name for name in ledger.left if _LAYER.fullmatch(name)]:
        for layer in range(1, said):
            again = name.replace(".layers.0.", f".layers.{layer}.")
            ledger.plan(again, PlannedTensor.copy(ledger.stored(name)), f"{name}: the layers of a head are one")
    return _Heads(heads.num_heads, said, heads.bias, heads.own_outputs)


def _require_agreement(ledger: Ledger, heads: _Heads) -> None:
    config = ledger.source.config
    for what, found, said in (
        ("heads", heads.num_heads, _count(config, "medusa_num_heads", "num_heads")),
        ("layers a head", heads.num_layers, _count(config, "medusa_num_layers", "num_hidden_layers")),
    ):
        if said is None or said == found:
            continue
        if what == "heads" and said < found:
            ledger.note(f"the configuration says {said} heads; there are {found}, and all are kept")
            continue
        text = f"the configuration says {said} {what}; the tensors have {found}"
        raise error_of([fault("contradiction", text)], ledger.source.directory)
    for key, known in (("medusa_fc_bias", heads.bias), ("original_lm_head", not heads.own_outputs)):
        if config.get(key) not in (None, known):
            text = f"{key} is {config[key]!r}; by the tensors it is {known}"
            raise error_of([fault("contradiction", text)], ledger.source.directory)
    scale = config.get("logit_scale")
    if scale not in (None, 1, 1.0):
        raise FormatError(f"config.json: logit_scale is {scale!r}, which heads here do not have; it is not converted")


def _count(config: Mapping[str, Any], *keys: str) -> int | None:
    value = next((config[key] for key in keys if config.get(key) is not None), None)
    if value is not None and (type(value) is not int or value <= 0):
        raise error_of([fault("bad-value", f"{keys[0]} is {value!r}; expected a whole number above 0")], "config.json")
    return value


def _width(ledger: Ledger, verifier: VerifierShape) -> int:
    shape = ledger.stored("blocks.0.layers.0.weight").shape
    if shape != (verifier.hidden_size,) * 2:
        text = f"a layer is {list(shape)}; {verifier.name_or_path} is {verifier.hidden_size} wide"
        raise error_of([fault("verifier-mismatch", f"{text}: is it this verifier's draft?")], ledger.source.directory)
    return verifier.hidden_size


def _drafted(ledger: Ledger, heads: _Heads, verifier: VerifierShape) -> int:
    """Tokens that the heads can propose: rows of their output matrices."""
    name = "lm_heads.0.weight" if heads.own_outputs else _SHARED
    rows = ledger.stored(name).shape[0] if ledger.has(name) else verifier.vocab_size
    if rows > verifier.vocab_size:
        text = f"{name} has {rows} rows; {verifier.name_or_path} has {verifier.vocab_size} tokens"
        raise error_of([fault("verifier-mismatch", f"{text}: is it this verifier's draft?")], ledger.source.directory)
    said = ledger.source.config.get("truncated_vocab_size")
    if said not in (None, rows):
        text = f"truncated_vocab_size is {said!r}; the heads have {rows} tokens"
        raise error_of([fault("contradiction", text)], ledger.source.directory)
    if rows < verifier.vocab_size and not ledger.has(_MAP):
        text = f"{name} has {rows} rows of the verifier's {verifier.vocab_size}, and no {_MAP} says which"
        raise error_of([fault("no-d2t", text)], ledger.source.directory)
    return rows


def _plan_outputs(ledger: Ledger, config: MedusaConfig, verifier: ConversionVerifier) -> None:
    """Output matrices, their rows in the order of the verifier's ids, and the map."""
    order = _plan_map(ledger, config)
    names = [name for name in config.expected_tensors() if name.startswith(("lm_heads.", _SHARED))]
    if names == [_SHARED] and not ledger.has(_SHARED):
        weights = verifier.weights.lm_head
        dtype = ledger.stored("blocks.0.layers.0.weight").dtype
        made = PlannedTensor(tuple(weights.shape), DTYPE_OF_TORCH[weights.dtype], lambda: weights).stored_as(dtype)
        ledger.plan(_SHARED, made, f"the output head of {verifier.name_or_path}, which the heads share")
        return
    if order is None:
        return
    for name in names:
        stored = ledger.take(name)
        ledger.plan(name, PlannedTensor(stored.shape, stored.dtype, partial(_reordered, stored.read, order)))


def _plan_map(ledger: Ledger, config: MedusaConfig) -> Tensor | None:
    """Take the map; return the order of its ids where it is not ascending, as it is here."""
    if not ledger.has(_MAP):
        return None
    stored = ledger.stored(_MAP)
    if stored.dtype not in ("I64", "I32") or stored.shape != (config.truncated_vocab_size,):
        text = f"{_MAP} is {stored.dtype} {list(stored.shape)}; expected an id for each of the heads' rows"
        raise error_of([fault("d2t-invalid", f"{text}, {config.truncated_vocab_size}")], ledger.source.directory)
    ids = stored.read().long()
    if ids.unique().numel() != ids.numel() or int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        text = f"{_MAP} starts {ids[:4].tolist()}; expected each id once, within 0..{config.vocab_size - 1}"
        raise error_of([fault("d2t-invalid", text)], ledger.source.directory)
    order = ids.argsort()
    ascending = bool((order == torch.arange(len(ids))).all())
    if config.truncated_vocab_size == config.vocab_size:
        ledger.drop(_MAP, "the heads have the whole vocabulary, and need no map")
    else:
        ledger.take(_MAP)
        ledger.plan(_MAP, PlannedTensor(stored.shape, "I64", lambda: ids[order]))
    if ascending:
        return None
    ledger.note(f"{_MAP} was not ascending; its ids and the rows of the output matrices are sorted alike")
    return order


def _reordered(read: Callable[[], Tensor], order: Tensor) -> Tensor:
    return read().index_select(0, order)


def _note_base(ledger: Ledger, verifier: VerifierShape) -> None:
    said = ledger.source.config.get("base_model_name_or_path")
    if said not in (None, verifier.name_or_path):
        ledger.note(f"the configuration names the verifier {said!r}; {verifier.name_or_path!r} is written")
