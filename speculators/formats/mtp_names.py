"""Tensor names of MTP blocks inside a verifier's own checkpoint, and how each becomes one of ours (free of torch).

Three layouts are known: `mtp.` (Qwen3-Next, Qwen3.5), `model.layers.{L}.` with L the verifier's number of layers
(DeepSeek-V3, GLM-4.5) and `model.mtp_layers.0.` (MiMo). Ours is `mtp_layers.0.`, with the embedding's half of
`input_proj` first and experts fused. Further blocks count on from there: `mtp_layers.1.`, and natively
`model.layers.{L+1}.`, `model.mtp_layers.1.` or `mtp.layers.1.`, which shares all but the layer with the first. Only
names are handled here; `models/mtp/native.py` applies what they say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from speculators.formats.faults import Fault, error_of, fault

OURS = "mtp_layers."
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


class Change(Enum):
    """How native tensors become one of ours.

    `SWAP_HALVES`: the two halves of the columns change places. `STACK`: one matrix an expert, [O, I] each, becomes
    [E, O, I]. `STACK_PAIRS`: gate and up of each expert in turn, [O, I] each, become [E, 2 O, I].
    """

    COPY = "copy"
    SWAP_HALVES = "swap halves"
    STACK = "stack"
    STACK_PAIRS = "stack pairs"


@dataclass(frozen=True)
class Origin:
    """What one tensor of ours is made of: the native names, in order, and how."""

    change: Change
    names: tuple[str, ...]


@dataclass(frozen=True)
class NativeLayout:
    """How a checkpoint names an MTP block.

    `prefix` opens all its names, `layer_prefix` those of the decoder layer. `renamed`: native name behind `prefix` of
    each module that is not the decoder layer's. `hidden_first`: columns of the projection are those of the state, then
    those of the embedding. `repeated`: native names behind `prefix` of what repeats the verifier's `embed_tokens` or
    `lm_head`; the block does without, so that whoever drops them should compare them first (`repeats`). `index` counts
    the blocks of a checkpoint; `others` open the names of further layers behind the same `prefix`.
    """

    prefix: str
    layer_prefix: str
    renamed: Mapping[str, str]
    hidden_first: bool = False
    repeated: Mapping[str, str] = field(default_factory=dict)
    index: int = 0
    others: tuple[str, ...] = ()

    @property
    def ours(self) -> str:
        """What opens our names of the block."""
        return f"{OURS}{self.index}."

    def origins(self, names: Iterable[str]) -> dict[str, Origin]:
        """Our name of every tensor of the block, from native names, and what it is made of.

        Names that are not the block's are passed over. FormatError lists those of the block that are not understood and
        experts that are not all there.
        """
        native = {f"{self.prefix}{theirs}": ours for ours, theirs in self.renamed.items()}
        found: dict[str, Origin] = {}
        experts: dict[str, dict[int, str]] = {"gate": {}, "up": {}, "down": {}}
        faults: list[Fault] = []
        for name in sorted(name for name in names if name.startswith(self.prefix) and not name.startswith(self.others)):
            inner = name.removeprefix(self.layer_prefix) if name.startswith(self.layer_prefix) else ""
            expert = _EXPERT.fullmatch(inner)
            if name in native:
                found[f"{self.ours}{native[name]}"] = Origin(self._change(native[name]), (name,))
            elif name.removeprefix(self.prefix) in self.repeated:
                continue
            elif expert is not None:
                experts[expert[2]][int(expert[1])] = name
            elif _is_layers(inner):
                found[f"{self.ours}{inner}"] = Origin(Change.COPY, (name,))
            else:
                faults.append(
                    fault("unknown-tensor", f"{name} is no part of an MTP block that is known; {_hint(name)}")
                )
        faults += [
            fault("missing-tensor", f"{self.prefix}{theirs} is missing; expected a whole MTP block")
            for ours, theirs in self.renamed.items()
            if f"{self.ours}{ours}" not in found
        ]
        found |= self._stacked(experts, faults)
        if faults:
            raise error_of(faults, f"MTP block {self.prefix}")
        return found

    def repeats(self, names: Iterable[str]) -> dict[str, str]:
        """Of these native names, those of repeated tensors, and which of the verifier's each repeats."""
        known = {f"{self.prefix}{name}": source for name, source in self.repeated.items()}
        return {name: known[name] for name in names if name in known}

    def native_origins(self, ours: Iterable[str], num_experts: int = 0) -> dict[str, Origin]:
        """What each of our tensors (all of one block) is made of, where nothing native is at hand.

        `num_experts` fused experts become one tensor each, as these checkpoints hold them; 0 keeps them fused.
        FormatError for a name that is not ours.
        """
        found = {}
        for name in ours:
            inner = name.removeprefix(self.ours)
            if inner == name:
                raise error_of([fault("unknown-tensor", f"{name} does not begin with {self.ours}")], "MTP block")
            if inner in self.renamed:
                found[name] = Origin(self._change(inner), (f"{self.prefix}{self.renamed[inner]}",))
            elif num_experts and inner in (GATE_UP, DOWN):
                kinds = ("gate", "up") if inner == GATE_UP else ("down",)
                names = [
                    f"{self.layer_prefix}mlp.experts.{index}.{kind}_proj.weight"
                    for index in range(num_experts)
                    for kind in kinds
                ]
                found[name] = Origin(Change.STACK_PAIRS if inner == GATE_UP else Change.STACK, tuple(names))
            else:
                found[name] = Origin(Change.COPY, (f"{self.layer_prefix}{inner}",))
        return found

    def _change(self, ours: str) -> Change:
        return Change.SWAP_HALVES if self.hidden_first and ours == "input_proj.weight" else Change.COPY

    def _stacked(self, experts: Mapping[str, Mapping[int, str]], faults: list[Fault]) -> dict[str, Origin]:
        count = 1 + max((index for found in experts.values() for index in found), default=-1)
        lacking = [
            f"{self.layer_prefix}mlp.experts.{index}.{kind}_proj.weight"
            for kind, found in experts.items()
            for index in range(count)
            if index not in found
        ]
        if lacking:
            text = (
                f"{lacking[0]} is missing, and {len(lacking) - 1} more"
                if len(lacking) > 1
                else f"{lacking[0]} is missing"
            )
            faults.append(fault("missing-tensor", f"{text}; expected every projection of {count} experts"))
        if not count or lacking:
            return {}
        pairs = tuple(experts[kind][index] for index in range(count) for kind in ("gate", "up"))
        downs = tuple(experts["down"][index] for index in range(count))
        return {
            f"{self.ours}{GATE_UP}": Origin(Change.STACK_PAIRS, pairs),
            f"{self.ours}{DOWN}": Origin(Change.STACK, downs),
        }


