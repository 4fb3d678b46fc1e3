"""What vLLM makes of a speculator directory: what it will read, and everything it would refuse or misread.

The rules are those of vLLM 0.32's speculators reader and draft classes. Nothing here loads torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from speculators.formats.checkpoint import (
    DTYPE_NAMES,
    STORED_AS,
    TensorHeader,
    account_for,
    read_config,
    read_header,
    text_config,
    weight_files,
)
from speculators.formats.config import SpeculatorConfig, TensorSpec
from speculators.formats.draft_model_file import no_speculator
from speculators.formats.faults import Fault, FaultsError, fault, shown
from speculators.formats.files import looks_like_path
from speculators.formats.salvage import FamilyConfig, read_in_spite
from speculators.formats.tensor_health import number_faults, read_integers, read_marked
from speculators.formats.vllm_reading import INSTEAD, SERVED, reading_of
from speculators.formats.vllm_traps import traps
from speculators.formats.vocab_map import map_fault


def describe_for_vllm(config: SpeculatorConfig, raw: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what vLLM would run: method, depth, verifier, draft class, features, and what reaches the draft.

    `raw` is the parsed `config.json` that the configuration was read from; without it, that which would be written.
    `differs` lists where that is not what the configuration means, as `ERROR F045 ...` lines. Of a type that vLLM
    cannot serve in this format, `served` is false, `method` and what depends on it are None, and `instead` says what to
    do.
    """
    written = config.to_json() if raw is None else raw
    kind = config.speculators_model_type
    reading: dict[str, Any] = {
        "served": kind in SERVED,
        "method": None,
        "parallel_drafting": False,
        "num_speculative_tokens": config.num_speculative_tokens,
        "model": config.verifier.name_or_path,
        "architecture": None,
        "runner": None,
        "capture_layer_ids": sorted(set(config.aux_layer_ids)),
        "num_aux_features": len(set(config.aux_layer_ids)),
        "mask_token_id": None,
        "causal_layers": None,
        "dflash_config": None,
        "draft": {},
        "layers": written.get("transformer_layer_config"),
    }
    reading |= reading_of(written) if kind in SERVED else {}
    return reading | {
        "differs": [str(item) for item in traps(written, config) if item.slug != "not-served"],
        "instead": INSTEAD.get(kind),
    }


def validate_directory(directory: str | os.PathLike[str], family_config: FamilyConfig) -> list[Fault]:
    """Return every fault of a speculator directory, those of the configuration first; an empty list means none.

    `family_config` gives the configuration class of a `speculators_model_type`, None for a type that is not known.
    """
    folder = Path(directory)
    try:
        raw = read_config(folder)
    except FaultsError as error:
        faults, raw, config = list(error.faults), {}, None
    else:
        other = no_speculator(folder) if "speculators_model_type" not in raw else None
        if other is not None:
            return [other]
        faults, config = _check_config(raw, family_config)
        named = {item.slug for item in faults}
        faults += [item for item in traps(raw, config) if item.slug not in named]
        faults += _check_verifier(raw, config)
    headers, complete = _read_files(folder, faults)
    if config is not None:
        faults += _account(headers, config.expected_tensors(), complete)
    faults += _check_numbers(headers, raw, config)
    return list(dict.fromkeys(faults))


def _check_config(raw: dict[str, Any], family_config: FamilyConfig) -> tuple[list[Fault], SpeculatorConfig | None]:
    kind = raw.get("speculators_model_type")
    family = family_config(kind) if isinstance(kind, str) and kind else None
    found: list[Fault] = []
    if isinstance(kind, str) and kind and (family is None or kind not in SERVED.keys() | INSTEAD.keys()):
        text = f"speculators_model_type is {shown(kind)}; expected one that vLLM and this version serve, such as eagle3"
        found.append(fault("unsupported-type", text))
    faults, config = read_in_spite(raw, family)
    return found + faults, config


