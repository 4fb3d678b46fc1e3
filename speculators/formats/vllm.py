"""What vLLM makes of a speculator directory: what it will read, and everything it would refuse or misread.

The rules are those of vLLM 0.32's speculators reader and EAGLE-3 loader. Nothing here loads torch.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError

from speculators.formats.checkpoint import (
    DTYPE_NAMES,
    TensorHeader,
    account_for,
    read_config,
    read_header,
    text_config,
    weight_files,
)
from speculators.formats.config import SpeculatorConfig, TensorSpec
from speculators.formats.decoder import DecoderConfig
from speculators.formats.faults import Fault, FaultsError, config_faults, fault, shown
from speculators.formats.files import looks_like_path
from speculators.formats.tensor_health import number_faults, read_int64, read_marked
from speculators.formats.vocab_map import map_fault

# speculators_model_type -> vLLM's method; peagle additionally switches parallel drafting on.
METHODS = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dflash2": "dflash", "dspark": "dspark"}
_CLASSES = {
    ("eagle3", "llama"): "Eagle3LlamaForCausalLM",
    ("eagle3", "qwen3"): "Eagle3Qwen3ForCausalLM",
    ("peagle", "llama"): "PeagleLlamaForCausalLM",
    ("peagle", "qwen3"): "PeagleQwen3ForCausalLM",
}
# Top-level keys that reach the draft model, with what vLLM takes where one is absent.
_FORWARDED: dict[str, dict[str, Any]] = {
    "eagle3": {
        "draft_vocab_size": None,
        "target_hidden_size": None,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    },
    "peagle": {
        "draft_vocab_size": None,
        "target_hidden_size": None,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "mask_token_id": None,
    },
}
_DEFAULT_AUX_FEATURES = 3

FamilyConfig = Callable[[str], type[SpeculatorConfig] | None]


def describe_for_vllm(config: SpeculatorConfig) -> dict[str, Any]:
    """Return what vLLM would run: method, depth, verifier, draft class, features, and what reaches the draft."""
    written = config.to_json()
    kind, layer = config.speculators_model_type, written["transformer_layer_config"]
    forwarded = {key: written.get(key, default) for key, default in _FORWARDED.get(kind, {}).items()}
    return {
        "method": METHODS.get(kind),
        "parallel_drafting": kind in ("peagle", "dflash", "dflash2", "dspark"),
        "num_speculative_tokens": config.num_speculative_tokens,
        "model": config.verifier.name_or_path,
        "architecture": _CLASSES.get((kind, layer["model_type"])),
        "capture_layer_ids": sorted(set(config.aux_layer_ids)),
        "num_aux_features": _aux_features(written, config.aux_layer_ids),
        "draft": forwarded,
        "layers": layer,
    }


def _aux_features(config: Mapping[str, Any], layer_ids: list[int]) -> int:
    """Return how many features vLLM's draft expects; llama-type layers never look at the list of layer ids."""
    layer = config.get("transformer_layer_config")
    layer = layer if isinstance(layer, dict) else {}
    keys = (
        ("num_aux_hidden_states",)
        if layer.get("model_type") == "llama"
        else ("num_aux_layers", "num_aux_hidden_states")
    )
    given = next((layer[key] for key in keys if isinstance(layer.get(key), int)), None)
    if given is not None:
        return int(given)
    return _DEFAULT_AUX_FEATURES if layer.get("model_type") == "llama" else len(layer_ids)


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
        faults, config = _check_config(raw, family_config)
        faults += _what_vllm_misreads(raw, config)
        faults += _check_verifier(raw, config)
    headers, complete = _read_files(folder, faults)
    if config is not None:
        faults += _account(headers, config.expected_tensors(), complete)
    faults += _check_numbers(headers, raw)
    return list(dict.fromkeys(faults))


class _AnyFamily(SpeculatorConfig):
    """What all families have in common; keys of a family that is not known are not judged."""

    model_config = ConfigDict(extra="ignore")

    transformer_layer_config: DecoderConfig

    @property
    def verifier_hidden_size(self) -> int:
        return self.transformer_layer_config.hidden_size

    @property
    def verifier_vocab_size(self) -> int:
        return self.transformer_layer_config.vocab_size

    def network(self) -> str:
        return "unknown"

    def expected_tensors(self) -> dict[str, TensorSpec]:
        return {}


def _check_config(raw: dict[str, Any], family_config: FamilyConfig) -> tuple[list[Fault], SpeculatorConfig | None]:
    """Return the configuration's faults, and the configuration itself as far as it can be read in spite of them."""
    kind = raw.get("speculators_model_type")
    family = family_config(kind) if isinstance(kind, str) and kind else None
    found: list[Fault] = []
    if isinstance(kind, str) and kind and (family is None or kind not in METHODS):
        text = f"speculators_model_type is {shown(kind)}; expected one that vLLM and this version serve, such as eagle3"
        found.append(fault("unsupported-type", text))
    candidate = copy.deepcopy(raw)
    while True:
        try:
            config = (family or _AnyFamily).model_validate(candidate)
        except ValidationError as error:
            found += config_faults(error, family or _AnyFamily)
            if not _repair(candidate, error):
                return found, None
        else:
            return found, config if family is not None else None


