"""P-EAGLE drafts: EAGLE-3's tensors, several layers, and the state of positions that are not known yet."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from speculators.convert.from_eagle3 import OPTIONS, finished, fused_parts, opened, speculative_tokens
from speculators.convert.layer_ids import lookup
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan, Ledger, PlannedTensor
from speculators.convert.source import SourceCheckpoint, SourceTensor
from speculators.errors import FormatError
from speculators.formats.faults import error_of, fault
from speculators.models.choices import completed
from speculators.models.peagle.config import PEagleConfig

DEFAULT_TOKENS = 8
# Where producers write the token whose embedding unknown tokens have.
_MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token", "eagle_config.mask_token_id")


def plan(source: SourceCheckpoint, verifier: ConversionVerifier, options: ConvertOptions) -> CheckpointPlan:
    """Account for every tensor; FormatError names what this network cannot do."""
    options.require_only("a P-EAGLE draft", *OPTIONS, "norm_before_fc", "fc_norm", "mask_token_id")
    ledger, shape = opened(source), verifier.shape
    parts = fused_parts(ledger, shape, options)
    if not ledger.has("mask_hidden"):
        raise error_of([fault("missing-tensor", "mask_hidden is missing")], source.directory)
    hidden = ledger.take("mask_hidden")
    width = len(parts.ids.written) * shape.hidden_size
    if hidden.shape not in ((width,), (1, width), (1, 1, width)):
        text = f"mask_hidden is {list(hidden.shape)}; expected {width} numbers, the width of the features"
        raise error_of([fault("tensor-shape", text)], source.directory)
    ledger.plan("mask_hidden", PlannedTensor((1, 1, width), hidden.dtype, partial(_reshaped, hidden, width)))
    trained = ledger.has("embed_tokens.weight")
    if not trained:
        ledger.note("no embeddings are stored, that of the mask token among them; the verifier's are used")
    tokens = speculative_tokens(ledger, options, DEFAULT_TOKENS)
    mask = _mask_token(ledger, options)
    fields = {**parts.fields, "mask_token_id": mask, "embed_requires_grad": trained}
    return finished(ledger, completed(PEagleConfig, tokens, shape, **fields), parts.ids, options)


def _reshaped(hidden: SourceTensor, width: int) -> Tensor:
    return hidden.read().reshape(1, 1, width)


def _mask_token(ledger: Ledger, options: ConvertOptions) -> int:
    found = {path: lookup(ledger.source.config, path) for path in _MASK_TOKENS}
    found = {path: token for path, token in found.items() if token is not None}
    if options.mask_token_id is not None:
        return options.mask_token_id
    if not found:
        raise FormatError(
            f"{ledger.source.directory} names no mask token ({', '.join(_MASK_TOKENS)}); give mask_token_id"
        )
    token = next(iter(found.values()))
    if len(set(map(repr, found.values()))) > 1 or type(token) is not int:
        said = ", ".join(f"{path} {value!r}" for path, value in found.items())
        raise FormatError(f"config.json: {said}; expected one token id: give mask_token_id")
    return token
