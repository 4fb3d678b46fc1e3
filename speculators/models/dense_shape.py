"""What a draft's dense decoder layers take over from a verifier whose own layers may be of another kind (no torch).

A draft layer has one MLP and attention with heads of one size, so that two things of a verifier cannot be copied. A
mixture of experts is as wide as one expert or as a few dense layers of it, and its configuration may say either or
nothing. Latent attention (DeepSeek, Kimi) has heads whose parts are of several sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, inf
from typing import Any, NamedTuple

from speculators.errors import VerifierError

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim")
# Llama 4 calls the width of its experts intermediate_size and that of its dense layers intermediate_size_mlp.
_WIDTHS = ("intermediate_size", "intermediate_size_mlp")
# A dense draft of a mixture of experts is at least this many hidden sizes wide, like most dense models.
_WIDTH_FACTOR = 3
_HEAD_DIM = 128
_MOST_KEY_HEADS = 8


class Heads(NamedTuple):
    """Query heads, key heads that divide them, and the even size of each."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


def size_of(config: Mapping[str, Any], key: str, name_or_path: str) -> int:
    """Return a size that must be there; VerifierError where it is none."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise VerifierError(
            f"configuration of verifier {name_or_path!r} says {key}={value!r}, where a positive integer is expected; "
            "is it a causal language model?"
        )
    return value


def number_of(config: Mapping[str, Any], key: str, default: float, name_or_path: str) -> float:
    """Return a number above 0, `default` where it is absent, null or 0; VerifierError where it is none."""
    value = config.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise VerifierError(
            f"configuration of verifier {name_or_path!r} says {key}={value!r}, where a number above 0 is expected"
        )
    return float(value)


def dense_width(config: Mapping[str, Any], hidden_size: int, name_or_path: str) -> int:
    """Return the MLP width of a dense draft.

    A dense verifier's own, the widest where they differ by layer; 3 times the hidden size where none is written. For a
    mixture of experts the larger of the two: whether `intermediate_size` means an expert or a dense layer differs from
    model to model, and what is narrower than 3 hidden sizes is an expert, too small to stand for all of them.
    """
    found = [width for key in _WIDTHS for width in _widths(config, key, name_or_path)]
    if _has_experts(config) or not found:
        found.append(_WIDTH_FACTOR * hidden_size)
    return max(found)


def _has_experts(config: Mapping[str, Any]) -> bool:
    counts = (config.get(key) for key in _EXPERT_COUNTS)
    return any(isinstance(count, int) and count > 1 for count in counts)


def _widths(config: Mapping[str, Any], key: str, name_or_path: str) -> list[int]:
    value = config.get(key)
    if value is None or (value == 0 and _has_experts(config)):
        return []
    by_layer = value if isinstance(value, list) and value else [value]
    return [size_of({key: width}, key, name_or_path) for width in by_layer]


def dense_heads(config: Mapping[str, Any], hidden_size: int, name_or_path: str) -> Heads:
    """Return the attention heads of a dense draft: the verifier's where a draft can have them, else heads of 128.

    A draft cannot have heads of odd size, which no rotation fits, and has no latent attention. Heads of its own are as
    many as the hidden size holds, on at most 8 key heads.
    """
    heads = size_of(config, "num_attention_heads", name_or_path)
    latent = any(config.get(key) for key in _LATENT_SIZES)
    if config.get("head_dim") is not None:
        head_dim = size_of(config, "head_dim", name_or_path)
    else:
        head_dim = hidden_size // heads if hidden_size % heads == 0 else 0
    if latent or not head_dim or head_dim % 2:
        return _own_heads(hidden_size)
    shared = config.get("num_key_value_heads")
    shared = heads if shared is None else size_of(config, "num_key_value_heads", name_or_path)
    return Heads(heads, gcd(heads, shared), head_dim)


def _own_heads(hidden_size: int) -> Heads:
    head_dim = _HEAD_DIM
    while head_dim > 2 and 2 * head_dim > hidden_size:
        head_dim //= 2
    heads, rest = divmod(hidden_size, head_dim)
    if rest:
        heads = 4 * max(1, round(hidden_size / head_dim / 4))
    return Heads(heads, gcd(heads, _MOST_KEY_HEADS), head_dim)
