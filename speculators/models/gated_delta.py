"""Gated delta-net layers of transformers' own models over a slot cache, or over sequences in one row.

Such a layer (Qwen3-Next, Qwen3.5) reads its tokens one after another: a causal convolution over the last few of them,
and then S <- exp(g) S + beta k (v - exp(g) k S), o = q S (Gated Delta Networks, arXiv 2412.06464). What it computes is
its own. Shape suffixes as in `recurrent`; K and V heads of keys and of values, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.models.recurrent import RecurrentLayer

# From so many tokens on a chunk of 64 in matrix products is faster than one token after another (32 heads of 128, CPU).
_CHUNK_FROM = 24


@dataclass
class DeltaTokens:
    """What the delta rule reads: queries, keys [B, T, K, D], values [B, T, V, D], log decays and rates [B, T, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def count(self) -> int:
        """How many tokens, T."""
        return self.g.shape[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> DeltaTokens:
        """The same change of every tensor."""
        return DeltaTokens(change(self.q), change(self.k), change(self.v), change(self.g), change(self.beta))

    def only(self, valid_BT: Tensor) -> DeltaTokens:
        """Tokens that are not valid leave the state as it is: no decay, and nothing written."""
        skipped_BT1 = ~valid_BT[..., None]
        g, beta = self.g.masked_fill(skipped_BT1, 0), self.beta.masked_fill(skipped_BT1, 0)
        return DeltaTokens(self.q, self.k, self.v, g, beta)


class GatedDelta(RecurrentLayer[DeltaTokens]):
    """The computation of one gated delta net of transformers, cut where its states go in and come out."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        own = sys.modules[type(module).__module__]
        # The model's own functions, because they run on optional kernels where those are installed.
        self._chunked = own.torch_chunk_gated_delta_rule
        self._one_by_one = own.torch_recurrent_gated_delta_rule

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a row's state."""
        return self.module.num_v_heads, self.module.head_k_dim, self.module.head_v_dim

    def project(self, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """What is taken in of each token, [B, T, C] (queries, keys, values, then beta and decay), and the gate z."""
        module = self.module
        if hasattr(module, "in_proj_qkvz"):
            projected = module.in_proj_qkvz(hidden_BTH), module.in_proj_ba(hidden_BTH)
            q, k, v, z, b, a = module.fix_query_key_value_ordering(*projected)
            return torch.cat([q.flatten(2), k.flatten(2), v.flatten(2), b, a], -1), z
        z = module.in_proj_z(hidden_BTH).unflatten(-1, (-1, module.head_v_dim))
        return torch.cat([part(hidden_BTH) for part in (module.in_proj_qkv, module.in_proj_b, module.in_proj_a)], -1), z

    def convolve(self, joined_BTC: Tensor) -> DeltaTokens:
        """The tokens behind the first `context`, as the delta rule reads them."""
        module, heads = self.module, self.module.num_v_heads
        mixed, b, a = joined_BTC.split([module.conv_dim, heads, heads], -1)
        convolved = F.conv1d(mixed.transpose(1, 2), module.conv1d.weight, module.conv1d.bias, groups=module.conv_dim)
        activated = F.silu(convolved).transpose(1, 2)
        q, k, v = activated.split([module.key_dim, module.key_dim, module.value_dim], -1)
        g = -module.A_log.float().exp() * F.softplus(a[:, self.context :].float() + module.dt_bias)
        return DeltaTokens(
            q.unflatten(-1, (-1, module.head_k_dim)),
            k.unflatten(-1, (-1, module.head_k_dim)),
            v.unflatten(-1, (-1, module.head_v_dim)),
            g,
            b[:, self.context :].sigmoid(),
        )

    def recur(self, tokens: DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [B, T, V, D] and the state behind the last token."""
        run = self._one_by_one if tokens.g.shape[1] < _CHUNK_FROM else self._chunked
        repeats = tokens.v.shape[2] // tokens.k.shape[2]
        out, new_state = run(
            tokens.q.repeat_interleave(repeats, 2),
            tokens.k.repeat_interleave(repeats, 2),
            tokens.v,
            g=tokens.g,
            beta=tokens.beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out, new_state

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """Outputs [B, T, V, D], normed and gated -> [B, T, H]."""
        normed = self.module.norm(out.reshape(-1, out.shape[-1]), gate.reshape(-1, gate.shape[-1]))
        hidden: Tensor = self.module.out_proj(normed.view(*out.shape[:2], -1))
        return hidden
