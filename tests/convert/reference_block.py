"""DFlash, DFlash 2 and DSpark computed from foreign tensors by their papers' formulas, one block of one sequence.

No part of the library is used; float32. T tokens, of which the last is the anchor: the states of those before it are
the context, and the block's slots stand at positions T - 1, T, ...
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.convert.foreign import ForeignCheckpoint

PREFIXES = ("draft_model.", "dflash_module.")
OTHER_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


@dataclass(frozen=True)
class Meaning:
    """What a producer means: how many slots of a block see each other, the features, and which slots predict.

    `features` index transformers' `hidden_states`, in the producer's order. `causal` and `windows` are one a layer.
    """

    features: tuple[int, ...]
    next_token: bool
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]


@dataclass(frozen=True)
class Drafted:
    """Logits a drafted token [K, D], the verifier's ids of the likeliest, and what the draft thinks of each."""

    logits: list[Tensor]
    tokens: list[int]
    confidence: list[Tensor]


class Foreign:
    """A foreign draft's tensors, without prefixes, beside the verifier's embeddings and head."""

    def __init__(self, checkpoint: ForeignCheckpoint, embedding: Tensor, head: Tensor) -> None:
        self.config = checkpoint.config
        self.settings = {**self.config, **self.config.get("dflash_config", {})}
        self.tensors = {_short(name): tensor.float() for name, tensor in checkpoint.tensors.items()}
        self.embedding = self.tensors.get("embed_tokens.weight", embedding)
        self.head = self.tensors.get("lm_head.weight", head)
        self.size = self.config["head_dim"]

    def norm(self, name: str, states: Tensor) -> Tensor:
        mean = (states * states).mean(-1, keepdim=True)
        return states / torch.sqrt(mean + self.config["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def linear(self, name: str, states: Tensor) -> Tensor:
        fused = name.rpartition(".")[0] + ".qkv_proj.weight"
        if fused in self.tensors and name[-6:] in ("q_proj", "k_proj", "v_proj"):
            wide = self.config["num_attention_heads"] * self.size
            narrow = self.config["num_key_value_heads"] * self.size
            parts = dict(zip("qkv", self.tensors[fused].split([wide, narrow, narrow]), strict=True))
            return states @ parts[name[-6]].T
        return states @ self.tensors[f"{name}.weight"].T

    def rotated(self, states: Tensor, positions: Tensor) -> Tensor:
        """[T, heads, size], each pair of a head's halves turned by its position."""
        frequencies, factor = _frequencies(self.config, self.size)
        angles = positions[:, None].float() * frequencies
        cos, sin = (angles.cos() * factor)[:, None], (angles.sin() * factor)[:, None]
        first, second = states[..., : self.size // 2], states[..., self.size // 2 :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _short(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return OTHER_NAMES.get(name, name)


def _frequencies(config: dict[str, Any], size: int) -> tuple[Tensor, float]:
    pairs = torch.arange(0, size, 2).float() / size
    theta, scaling = config["rope_theta"], config.get("rope_scaling")
    plain = theta**-pairs
    if scaling is None:
        return plain, 1.0
    # YaRN (arXiv 2309.00071): dimensions of few turns are stretched, those of many are not.
    factor, length = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), size - 1)
    ramp = ((torch.arange(size // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), 0.1 * math.log(factor) + 1


def states_of_block(foreign: Foreign, tokens: Tensor, hidden_states: Sequence[Tensor], meaning: Meaning) -> Tensor:
    """What the head reads, [slots, H]."""
    slots, length = foreign.settings["block_size"], len(tokens) - 1
    features = torch.cat([hidden_states[index][:length] for index in meaning.features], -1)
    context = foreign.norm("hidden_norm", foreign.linear("fc", features))
    ids = torch.full((slots,), foreign.settings["mask_token_id"])
    ids[0] = tokens[-1]
    states = foreign.embedding[ids]
    for index in range(foreign.config["num_hidden_layers"]):
        place = f"layers.{index}"
        normed = foreign.norm(f"{place}.input_layernorm", states)
        normed, after = _convolved(foreign, f"{place}.attention_conv", normed)
        attended = _attention(foreign, index, normed, context, meaning)
        states = states + after(attended)
        normed = foreign.norm(f"{place}.post_attention_layernorm", states)
        normed, after = _convolved(foreign, f"{place}.mlp_conv", normed)
        gate, up = foreign.linear(f"{place}.mlp.gate_proj", normed), foreign.linear(f"{place}.mlp.up_proj", normed)
        states = states + after(foreign.linear(f"{place}.mlp.down_proj", gate * torch.sigmoid(gate) * up))
    return foreign.norm("norm", states)


def _attention(foreign: Foreign, index: int, normed: Tensor, context: Tensor, meaning: Meaning) -> Tensor:
    place, size, length = f"layers.{index}.self_attn", foreign.size, len(context)
    here, positions = length + torch.arange(len(normed)), torch.arange(length + len(normed))
    joined = torch.cat((context, normed))
    queries = foreign.norm(f"{place}.q_norm", foreign.linear(f"{place}.q_proj", normed).unflatten(-1, (-1, size)))
    keys = foreign.norm(f"{place}.k_norm", foreign.linear(f"{place}.k_proj", joined).unflatten(-1, (-1, size)))
    values = foreign.linear(f"{place}.v_proj", joined).unflatten(-1, (-1, size))
    queries, keys = foreign.rotated(queries, here), foreign.rotated(keys, positions)
    groups = queries.shape[1] // keys.shape[1]
    out = []
    for head in range(queries.shape[1]):
        scores = queries[:, head] @ keys[:, head // groups].T / math.sqrt(size)
        distance = here[:, None] - positions
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if meaning.causal[index]:
            hidden |= distance < 0
        window = meaning.windows[index]
        if window is not None:
            hidden |= distance >= window
        out.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values[:, head // groups])
    return foreign.linear(f"{place}.o_proj", torch.cat(out, -1))


def _convolved(foreign: Foreign, place: str, normed: Tensor) -> tuple[Tensor, Any]:
    """The convolution before, and a function for the one after; neither does anything where the draft has none."""
    if f"{place}.base_kernel" not in foreign.tensors:
        return normed, lambda states: states
    base = foreign.tensors[f"{place}.base_kernel"]
    sides, taps, width = base.shape
    delta = foreign.linear(f"{place}.kernel_projection", normed)
    delta = delta.view(len(normed), sides, taps, -1).repeat_interleave(foreign.settings["conv_group_size"], -1)
    kernel = base + delta

    def convolve(states: Tensor, side: int) -> Tensor:
        out = torch.zeros(len(states), width)
        for slot in range(len(states)):
            for tap in range(min(taps, slot + 1)):
                out[slot] += kernel[slot, side, tap] * states[slot - tap]
        return out

    return convolve(normed, 0), lambda states: convolve(states, 1)


def drafted(foreign: Foreign, tokens: Tensor, hidden_states: Sequence[Tensor], meaning: Meaning) -> Drafted:
    """The block's tokens, likeliest first, each with what was known when it was chosen."""
    states = states_of_block(foreign, tokens, hidden_states, meaning)
    states = states if meaning.next_token else states[1:]
    found, previous = Drafted([], [], []), int(tokens[-1])
    memory = torch.zeros(foreign.settings.get("markov_rank") or 1)
    d2t = foreign.tensors.get("d2t")
    for state in states:
        logits = foreign.head @ state
        if _head(foreign, "markov_w1.weight") is not None:
            bias, memory, embed = _markov(foreign, state, previous, memory)
            logits = logits + bias
            found.confidence.extend(_confidence(foreign, state, embed))
        if "candidate_selector.successor_codebook" in foreign.tensors:
            logits = _selected(foreign, state, logits, previous)
        choice = int(logits.argmax())
        previous = choice if d2t is None else choice + int(d2t[choice])
        found.logits.append(logits)
        found.tokens.append(previous)
    return found


def _head(foreign: Foreign, name: str) -> Tensor | None:
    return foreign.tensors.get(f"markov_head.{name}", foreign.tensors.get(name))


def _markov(foreign: Foreign, state: Tensor, previous: int, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, second = _head(foreign, "markov_w1.weight"), _head(foreign, "markov_w2.weight")
    assert first is not None
    assert second is not None
    embed = first[previous]
    gate, joint = _head(foreign, "gate_proj.weight"), _head(foreign, "joint_proj.weight")
    if gate is not None:
        opened = torch.sigmoid(gate @ torch.cat((state, embed)) + _head(foreign, "gate_proj.bias"))
        return second @ (opened * embed), memory, embed
    if joint is None:
        return second @ embed, memory, embed
    three = joint @ torch.cat((memory, embed, state)) + _head(foreign, "joint_proj.bias")
    kept, candidate, out = three.chunk(3)
    kept = torch.sigmoid(kept)
    return second @ torch.tanh(out), kept * memory + (1 - kept) * torch.tanh(candidate), embed


def _confidence(foreign: Foreign, state: Tensor, embed: Tensor) -> list[Tensor]:
    name = "confidence_head.proj" if "confidence_head.proj.weight" in foreign.tensors else "confidence_proj"
    weight = foreign.tensors.get(f"{name}.weight")
    if weight is None:
        return []
    read = torch.cat((state, embed))[: weight.shape[1]]
    return [torch.sigmoid(weight[0] @ read + foreign.tensors[f"{name}.bias"][0])]


def _selected(foreign: Foreign, state: Tensor, unary: Tensor, previous: int) -> Tensor:
    """The logits of a slot's likeliest candidates, with how well each follows the token before."""
    before = foreign.tensors["candidate_selector.predecessor_codebook"][previous]
    query = before * foreign.linear("candidate_selector.hidden_projection", state)
    after = foreign.tensors["candidate_selector.successor_codebook"]
    scores = torch.full_like(unary, float("-inf"))
    for candidate in unary.topk(foreign.settings["selector_top_k"]).indices.tolist():
        scores[candidate] = unary[candidate] + query @ after[candidate]
    return scores
