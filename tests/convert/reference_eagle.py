"""EAGLE-1, EAGLE-3 and P-EAGLE computed from foreign tensors by their producers' formulas, whole sequences at a time.

No part of the library is used: T positions, every layer anew at every step, in float32. Position p has the verifier's
features of token p beside the embedding of token p + 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.convert.foreign import ForeignCheckpoint

PREFIX = "module."


@dataclass(frozen=True)
class Meaning:
    """What a producer means and its file may not say.

    `features` index transformers' `hidden_states`. `adds_normed`: the layer adds the state after `hidden_norm`.
    `hands_on_normed`: the next step takes the state after `norm`.
    """

    features: tuple[int, ...] = ()
    adds_normed: bool = False
    hands_on_normed: bool = False


@dataclass(frozen=True)
class Drafted:
    """Logits a step [K, D or V], and the verifier's ids of the likeliest tokens."""

    logits: list[Tensor]
    tokens: list[int]


class Foreign:
    """A foreign draft's tensors in float32, under their own names without a wrapper's prefix."""

    def __init__(self, checkpoint: ForeignCheckpoint, embedding: Tensor, head: Tensor) -> None:
        self.config = checkpoint.config
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in checkpoint.tensors.items()}
        self.tensors = {name: plain(name, tensors) for name in tensors}
        self.embedding = self.tensors.get("embed_tokens.weight", embedding)
        self.head = self.tensors.get("lm_head.weight", head)
        self.first = "midlayer" if "midlayer.mlp.up_proj.weight" in tensors else "layers.0"

    def norm(self, name: str, states: Tensor) -> Tensor:
        scale = (states * states).mean(-1, keepdim=True).add(self.config["rms_norm_eps"]).rsqrt()
        return states * scale * self.tensors[f"{name}.weight"]

    def linear(self, name: str, states: Tensor) -> Tensor:
        out = states @ self.tensors[f"{name}.weight"].T
        return out + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else out

    def features(self, states: Tensor, count: int) -> Tensor:
        """States [T, n*Ht] -> what enters the first layer [T, H]."""
        if "input_norm.weight" in self.tensors:
            states = self.norm("input_norm", states)
        if "fc_norm.0.weight" in self.tensors:
            parts = states.chunk(count, -1)
            states = torch.cat([self.norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)], -1)
        return self.linear("fc", states)

    def attention(self, prefix: str, inputs: Tensor) -> Tensor:
        """Causal attention over [T, read] -> [T, H]."""
        heads = self.config["num_attention_heads"]
        q, k, v = (self.linear(f"{prefix}.{name}_proj", inputs) for name in "qkv")
        size = q.shape[-1] // heads
        q, k, v = (part.unflatten(-1, (-1, size)).transpose(0, 1) for part in (q, k, v))
        if f"{prefix}.q_norm.weight" in self.tensors:
            q, k = self.norm(f"{prefix}.q_norm", q), self.norm(f"{prefix}.k_norm", k)
        q, k = turned(q, self.config), turned(k, self.config)
        group = len(q) // len(k)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        return self.linear(f"{prefix}.o_proj", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))

    def finish(self, prefix: str, residual: Tensor, attended: Tensor) -> Tensor:
        hidden = residual + attended
        normed = self.norm(f"{prefix}.post_attention_layernorm", hidden)
        gate = torch.nn.functional.silu(self.linear(f"{prefix}.mlp.gate_proj", normed))
        return hidden + self.linear(f"{prefix}.mlp.down_proj", gate * self.linear(f"{prefix}.mlp.up_proj", normed))

    def later_layers(self, hidden: Tensor) -> Tensor:
        for index in range(1, self.config["num_hidden_layers"]):
            prefix = f"layers.{index}"
            inputs = self.norm(f"{prefix}.input_layernorm", hidden)
            hidden = self.finish(prefix, hidden, self.attention(f"{prefix}.self_attn", inputs))
        return hidden

    def fused_layers(self, tokens: Tensor, states: Tensor, meaning: Meaning) -> Tensor:
        """Ids [T] and states [T, H] -> the last layer's output [T, H]."""
        normed = self.norm(f"{self.first}.hidden_norm", states)
        embeds = self.norm(f"{self.first}.input_layernorm", self.embedding[tokens])
        attended = self.attention(f"{self.first}.self_attn", torch.cat((embeds, normed), -1))
        return self.later_layers(self.finish(self.first, normed if meaning.adds_normed else states, attended))

    def verifier_id(self, draft_id: int) -> int:
        if "t2d" in self.tensors:
            return int(torch.nonzero(self.tensors["t2d"]).flatten()[draft_id])
        return draft_id + int(self.tensors["d2t"][draft_id]) if "d2t" in self.tensors else draft_id