# Stand-ins for wrong values on which no tensor depends, so that the tensors can be compared all the same.
_STAND_INS: dict[str, Any] = {
    "architectures": ["Draft"],
    "speculators_version": "0",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "norm_before_residual": False,
    "speculators_config.default_proposal_method": "greedy",
    "speculators_config.proposal_methods": [{"speculative_tokens": 1}],
    "speculators_config.verifier": {"name_or_path": "unknown", "architectures": []},
    "speculators_config.verifier.name_or_path": "unknown",
    "speculators_config.verifier.architectures": [],
    "transformer_layer_config.rms_norm_eps": 1e-6,
    "transformer_layer_config.hidden_act": "silu",
    "transformer_layer_config.max_position_embeddings": 2048,
    "transformer_layer_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def _repair(candidate: dict[str, Any], error: ValidationError) -> bool:
    """Mend in place what can be mended without touching a tensor's shape; return whether anything was."""
    before = copy.deepcopy(candidate)
    for item in error.errors(include_url=False):
        location = item["loc"]
        key = ".".join(str(part) for part in location)
        if key.startswith("speculators_config.proposal_methods"):
            _put(candidate, location[:2], copy.deepcopy(_STAND_INS["speculators_config.proposal_methods"]))
        elif item["type"] == "extra_forbidden":
            _put(candidate, location, None, remove=True)
        elif key in ("speculators_config", "speculators_config.algorithm"):
            _mend_block(candidate)
        elif item["type"] == "contradictions":
            _mend_contradictions(candidate, {slug for slug, _ in item["ctx"]["problems"]}, in_layer=bool(location))
        elif key in _STAND_INS:
            _put(candidate, location, copy.deepcopy(_STAND_INS[key]))
    return candidate != before


def _put(candidate: Any, location: tuple[int | str, ...], value: object, *, remove: bool = False) -> None:
    for part in location[:-1]:
        candidate = candidate[part]
    if remove:
        candidate.pop(location[-1], None)
    else:
        candidate[location[-1]] = value


def _mend_block(candidate: dict[str, Any]) -> None:
    block = candidate.get("speculators_config")
    block = candidate["speculators_config"] = dict(block) if isinstance(block, dict) else {}
    block |= {"algorithm": candidate.get("speculators_model_type") or "unknown", "default_proposal_method": "greedy"}
    for key in ("proposal_methods", "verifier"):
        block.setdefault(key, copy.deepcopy(_STAND_INS[f"speculators_config.{key}"]))


def _mend_contradictions(candidate: dict[str, Any], slugs: set[str], *, in_layer: bool) -> None:
    layer = candidate["transformer_layer_config"]
    if in_layer:
        dropped: tuple[str, ...] = ("layer_types", "use_sliding_window")
    else:
        dropped = ("num_aux_hidden_states", "num_aux_layers") if "num-aux-hidden-states" in slugs else ()
        _mend_block(candidate)
        if "layer-ids" in slugs:
            ids = candidate["eagle_aux_hidden_state_layer_ids"]
            candidate["eagle_aux_hidden_state_layer_ids"] = sorted(set(ids))
    for key in dropped:
        layer.pop(key, None)


def _what_vllm_misreads(raw: Mapping[str, Any], config: SpeculatorConfig | None) -> Iterator[Fault]:
    """Yield what is well-formed but read otherwise than written."""
    block = raw.get("speculators_config")
    methods = block.get("proposal_methods") if isinstance(block, dict) else None
    if isinstance(methods, list) and len(methods) > 1:
        yield fault(
            "second-proposal", f"{len(methods)} proposal methods; only the first is ever read: remove the others"
        )
    layer, kind = raw.get("transformer_layer_config"), raw.get("speculators_model_type")
    if config is None or not isinstance(layer, dict) or layer.get("model_type") != "llama" or kind not in _FORWARDED:
        return
    wanted, counted = len(config.aux_layer_ids), _aux_features(raw, config.aux_layer_ids)
    if counted != wanted and layer.get("num_aux_hidden_states") is None:
        text = f"{wanted} layer ids, but vLLM's llama draft counts {counted} features"
        hint = f"write num_aux_hidden_states: {wanted} into transformer_layer_config"
        yield fault("num-aux-hidden-states", f"{text}; {hint}")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        text = "layer_types has sliding_attention, which vLLM's llama draft ignores: it attends to everything"
        yield fault("sliding-window-ignored", f"{text}; use qwen3 layers or full_attention")


def _check_verifier(raw: Mapping[str, Any], config: SpeculatorConfig | None) -> Iterator[Fault]:
    block = raw.get("speculators_config")
    verifier = block.get("verifier") if isinstance(block, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(name, str) or not name:
        return
    path = Path(name).expanduser()
    if not path.is_absolute():
        if looks_like_path(name) or path.is_dir():
            text = f"verifier.name_or_path is the relative path {name!r}, resolved from wherever a server starts"
            yield fault("verifier-bare-path", f"{text}; write a hub id or an absolute path")
        return
    if not (path / "config.json").is_file():
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


def _check_numbers(headers: Mapping[str, TensorHeader], raw: Mapping[str, Any]) -> Iterator[Fault]:
    layer = raw.get("transformer_layer_config")
    vocab_size = layer.get("vocab_size") if isinstance(layer, dict) else None
    d2t, t2d = headers.get("d2t"), headers.get("t2d")
    if d2t is not None and d2t.dtype == "I64" and type(vocab_size) is int and d2t.shape != (vocab_size,):
        kept = read_marked(t2d) if t2d is not None and t2d.dtype == "BOOL" else None
        problem = map_fault(read_int64(d2t), vocab_size, kept)
        if problem is not None:
            yield problem
    stored = sorted({DTYPE_NAMES[header.dtype] for header in headers.values() if header.dtype in DTYPE_NAMES})
    if stored and raw.get("dtype") in DTYPE_NAMES.values() and stored != [raw["dtype"]]:
        text = f"dtype is {shown(raw['dtype'])} but the tensors are stored as {', '.join(stored)}; write the stored one"
        yield fault("dtype-differs", text)
    yield from number_faults(headers)
