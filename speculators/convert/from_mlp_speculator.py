"""IBM's accelerators: MLP speculators as fms-extras and its Hugging Face class write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from speculators.convert.dequantise import dequantise
from speculators.convert.dtypes import settle_dtype
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan, Ledger
from speculators.convert.source import SourceCheckpoint
from speculators.errors import FormatError
from speculators.formats.config import MAX_SPECULATIVE_TOKENS
from speculators.formats.faults import error_of, fault
from speculators.models.choices import completed
from speculators.models.family import VerifierShape
from speculators.models.mlp_speculator.config import MlpSpeculatorConfig

_WRAPPERS = ("module.", "model.", "speculator.")
# What IBM's classes take where a configuration says nothing.
_DEFAULTS: dict[str, Any] = {"inner_dim": 0, "n_candidates": 5, "tie_weights": False, "scale_input": False}
# Candidates of the first step; each further one has one fewer, which is IBM's 5, 4, 3 where there are three.
_WIDEST = 5
# Gates and projections of Snowflake's relatives, one of which `method` names too.
_ARCTIC = re.compile(r"(?:.*\.)?(?:(?:forget|input|output|cell)_(?:emb|ln|proj)|cell_ln|state_ln|projs|ln_state)\..*")


def plan(source: SourceCheckpoint, verifier: ConversionVerifier, options: ConvertOptions) -> CheckpointPlan:
    """Account for every tensor; FormatError where they are not what the configuration says, or of a relative."""
    options.require_only("an MLP speculator", "speculative_tokens", "dtype")
    _refuse_arctic(source)
    ledger, shape = Ledger(source.without_prefixes(*_WRAPPERS)), verifier.shape
    dequantise(ledger, source.config)
    fields = _fields(ledger, shape)
    tokens = options.speculative_tokens or fields["n_predict"]
    config = completed(MlpSpeculatorConfig, tokens, shape, **fields)
    _drop_copies(ledger, config)
    ledger.copy_all(config.expected_tensors())
    dtype = settle_dtype(ledger, options.dtype)
    return ledger.finish("mlp_speculator", config.model_copy(update={"dtype": dtype}))


def _refuse_arctic(source: SourceCheckpoint) -> None:
    said = [*(source.config.get("architectures") or ()), source.config.get("method"), source.config.get("model_type")]
    named = next((text for text in said if isinstance(text, str) and re.search("arctic|lstm", text, re.I)), None)
    named = named or next((name for name in source.tensors if _ARCTIC.fullmatch(name)), None)
    if named is not None or "tie_lstm_embs" in source.config:
        raise FormatError(
            f"{source.directory} is an Arctic speculator ({named or 'tie_lstm_embs'}), whose recurrence is gated as an "
            "LSTM's; no family here has it, and it is not converted"
        )


def _fields(ledger: Ledger, verifier: VerifierShape) -> dict[str, Any]:
    config = dict(ledger.source.config)
    for key, default in _DEFAULTS.items():
        if config.get(key) is None:
            config[key] = default
            ledger.note(f"no {key} is written; taken as {default!r}, as its producer's code does")
    steps = _count(config, "n_predict")
    if steps > MAX_SPECULATIVE_TOKENS:
        text = f"n_predict is {steps}; expected at most {MAX_SPECULATIVE_TOKENS}"
        raise error_of([fault("bad-value", text)], "config.json")
    if config.get("top_k_tokens_per_head") is None:
        config["top_k_tokens_per_head"] = [max(_WIDEST - step, 1) for step in range(steps)]
        ledger.note(f"no top_k_tokens_per_head is written; taken as {config['top_k_tokens_per_head']}")
    for key, found, of_verifier in (
        ("emb_dim", _count(config, "emb_dim"), verifier.hidden_size),
        ("vocab_size", _count(config, "vocab_size"), verifier.vocab_size),
    ):
        if found != of_verifier:
            text = f"{key} is {found}; that of {verifier.name_or_path} is {of_verifier}: is it this verifier's draft?"
            raise error_of([fault("verifier-mismatch", text)], "config.json")
    if config.get("logit_scale") not in (None, 1, 1.0):
        raise FormatError(f"config.json: logit_scale is {config['logit_scale']!r}, which no head here has")
    kept = ("vocab_size", "emb_dim", "n_predict", "top_k_tokens_per_head", *_DEFAULTS)
    return {key: config[key] for key in kept}


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value <= 0:
        raise error_of([fault("bad-value", f"{key} is {value!r}; expected a whole number above 0")], "config.json")
    return value


def _drop_copies(ledger: Ledger, config: MlpSpeculatorConfig) -> None:
    """Of tied weights keep the first, having seen that the others are the same."""
    for name, original in config.copies().items():
        if not ledger.has(name):
            continue
        if not torch.equal(ledger.stored(name).read(), ledger.stored(original).read()):
            text = f"{name} differs from {original} although tie_weights is true: is it tie_weights false?"
            raise error_of([fault("contradiction", text)], ledger.source.directory)
        ledger.drop(name, f"the same as {original}, with which it is tied")
