"""What a model's `config.json` says it drafts with: the method, how many tokens, and by which mask token."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from speculators.errors import EngineError
from speculators.formats.checkpoint import text_config
from speculators.runtime.config import METHOD_OF_FAMILY, OLD_MTP_METHODS

# Assistants that read their verifier's keys and values: no language models of their own.
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
# What a `model_type` stands for.
_METHOD_OF_MODEL_TYPE: Mapping[str, str] = {
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    "eagle": "eagle",
    **dict.fromkeys((*OLD_MTP_METHODS, *ASSISTANTS), "mtp"),
}
# Parts of class names, the first that is found counts.
_METHOD_OF_CLASS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile("DSpark"), "dspark"),
    (re.compile("DFlash"), "dflash"),
    (re.compile("P?E(agle|AGLE)3|PEagle"), "eagle3"),
    (re.compile("E(agle|AGLE)"), "eagle"),
    (re.compile("Medusa"), "medusa"),
    (re.compile("MLPSpeculator"), "mlp_speculator"),
    (re.compile("MTP(Model|ForCausalLM)?$"), "mtp"),
)
# Methods whose drafts have tensors of the same names, and draft garbage under each other's name.
LOOK_ALIKES = ("eagle", "eagle3")
# Keys that only one kind of draft has, where nothing else tells.
_METHOD_OF_KEY: Mapping[str, str] = {
    "medusa_num_heads": "medusa",
    "dspark_block_size": "dspark",
    "dflash_config": "dflash",
    "draft_vocab_size": "eagle3",
}
_CAUSAL_LM = re.compile("(ForCausalLM|LMHeadModel)$")
# Where each kind of file says how many tokens it drafts.
_DEPTH_KEYS: Mapping[str, tuple[str, ...]] = {
    "medusa": ("medusa_num_heads", "num_heads"),
    "mlp_speculator": ("n_predict",),
    "dspark": ("dspark_block_size", "block_size"),
    "dflash": ("block_size",),
    "mtp": ("n_predict", "num_nextn_predict_layers", "mtp_num_hidden_layers"),
}
# Methods whose steps draft no more than their file says.
_BOUNDED = frozenset({"medusa", "mlp_speculator", "dspark", "dflash"})
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class DraftKind:
    """What a configuration is of: `family` where it is a speculator's, else the method that its architecture is for.

    `depth` is how many tokens a step drafts unless told otherwise, `most` the most it can; None where the file does not
    say. `blocks` take turns where more than that many tokens are drafted. `mask_token_id` stands for tokens that are
    still to be drafted. An `assistant` has no keys of its own and reads its verifier's.
    """

    method: str
    family: str | None = None
    depth: int | None = None
    most: int | None = None
    blocks: int | None = None
    mask_token_id: int | None = None
    assistant: bool = False


def recognise(config: Mapping[str, Any], source: str) -> DraftKind:
    """Say what drafts of a parsed `config.json`; EngineError where neither type nor architecture is known.

    A speculator's own type counts first, then `model_type`, then the class names, then keys of one kind of draft, and a
    causal language model is last. Nothing is read from a path.
    """
    mask = _number(_mask_token(config))
    family = config.get("speculators_model_type")
    if config.get("speculators_config") is not None and isinstance(family, str):
        if family not in METHOD_OF_FAMILY:
            raise EngineError(f"{source}: family {family!r} is not served here; these are: {sorted(METHOD_OF_FAMILY)}")
        return DraftKind(METHOD_OF_FAMILY[family], family, mask_token_id=mask)
    method = _method(config)
    if method is None:
        said = ", ".join(f"{name}={config.get(name)!r}" for name in ("model_type", "architectures"))
        raise EngineError(
            f"speculative_config: no method can be told from the config.json of {source} ({said}); give method, or a "
            "speculator's directory as the model"
        )
    if config.get("model_type") in ASSISTANTS:
        # All of its layers make one token, whose state the next one starts from.
        return DraftKind(method, None, 1, assistant=True)
    depth = native_depth(config, method)
    most, blocks = (depth, None) if method in _BOUNDED else (None, depth)
    return DraftKind(method, None, depth, most, blocks, mask)


def native_kind(config: Mapping[str, Any], method: str, source: str) -> DraftKind:
    """Say what a verifier's own checkpoint drafts with; EngineError where its config.json names nothing of the kind."""
    depth = native_depth(config, method)
    if depth is None:
        raise EngineError(
            f"speculative_config: method={method!r} drafts with blocks of the verifier's own checkpoint, and the "
            f"config.json of {source} names none; give a speculator as the model (of method 'eagle3', for one), or a "
            "smaller language model with method 'draft_model'"
        )
    most, blocks = (depth, None) if method in _BOUNDED else (None, depth)
    return DraftKind(method, None, depth, most, blocks, _number(_mask_token(config)))


def method_of_tensors(shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Tell drafts of EAGLE-3 from those of EAGLE by their tensors; None where they are of neither.

    Both have a matrix `fc` to the width H that their layers add up in. The first layer of EAGLE-3 attends over 2H
    numbers, the token beside the states; that of EAGLE over H, what `fc` makes of both.
    """
    named = {name.removeprefix("model."): tuple(shape) for name, shape in shapes.items()}
    fusion = named.get("fc.weight")
    query = named.get("layers.0.self_attn.q_proj.weight") or named.get("midlayer.self_attn.q_proj.weight")
    if fusion is None or query is None:
        return None
    if query[-1] == 2 * fusion[0]:
        return "eagle3"
    return "eagle" if fusion[-1] == 2 * query[-1] and "hidden_norm.weight" not in named else None


def native_depth(config: Mapping[str, Any], method: str) -> int | None:
    """How many tokens a step drafts with what a file has of this method; None where it does not say."""
    for part in (config, text_config(config)):
        for name in _DEPTH_KEYS.get(method, ()):
            found = _number(part.get(name))
            if found:
                # A block's first slot is the anchor, whose token is known, unless the file says otherwise.
                anchored = name == "block_size" and config.get("sample_from_anchor") is not True
                return found - 1 if anchored else found
    return None


def is_causal_lm(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is a language model's, by its class, or by its type where none is named."""
    names = _class_names(config)
    if names:
        return any(_CAUSAL_LM.search(name) for name in names)
    return config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def names_mask_token(config: Mapping[str, Any]) -> bool:
    """Whether a language model's configuration has a token that stands for one still to be drafted."""
    return is_causal_lm(config) and _number(_mask_token(config)) is not None


def _method(config: Mapping[str, Any]) -> str | None:
    model_type, classes = config.get("model_type"), _class_names(config)
    if isinstance(model_type, str) and model_type in _METHOD_OF_MODEL_TYPE:
        return _METHOD_OF_MODEL_TYPE[model_type]
    for pattern, method in _METHOD_OF_CLASS:
        if any(pattern.search(name) for name in classes):
            return method
    for name, method in _METHOD_OF_KEY.items():
        if config.get(name) is not None:
            return method
    return "draft_model" if is_causal_lm(config) else None


def _class_names(config: Mapping[str, Any]) -> list[str]:
    found = config.get("architectures")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _mask_token(config: Mapping[str, Any]) -> object:
    nested = config.get("dflash_config")
    if isinstance(nested, Mapping) and nested.get("mask_token_id") is not None:
        return nested["mask_token_id"]
    return next((config[name] for name in _MASK_KEYS if config.get(name) is not None), None)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
