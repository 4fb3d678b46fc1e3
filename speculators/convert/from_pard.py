"""PARD drafts: small language models that were taught to draft all tokens of a step in one pass.

No speculator family is made of one. Its model and tokenizer are kept as they are, beside a file that says how it drafts
and for which verifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from speculators.convert.detect import WRAPPERS
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan, Ledger
from speculators.convert.source import SourceCheckpoint
from speculators.errors import FormatError
from speculators.formats.checkpoint import DTYPE_NAMES
from speculators.formats.config import VerifierConfig
from speculators.formats.draft_model_file import DRAFT_MODEL_FILE, DraftModelFile
from speculators.formats.faults import Fault, error_of, fault
from speculators.formats.hub import one_line
from speculators.runtime.description import ModelDescription
from speculators.runtime.proposers.draft_model import draft_vocabulary

MASK_KEY, OTHER_MASK_KEYS = "pard_token", ("mask_token_id", "ptd_token_id")
# As many as its authors serve it with.
DEFAULT_TOKENS = 12
# What makes a directory a model besides configuration and weights.
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json"),
    "generation_config.json",
)
# What transformers raises over values that no model has, in the configuration or on the way to its layers.
_NO_MODEL = (
    ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, ImportError, AssertionError,
    StrictDataclassError,
)  # fmt: skip
_SECOND_PROJECTION = "target_proj.weight"


def plan(source: SourceCheckpoint, verifier: ConversionVerifier, options: ConvertOptions) -> CheckpointPlan:
    """Account for a PARD model's tensors; FormatError names what it cannot be served for.

    Where the verifier is here, EngineError names the first token that its tokenizer and the draft's disagree about.
    """
    options.require_only("a PARD draft", "speculative_tokens", "mask_token_id")
    config = source.config
    _refuse_second(source)
    if config.get("quantization_config") is not None:
        raise FormatError("config.json: the draft is quantised (quantization_config); give the model it was made from")
    mask = _mask_token_id(config, options)
    ledger = Ledger(_as_model(source))
    _account(ledger, _empty_model(source))
    if verifier.is_here:
        draft_vocabulary(ModelDescription(verifier.name_or_path), ModelDescription(str(source.directory)))
    if options.speculative_tokens is None:
        ledger.note(f"how many tokens a step drafts is not written; taken as {DEFAULT_TOKENS}, as its authors serve it")
    ours = DraftModelFile(
        num_speculative_tokens=options.speculative_tokens or DEFAULT_TOKENS,
        parallel_drafting=True,
        verifier=VerifierConfig(name_or_path=verifier.name_or_path, architectures=list(verifier.shape.architectures)),
    )
    return ledger.finish_foreign(
        "pard",
        {**config, MASK_KEY: mask},
        files={DRAFT_MODEL_FILE: ours.to_json()},
        copies=tuple(file for name in _COPIED if (file := source.directory / name).is_file()),
    )


def _refuse_second(source: SourceCheckpoint) -> None:
    config = source.config
    projects = any(name.endswith(_SECOND_PROJECTION) for name in source.tensors)
    if projects or config.get("spd_type") == "pard2" or any(key.startswith("pard2") for key in config):
        raise FormatError(
            "a PARD-2 draft adds a projection of the verifier's hidden states (target_proj) to its embeddings; neither "
            "a draft model nor a family here does that, and without it this is not the draft that was trained, so it "
            "is not converted; the PARD draft of the same model is"
        )


def _mask_token_id(config: Mapping[str, Any], options: ConvertOptions) -> int:
    written = {key: config[key] for key in (MASK_KEY, *OTHER_MASK_KEYS) if config.get(key) is not None}
    found = list(written.values()) if options.mask_token_id is None else [options.mask_token_id]
    if not found:
        text = f"no {MASK_KEY} is written, the token that stands for one still to be drafted; give mask_token_id"
        raise error_of([fault("missing-key", text)], "config.json")
    if any(value != found[0] for value in [*found, *written.values()]):
        raise error_of([fault("contradiction", f"these mask tokens differ: {written or found}")], "config.json")
    size, mask = config.get("vocab_size"), found[0]
    if type(mask) is not int or type(size) is not int or not 0 <= mask < size:
        text = f"{MASK_KEY} is {mask!r}; expected a token id below vocab_size, {size!r}"
        raise error_of([fault("mask-token-id", text)], "config.json")
    return mask


def _as_model(source: SourceCheckpoint) -> SourceCheckpoint:
    """The source with the names that a saved model has, whatever wrappers put in front of them."""
    wrapped = tuple(prefix for prefix in WRAPPERS if prefix != "model.")
    return source.without_prefixes(*wrapped)


def _empty_model(source: SourceCheckpoint) -> PreTrainedModel:
    """The model that the configuration describes, without numbers; FormatError where transformers knows none."""
    kind = str(source.config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise FormatError(f"config.json: model_type is {kind!r}, which transformers has no model of; it cannot be run")
    layers, stored = source.config.get("num_hidden_layers"), len(source.tensors)
    if type(layers) is int and layers > stored:
        text = f"num_hidden_layers is {layers}; the weights have {stored} tensors"
        raise error_of([fault("contradiction", text)], "config.json")
    try:
        config = CONFIG_MAPPING[kind].from_dict(dict(source.config))
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except _NO_MODEL as error:
        raise FormatError(f"config.json describes no model that can be built: {one_line(error)}") from error
    return model


def _account(ledger: Ledger, model: PreTrainedModel) -> None:
    """Copy every tensor of the model; FormatError lists what is missing, misshapen or of an unknown dtype."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    required = {name for name, _ in model.named_parameters()}
    stored = ledger.source.tensors
    faults: list[Fault] = []
    for name, shape in shapes.items():
        if name not in stored:
            if name in required:
                faults.append(fault("missing-tensor", f"{name} is missing (expected shape {list(shape)})"))
            continue
        tensor = stored[name]
        if tensor.shape != shape:
            text = f"{name} has shape {list(tensor.shape)}; by config.json it is {list(shape)}"
            faults.append(fault("tensor-shape", text))
        if tensor.dtype not in DTYPE_NAMES:
            text = f"{name} is stored as {tensor.dtype}; expected {' or '.join(DTYPE_NAMES)}"
            faults.append(fault("tensor-dtype", text))
    if faults:
        raise error_of(faults, ledger.source.directory)
    _drop_tied(ledger, required, shapes)
    ledger.copy_all(shapes)


def _drop_tied(ledger: Ledger, required: set[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Leave out second copies of what the configuration ties, which a loaded model would not read."""
    for name in [name for name in shapes if name not in required and ledger.has(name)]:
        copies = [other for other in required if ledger.has(other) and shapes[other] == shapes[name]]
        tensor = ledger.source.tensors[name].read()
        if not any(torch.equal(tensor, ledger.source.tensors[other].read()) for other in copies):
            text = f"{name} differs from what tie_word_embeddings says that it is; correct one of the two"
            raise error_of([fault("contradiction", text)], ledger.source.directory)
        ledger.drop(name, "tied: equal to the embeddings, which are kept")
