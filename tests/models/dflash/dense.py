"""A block drafter written out block by block, from the formulas: the dense twin of model, attention and objective.

One document at a time, every block by itself against the whole document, whole rows of logits; nothing is shared with
the package but the checkpoint's tensor names.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.models.draft_model import PackedBatch
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x_TND: Tensor, positions_T: Tensor, base: float) -> Tensor:
    size = x_TND.shape[-1]
    angles = positions_T[:, None].to(x_TND.dtype) / base ** (torch.arange(0, size, 2, dtype=x_TND.dtype) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x_TND[..., : size // 2], x_TND[..., size // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def sees(query: int, key: int, *, anchor: int, in_block: bool, causal: bool, window: int | None) -> bool:
    """Whether the slot at position `query` sees the context (or its block) at position `key`."""
    if window is not None and key <= query - window:
        return False
    if not in_block:
        return key < anchor
    return key <= query or not causal


class DenseDraft:
    """The network on one document; parameters are looked up by their checkpoint names."""

    def __init__(self, speculator: Speculator) -> None:
        self.config, self.layer = speculator.config, speculator.config.transformer_layer_config
        self.tensors = dict(speculator.draft.named_parameters())
        self.eps, self.base = self.layer.rms_norm_eps, self.layer.rope_parameters["rope_theta"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self.tensors[f"{name}.weight"], self.eps)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def heads(self, name: str, x: Tensor) -> Tensor:
        return self.linear(name, x).unflatten(-1, (-1, self.layer.head_dim))

    def attend(self, index: int, x_SH: Tensor, context_TH: Tensor, anchor: int) -> Tensor:
        name, slots, length = f"layers.{index}.self_attn", len(x_SH), len(context_TH)
        here, there = anchor + torch.arange(slots), torch.arange(length)
        q = rope(self.norm(f"{name}.q_norm", self.heads(f"{name}.q_proj", x_SH)), here, self.base)
        k = torch.cat(
            [
                rope(self.norm(f"{name}.k_norm", self.heads(f"{name}.k_proj", x)), positions, self.base)
                for x, positions in ((context_TH, there), (x_SH, here))
            ]
        )
        v = torch.cat([self.heads(f"{name}.v_proj", x) for x in (context_TH, x_SH)])
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        windowed = self.layer.layer_types[index] == "sliding_attention"
        rule = {
            "anchor": anchor,
            "causal": not self.config.sliding_window_non_causal,
            "window": self.layer.sliding_window if windowed else None,
        }
        keys = [(key, False) for key in range(length)] + [(anchor + slot, True) for slot in range(slots)]
        mask = torch.tensor(
            [[sees(anchor + slot, key, in_block=block, **rule) for key, block in keys] for slot in range(slots)]
        )
        scores = torch.einsum("sqd,kqd->qsk", q, k) / math.sqrt(self.layer.head_dim)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return self.linear(f"{name}.o_proj", torch.einsum("qsk,kqd->sqd", weights, v).flatten(1))

    def mlp(self, index: int, x: Tensor) -> Tensor:
        name = f"layers.{index}.mlp"
        gated = F.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gated)

    def states(self, document: PackedBatch, anchor: int) -> Tensor:
        """The states [S, H] that the head reads, of the block with this anchor."""
        aux_TX, ids_T = document.aux_hidden_states[0], document.input_ids[0]
        context_TH = self.norm("hidden_norm", self.linear("fc", aux_TX))
        block = [int(ids_T[anchor])] + [self.config.mask_token_id] * (self.config.block_size - 1)
        x = self.tensors["embed_tokens.weight"][block]
        for index in range(self.layer.num_hidden_layers):
            x = x + self.attend(index, self.norm(f"layers.{index}.input_layernorm", x), context_TH, anchor)
            x = x + self.mlp(index, self.norm(f"layers.{index}.post_attention_layernorm", x))
        return self.norm("norm", x)

    def logits(self, document: PackedBatch, anchor: int) -> Tensor:
        """Draft logits [S, D] of the block with this anchor."""
        return self.linear("lm_head", self.states(document, anchor))


def teacher_probabilities(speculator: Speculator, head: VerifierHead, document: PackedBatch) -> Tensor:
    """The verifier's distribution after each token, over the draft vocabulary, [T, D]."""
    states = rms(document.last_hidden_states[0], head.norm_weight, head.norm_eps)
    logits = states @ head.head.weight.T
    return logits[:, speculator.vocab.draft_ids].softmax(-1)


def slots_of(speculator: Speculator, document: PackedBatch) -> list[tuple[int, int, int, bool]]:
    """Every slot that predicts, of every block: (anchor, slot, position of the token it predicts, does it count).

    An anchor is a supervised token with more than a block of tokens from it to the document's end. Slot k of a block
    with anchor a stands at a + k. It predicts that token, or the next with `sample_from_anchor`, and counts where the
    token it stands on is supervised.
    """
    config, mask = speculator.config, document.loss_mask[0].tolist()
    first, shift = (0, 1) if config.sample_from_anchor else (1, 0)
    return [
        (anchor, slot, anchor + slot + shift, mask[anchor + slot])
        for anchor in range(len(mask) - config.block_size)
        if mask[anchor]
        for slot in range(first, config.block_size)
    ]
