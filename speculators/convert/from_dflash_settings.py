"""What the configuration of a foreign block drafter says, and what no family here computes (free of torch).

Settings stand at the top of `config.json` or inside `dflash_config`, and mean the same in either place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from speculators.convert.options import ConvertOptions
from speculators.errors import FormatError
from speculators.formats.decoder import HF_BOOKKEEPING, DecoderConfig
from speculators.formats.faults import error_of, fault, nearest

BLOCK = "dflash_config"
# How alike two keys are, of 1, where one is the other misspelt.
_MISSPELT = 0.85
SETTINGS = frozenset(
    {"block_size", "mask_token_id", "target_layer_ids", "layer_ids", "num_target_layers", "num_anchors"}
    | {"causal", "is_causal", "use_swa", "swa_window_size", "attention_sink_bias", "use_aux_hidden_state"}
    | {"sample_from_anchor", "shift_label", "pure_draft_prefix_len", "projector_type", "attention_mode"}
    | {"input_embedding_scale", "output_multiplier", "logit_scale", "final_logit_softcapping"}
    | {"markov_rank", "markov_head_type", "enable_confidence_head", "use_confidence_head"}
    | {"confidence_head_with_markov", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
)
# What a setting may be without changing a number; all else asks for what no block drafter here computes.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention_sink_bias": (None, False),
    "input_embedding_scale": (None, 1),
    "output_multiplier": (None, 1),
    "logit_scale": (None, 1),
    "final_logit_softcapping": (None, 0),
    "use_aux_hidden_state": (None, True),
    "attention_mode": (None, "gqa"),
    "pure_draft_prefix_len": (None, 1),
}
# Names of whole drafters, by a part of the class or the projector that a configuration names.
_OTHER_DRAFTERS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile("gemma-?_?4", re.IGNORECASE), "a Gemma-4 drafter has Gemma-4's layers"),
    (re.compile("omni", re.IGNORECASE), "a Qwen3-Omni drafter reads positions of several axes"),
    (re.compile("deepseek|K3D", re.IGNORECASE), "this drafter is a part of its verifier's checkpoint, with its layers"),
    (re.compile("xpress", re.IGNORECASE), "an XPress drafter has heads of its own"),
    (re.compile("domino", re.IGNORECASE), "a Domino drafter runs a GRU over its prefix"),
    (re.compile("dflare", re.IGNORECASE), "a DFlare drafter weighs the verifier's layers one by one"),
    (re.compile("lilicorr", re.IGNORECASE), "a LiLiCorr drafter has heads of its own"),
)
_OTHER_PARTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"attention_sink_bias$|\.sinks$"), "attention sinks (attention_sink_bias)"),
    (re.compile(r"\.g_proj\."), "gated attention (g_proj)"),
    (re.compile(r"^aux_hidden_norms\."), "norms of single features (aux_hidden_norms)"),
    (re.compile(r"^(prefix_gru|embed_proj)\."), "Domino's GRU over its prefix (prefix_gru)"),
    (re.compile(r"^layer_fusion_weights|^fusion_(weights|norms)|[kv]_proj_target\."), "DFlare's weights of layers"),
    (re.compile(r"(^|\.)mask_hidden$"), "a learned state in place of the verifier's (mask_hidden)"),
    (re.compile(r"\.layer_scalar$|\.(pre|post)_feedforward_layernorm\.weight$"), "Gemma-4's layers"),
    (re.compile(r"^mtp\."), "layers inside its verifier's checkpoint (mtp)"),
)
# Keys that these configurations have besides a decoder's.
_READ_ELSEWHERE = frozenset(
    {"model_type", "auto_map", "rope_theta", "rope_scaling", "draft_vocab_size", "dspark_target_layer_ids"}
    | {"dspark_noise_token_id", "dspark_block_size", "dspark_bonus_anchor", "target_hidden_size", BLOCK}
)


class BlockSettings:
    """A configuration's settings by name, whichever of the two places they stand in."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested = config.get(BLOCK)
        if nested is not None and not isinstance(nested, Mapping):
            raise FormatError(f"config.json: {BLOCK} is {nested!r}; expected an object")
        self._config, self._nested = config, nested or {}
        unknown = [key for key in self._nested if key not in SETTINGS]
        if unknown:
            texts = [
                f"{BLOCK}.{key} is not a known key{nearest(key, SETTINGS)}; nothing here reads it" for key in unknown
            ]
            raise error_of([fault("unknown-key", text) for text in texts], "config.json")

    def get(self, *keys: str) -> Any:
        """The value of a setting that may have any of these names, None where none is there.

        FormatError where two places disagree.
        """
        found: dict[str, Any] = {}
        for key in keys:
            for place, holder in ((f"{BLOCK}.{key}", self._nested), (key, self._config)):
                if holder.get(key) is not None:
                    found[place] = holder[key]
        values = list(found.values())
        if any(value != values[0] for value in values):
            said = ", ".join(f"{place} is {value!r}" for place, value in found.items())
            raise error_of([fault("contradiction", f"{said}; expected one of them, or the same")], "config.json")
        return values[0] if values else None

    def flag(self, *keys: str) -> bool | None:
        """A setting that is true or false."""
        value = self.get(*keys)
        if value is not None and not isinstance(value, bool):
            raise error_of([fault("bad-value", f"{keys[0]} is {value!r}; expected true or false")], "config.json")
        return value

    def count(self, *keys: str, least: int = 0) -> int | None:
        """A setting that is a whole number of at least `least`."""
        value = self.get(*keys)
        if value is None:
            return None
        if type(value) is not int or value < least:
            text = f"{keys[0]} is {value!r}; expected a whole number from {least} on"
            raise error_of([fault("bad-value", text)], "config.json")
        return value

    def required(self, chosen: int | None, *keys: str, least: int = 0) -> int:
        """The user's choice, else the setting; FormatError where there is neither."""
        value = self.count(*keys, least=least) if chosen is None else chosen
        if value is None:
            text = f"{keys[0]} is written neither at the top level nor in {BLOCK}; give it as an option"
            raise error_of([fault("missing-key", text)], "config.json")
        return value