def _check_verifier(raw: Mapping[str, Any], config: SpeculatorConfig | None) -> Iterator[Fault]:
    block = raw.get("speculators_config")
    verifier = block.get("verifier") if isinstance(block, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(name, str) or not name:
        return
    path = Path(os.path.expanduser(name))
    if not path.is_absolute():
        if looks_like_path(name) or os.path.isdir(path):
            text = f"verifier.name_or_path is the relative path {name!r}, resolved from wherever a server starts"
            yield fault("verifier-bare-path", f"{text}; write a hub id or an absolute path")
        return
    if not os.path.isfile(path / "config.json"):
        yield fault("verifier-not-found", f"the verifier {name!r} is not on this machine; a server there needs it")
        return
    if config is not None:
        yield from _compare_with_verifier(path, config)


def _compare_with_verifier(path: Path, config: SpeculatorConfig) -> Iterator[Fault]:
    try:
        verifier = text_config(read_config(path))
    except FaultsError as error:
        yield fault("verifier-mismatch", f"the verifier cannot be read: {error}")
        return
    depth = verifier.get("num_hidden_layers")
    too_deep = [item for item in config.aux_layer_ids if isinstance(depth, int) and item > depth]
    if too_deep:
        text = f"layer ids {too_deep} exceed the verifier's {depth} layers: they would never be captured"
        yield fault("verifier-mismatch", text)
    for key, ours in (
        ("hidden_size", config.verifier_hidden_size),
        ("vocab_size", config.verifier_vocab_size),
    ):
        theirs = verifier.get(key)
        if isinstance(theirs, int) and theirs != ours:
            yield fault("verifier-mismatch", f"the verifier's {key} is {theirs}; this speculator was made for {ours}")
    yield from _compare_context(verifier, config)


def _compare_context(verifier: Mapping[str, Any], config: SpeculatorConfig) -> Iterator[Fault]:
    served = SERVED.get(config.speculators_model_type)
    if served is None or not served.fills_blocks:
        return
    ours = config.to_json()["transformer_layer_config"]["max_position_embeddings"]
    theirs = verifier.get("max_position_embeddings")
    if isinstance(theirs, int) and ours < theirs:
        # Of other drafts vLLM raises the number to what it serves.
        text = f"max_position_embeddings is {ours}, the verifier's {theirs}, and vLLM does not raise it for this type"
        yield fault("context-short", f"{text}: serve no longer requests than that, or write the verifier's")


def _read_files(folder: Path, faults: list[Fault]) -> tuple[dict[str, TensorHeader], bool]:
    """Return the tensors of all readable weight files and whether these are all; what is wrong goes into `faults`."""
    headers: dict[str, TensorHeader] = {}
    complete = True
    try:
        files = weight_files(folder)
    except FaultsError as error:
        faults += error.faults
        return headers, False
    for file, named in files.items():
        try:
            found = read_header(file)
        except FaultsError as error:
            faults += error.faults
            complete = False
            continue
        headers |= found
        if named is not None and named != found.keys():
            text = f"{file.name} and its index disagree about {', '.join(sorted(named ^ found.keys())[:5])}"
            faults.append(fault("broken-index", text))
    for file in sorted(folder.glob("*.safetensors")):
        if file not in files:
            faults.append(fault("stray-weights", f"{file.name} would be loaded as part of the draft; remove it"))
    return headers, complete


def _account(
    headers: Mapping[str, TensorHeader], expected: Mapping[str, TensorSpec], complete: bool
) -> Iterator[Fault]:
    present = {name: spec for name, spec in expected.items() if name in headers}
    optional = {name: spec._replace(required=False) for name, spec in expected.items()}
    yield from account_for(headers, expected if complete else optional | present)


def _check_numbers(
    headers: Mapping[str, TensorHeader], raw: Mapping[str, Any], config: SpeculatorConfig | None
) -> Iterator[Fault]:
    layer = raw.get("transformer_layer_config")
    written = layer.get("vocab_size") if isinstance(layer, dict) else None
    vocab_size = written if config is None else config.verifier_vocab_size
    d2t, t2d = headers.get("d2t"), headers.get("t2d")
    if d2t is not None and d2t.dtype in STORED_AS["int"] and type(vocab_size) is int and d2t.shape != (vocab_size,):
        kept = read_marked(t2d) if t2d is not None and t2d.dtype == "BOOL" else None
        problem = map_fault(read_integers(d2t), vocab_size, kept)
        if problem is not None:
            yield problem
    expected = {} if config is None else config.expected_tensors()
    exact = {name for name, spec in expected.items() if spec.kind == "float32"}
    dtypes = {header.dtype for name, header in headers.items() if name not in exact}
    stored = sorted(DTYPE_NAMES[dtype] for dtype in dtypes if dtype in DTYPE_NAMES)
    if stored and raw.get("dtype") in DTYPE_NAMES.values() and stored != [raw["dtype"]]:
        text = f"dtype is {shown(raw['dtype'])} but the tensors are stored as {', '.join(stored)}; write the stored one"
        yield fault("dtype-differs", text)
    yield from number_faults(headers)