def plain(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[name]
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.float() * tensors[f"{name}_scale"]
    return tensor.float() if tensor.is_floating_point() else tensor


def turned(heads: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Rotate [heads, T, size] by position, halves against halves."""
    size, length = heads.shape[-1], heads.shape[1]
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = settings.get("rope_theta", config.get("rope_theta", 10000.0))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies(size, theta, settings)
    cos, sin = (part.float() for part in (angles.cos(), angles.sin()))
    left, right = heads.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def frequencies(size: int, theta: float, settings: Mapping[str, Any]) -> Tensor:
    """Turns of each pair of numbers a position: plain, stretched evenly, or as Llama 3.1 stretches slow ones."""
    turns = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "linear":
        return turns / settings["factor"]
    if kind == "llama3":
        low, high = settings["low_freq_factor"], settings["high_freq_factor"]
        cycles = settings["original_max_position_embeddings"] * turns / (2 * math.pi)
        share = ((cycles - low) / (high - low)).clamp(0, 1)
        return (1 - share) * turns / settings["factor"] + share * turns
    return turns


def eagle3(draft: Foreign, tokens: Tensor, hidden_states: tuple[Tensor, ...], meaning: Meaning, steps: int) -> Drafted:
    """Draft after `tokens` [T]; `hidden_states` are the verifier's, each [T, Ht], as transformers counts them."""
    read, count = torch.cat([hidden_states[index] for index in meaning.features], -1), len(meaning.features)
    states, following = draft.features(read[:-1], count), tokens[1:]
    drafted = Drafted([], [])
    for _ in range(steps):
        hidden = draft.fused_layers(following, states, meaning)[-1]
        normed = draft.norm("norm", hidden)
        drafted.logits.append(draft.head @ normed)
        drafted.tokens.append(draft.verifier_id(int(drafted.logits[-1].argmax())))
        states = torch.cat((states, (normed if meaning.hands_on_normed else hidden)[None]))
        following = torch.cat((following, torch.tensor(drafted.tokens[-1:])))
    return drafted


def peagle(draft: Foreign, tokens: Tensor, hidden_states: tuple[Tensor, ...], meaning: Meaning, steps: int) -> Drafted:
    """All steps in one pass: unknown tokens are the mask token, their features `mask_hidden`."""
    read, count = torch.cat([hidden_states[index] for index in meaning.features], -1)[:-1], len(meaning.features)
    masks = draft.tensors["mask_hidden"].reshape(1, -1).expand(steps - 1, -1)
    following = torch.cat((tokens[1:], torch.full((steps - 1,), draft.config["ptd_token_id"])))
    hidden = draft.fused_layers(following, draft.features(torch.cat((read, masks)), count), meaning)
    logits = draft.norm("norm", hidden[-steps:]) @ draft.head.T
    return Drafted(list(logits), [draft.verifier_id(int(row.argmax())) for row in logits])


def eagle(draft: Foreign, tokens: Tensor, hidden_states: tuple[Tensor, ...], meaning: Meaning, steps: int) -> Drafted:
    """From the verifier's last state after its final norm, and the draft's own outputs after that."""
    states, following = hidden_states[-1][:-1], tokens[1:]
    drafted = Drafted([], [])
    for _ in range(steps):
        embeds = draft.embedding[following]
        if "embed_layernorm.weight" in draft.tensors:
            embeds = draft.norm("embed_layernorm", embeds)
        entering = draft.linear("fc", torch.cat((embeds, states), -1))
        hidden = draft.finish("layers.0", entering, draft.attention("layers.0.self_attn", entering))
        hidden = draft.later_layers(hidden)[-1]
        if "post_embedding_layernorm.weight" in draft.tensors:
            hidden = draft.norm("post_embedding_layernorm", hidden)
        drafted.logits.append(draft.head @ hidden)
        drafted.tokens.append(int(drafted.logits[-1].argmax()))
        states = torch.cat((states, hidden[None]))
        following = torch.cat((following, torch.tensor(drafted.tokens[-1:])))
    return drafted