def refuse_unknown_drafters(config: Mapping[str, Any], settings: BlockSettings, names: Iterable[str]) -> None:
    """FormatError names what a drafter computes that no family here does."""
    said = [*(config.get("architectures") or ()), config.get("model_type"), settings.get("projector_type")]
    for text in (text for text in said if isinstance(text, str)):
        for pattern, what in _OTHER_DRAFTERS:
            if pattern.search(text):
                raise FormatError(f"config.json names {text!r}: {what}, which no family here has; it is not converted")
    for key, harmless in _NEUTRAL.items():
        value = settings.get(key)
        if value not in harmless:
            text = f"{key} is {value!r}, which asks for what no block drafter here computes; it is not converted"
            raise error_of([fault("bad-value", text)], "config.json")
    for name in names:
        for pattern, what in _OTHER_PARTS:
            if pattern.search(name):
                text = f"{name} belongs to {what}, which no block drafter here has; without it the draft would be"
                raise error_of([fault("unknown-tensor", f"{text} another one, so it is not converted")], "checkpoint")


def note_unread_keys(config: Mapping[str, Any], verifier: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Tell of keys that nothing reads; FormatError for one that is nearly a key that is then missing."""
    known = SETTINGS | _READ_ELSEWHERE | HF_BOOKKEEPING | DecoderConfig.model_fields.keys()
    nested = config.get(BLOCK) or {}
    absent = sorted(known - config.keys() - nested.keys())
    unread = sorted(config.keys() - known - verifier.keys())
    for key in unread:
        meant = get_close_matches(key, absent, n=1, cutoff=_MISSPELT)
        if meant:
            text = f"{key} is not a known key, and {meant[0]} is missing; correct its name"
            raise error_of([fault("unknown-key", text)], "config.json")
    if unread:
        note(f"keys of config.json that nothing here reads: {', '.join(unread)}")


def with_windows(config: Mapping[str, Any], settings: BlockSettings, num_tensors: int) -> dict[str, Any]:
    """The configuration with `layer_types` and `sliding_window` as `use_swa` and `swa_window_size` have them.

    With `use_swa` every layer has a window; there are fewer of them than tensors. FormatError where it is not said
    which layers have one, or how wide it is.
    """
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    window = settings.count("swa_window_size", least=1) or config.get("sliding_window")
    if settings.flag("use_swa"):
        if window is None or type(layers) is not int:
            text = f"use_swa is true, swa_window_size {window!r} and num_hidden_layers {layers!r}; expected two numbers"
            raise error_of([fault("missing-key", text)], "config.json")
        types = ["sliding_attention"] * min(layers, num_tensors)
    if types is None and config.get("use_sliding_window"):
        text = "use_sliding_window is true, but layer_types does not say for which layers; write it"
        raise error_of([fault("missing-key", text)], "config.json")
    return {**config, "layer_types": types, "sliding_window": window}


def explicit_causality(settings: BlockSettings, options: ConvertOptions) -> bool | None:
    """Whether slots of a block see only those before them: the user's word, else the file's; None: neither says."""
    if options.sliding_window_non_causal is not None:
        return not options.sliding_window_non_causal
    return settings.flag("causal", "is_causal")


def sees_later_slots(causal: bool | None, layer_types: Iterable[str], note: Callable[[str], None]) -> bool:
    """What `sliding_window_non_causal` is, one policy for all layers of a draft.

    Where nothing is written, engines let slots see each other in a layer without a window, and only earlier ones in a
    layer with one. FormatError where the draft has both.
    """
    if causal is not None:
        return not causal
    kinds = set(layer_types)
    if kinds == {"full_attention"}:
        return True
    if kinds == {"sliding_attention"}:
        note("causal is not written; slots see those before them alone, as engines have it for layers with a window")
        return False
    text = (
        "causal is not written, and some layers have a window: engines then run those causally and the others not, "
        "which one sliding_window_non_causal cannot say; give it as an option if the draft has one policy"
    )
    raise error_of([fault("mixed-causality", text)], "config.json")