def qwen_layout(index: int = 0, count: int = 1) -> NativeLayout:
    """Qwen3-Next, Qwen3.5 and Qwen3.6: `mtp.fc`, `mtp.layers.0.`; blocks differ in their layer alone."""
    return NativeLayout(
        prefix="mtp.",
        layer_prefix=f"mtp.layers.{index}.",
        renamed={
            "token_layernorm.weight": "pre_fc_norm_embedding.weight",
            "hidden_layernorm.weight": "pre_fc_norm_hidden.weight",
            "input_proj.weight": "fc.weight",
            "final_layernorm.weight": "norm.weight",
        },
        repeated={"embed_tokens.weight": "embed_tokens", "lm_head.weight": "lm_head"},
        index=index,
        others=tuple(f"mtp.layers.{other}." for other in range(count) if other != index),
    )


def deepseek_layout(num_hidden_layers: int, index: int = 0) -> NativeLayout:
    """DeepSeek-V3 and GLM-4.5: a further layer, with `enorm`, `hnorm`, `eh_proj` and a `shared_head`."""
    prefix = f"model.layers.{num_hidden_layers + index}."
    return NativeLayout(
        prefix=prefix,
        layer_prefix=prefix,
        renamed={
            "token_layernorm.weight": "enorm.weight",
            "hidden_layernorm.weight": "hnorm.weight",
            "input_proj.weight": "eh_proj.weight",
            "final_layernorm.weight": "shared_head.norm.weight",
        },
        repeated={"embed_tokens.weight": "embed_tokens", "shared_head.head.weight": "lm_head"},
        index=index,
    )


def mimo_layout(index: int = 0) -> NativeLayout:
    """MiMo: our names, with the state before the embedding."""
    names = ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight")
    prefix = f"model.mtp_layers.{index}."
    return NativeLayout(prefix, prefix, {name: name for name in names}, hidden_first=True, index=index)


def find_layout(names: Collection[str], num_hidden_layers: int) -> NativeLayout | None:
    """The layout of the one MTP block among a verifier's tensor names, None where there is none.

    FormatError where there are several blocks: a speculator is made of one.
    """
    found = find_layouts(names, num_hidden_layers, 1)
    return found[0] if found else None


def find_layouts(names: Collection[str], num_hidden_layers: int, count: int) -> list[NativeLayout]:
    """The layouts of a verifier's `count` MTP blocks, in order, from its tensor names; empty where it has none.

    FormatError where it has fewer or more of them.
    """
    kinds: tuple[Callable[[int], NativeLayout], ...] = (
        mimo_layout,
        partial(deepseek_layout, num_hidden_layers),
        partial(qwen_layout, count=count),
    )
    for kind in kinds:
        layouts = [kind(index) for index in range(count)]
        if not any(name.startswith(layouts[0].prefix) for name in names):
            continue
        asked = (
            f"expected {'one MTP block' if count == 1 else f'{count} MTP blocks'} (num_nextn_predict_layers {count})"
        )
        for layout in layouts[1:]:
            if not any(name.startswith(layout.layer_prefix) for name in names):
                text = f"{layouts[0].prefix} is not followed by {layout.layer_prefix}; {asked}"
                raise error_of([fault("missing-tensor", text)], "verifier")
        following = kind(count).layer_prefix
        if any(name.startswith(following) for name in names):
            text = f"{layouts[0].prefix} is followed by {following}; {asked}"
            raise error_of([fault("unknown-tensor", text)], "verifier")
        return layouts
    return []


def _is_layers(inner: str) -> bool:
    """Whether a name behind the layer's prefix is a decoder layer's, as far as names tell."""
    parts = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
    known = inner.startswith(parts) and not inner.endswith(("_scale_inv", "_scale", "_scales", "_zeros"))
    return known and not re.match(r"mlp\.experts\.\d", inner)


def _hint(name: str) -> str:
    if "scale" in name or "zeros" in name:
        return "it belongs to quantised weights: dequantise them first"
    return "leave it out if the block computes the same without it"
