"""Gated delta-net layers of transformers' own models over a slot cache, or over sequences in one row.

Such a layer (Qwen3-Next, Qwen3.5) reads its tokens one after another: a causal convolution over the last few of them,
and then S <- exp(g) S + beta k (v - exp(g) k S), o = q S (Gated Delta Networks, arXiv 2412.06464). What it computes is
its own; where its states lie, and which tokens they have read, is said by `SlotKeyValues` or by `branching`. Shape
suffixes: B rows, T tokens, C channels taken in of a token, K and V heads of keys and of values, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from speculators.models.attention_interface import SlotKeyValues, current_branches
from speculators.models.branches import Branches

# Whose `linear_attention` layers are gated delta nets as they are computed here.
GATED_DELTA_MODELS = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
# From so many tokens on a chunk of 64 in matrix products is faster than one token after another (32 heads of 128, CPU).
_CHUNK_FROM = 24


def kept_states(config: PretrainedConfig) -> frozenset[str]:
    """Kinds of layers, as the config's `layer_types` calls them, whose running state a slot cache keeps."""
    return frozenset({"linear_attention"} if config.model_type in GATED_DELTA_MODELS else ())


def use_slot_states(layers: Iterable[nn.Module]) -> None:
    """Let the gated delta nets among decoder layers keep their states where `SlotKeyValues` says; weights stay."""
    for layer in layers:
        module = getattr(layer, "linear_attn", None)
        if isinstance(module, nn.Module):
            # As an attribute of the instance it is what `nn.Module.__call__` runs.
            vars(module)["forward"] = partial(_forward, GatedDelta(module), module.forward)


def _forward(layer: GatedDelta, original: Callable[..., Tensor], hidden_states: Tensor, **options: Any) -> Tensor:
    branches = current_branches()
    if branches is not None:
        return layer.over_branches(hidden_states, branches)
    cache = options.get("cache", options.get("cache_params"))  # the latter in transformers before 5.24
    if isinstance(cache, SlotKeyValues):
        return layer.over_slots(hidden_states, cache)
    return original(hidden_states, **options)


@dataclass
class _Tokens:
    """What the delta rule reads: queries, keys [B, T, K, D], values [B, T, V, D], log decays and rates [B, T, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> _Tokens:
        return _Tokens(change(self.q), change(self.k), change(self.v), change(self.g), change(self.beta))

    def only(self, valid_BT: Tensor) -> _Tokens:
        """Tokens that are not valid leave the state as it is: no decay, and nothing written."""
        skipped_BT1 = ~valid_BT[..., None]
        g, beta = self.g.masked_fill(skipped_BT1, 0), self.beta.masked_fill(skipped_BT1, 0)
        return _Tokens(self.q, self.k, self.v, g, beta)


class GatedDelta:
    """The computation of one gated delta net of transformers, cut where its states go in and come out."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        own = sys.modules[type(module).__module__]
        # The model's own functions, because they run on optional kernels where those are installed.
        self._chunked = own.torch_chunk_gated_delta_rule
        self._one_by_one = own.torch_recurrent_gated_delta_rule

    @property
    def context(self) -> int:
        """Tokens before one that the convolution sees."""
        return int(self.module.conv_kernel_size) - 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a row's state."""
        return self.module.num_v_heads, self.module.head_k_dim, self.module.head_v_dim

    def over_slots(self, hidden_BTH: Tensor, slots: SlotKeyValues) -> Tensor:
        """One write: what waits of it and before it is read by the state first, and open tokens leave it as it is."""
        layer, plan, states = self.module.layer_idx, slots.state_plan, slots.running
        inputs_BTC, z = self._project(hidden_BTH)
        joined = states.joined(layer, plan, inputs_BTC, self.context)
        tokens = self._convolve(joined)
        state = states.state(layer, plan, self.state_shape)
        outputs = []
        if plan.num_settled:
            settled = tokens.map(lambda x: x[:, : plan.num_settled]).only(plan.settled_BT)
            out, new_state = self._rule(settled, state)
            state.copy_(new_state)
            outputs.append(out)
        if plan.num_open:
            places_BT = plan.open_BT.clamp(max=tokens.g.shape[1] - 1)
            outputs.append(self._rule(tokens.map(lambda x: x[plan.batch, places_BT]), state)[0])
        states.keep(layer, plan, joined, self.context)
        return self._finish(torch.cat(outputs, 1)[plan.batch, plan.outputs_BT], z)

    def over_branches(self, hidden_1TH: Tensor, branches: Branches) -> Tensor:
        """Whole sequences in one row: what all begin with is read once, and each goes on from there."""
        inputs_1TC, z = self._project(hidden_1TH)
        before = inputs_1TC.new_zeros(1, self.context, inputs_1TC.shape[2])
        state = hidden_1TH.new_zeros((1, *self.state_shape), dtype=torch.float32)
        shared, *rest, filling = inputs_1TC.split([branches.shared, *branches.lengths, branches.filling], 1)
        outputs = []
        if branches.shared:
            joined = torch.cat([before, shared], 1)
            out, state = self._rule(self._convolve(joined), state)
            before = joined[:, joined.shape[1] - self.context :]
            outputs.append(out)
        outputs += [self._rule(self._convolve(torch.cat([before, one], 1)), state)[0] for one in rest]
        outputs.append(outputs[0].new_zeros(1, filling.shape[1], *outputs[0].shape[2:]))
        return self._finish(torch.cat(outputs, 1), z)

    def _project(self, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """What is taken in of each token, [B, T, C] (queries, keys, values, then beta and decay), and the gate z."""
        module = self.module
        if hasattr(module, "in_proj_qkvz"):
            projected = module.in_proj_qkvz(hidden_BTH), module.in_proj_ba(hidden_BTH)
            q, k, v, z, b, a = module.fix_query_key_value_ordering(*projected)
            return torch.cat([q.flatten(2), k.flatten(2), v.flatten(2), b, a], -1), z
        z = module.in_proj_z(hidden_BTH).unflatten(-1, (-1, module.head_v_dim))
        return torch.cat([part(hidden_BTH) for part in (module.in_proj_qkv, module.in_proj_b, module.in_proj_a)], -1), z

    def _convolve(self, joined_BTC: Tensor) -> _Tokens:
        """The tokens behind the first `context`, as the delta rule reads them."""
        module, heads = self.module, self.module.num_v_heads
        mixed, b, a = joined_BTC.split([module.conv_dim, heads, heads], -1)
        convolved = F.conv1d(mixed.transpose(1, 2), module.conv1d.weight, module.conv1d.bias, groups=module.conv_dim)
        activated = F.silu(convolved).transpose(1, 2)
        q, k, v = activated.split([module.key_dim, module.key_dim, module.value_dim], -1)
        g = -module.A_log.float().exp() * F.softplus(a[:, self.context :].float() + module.dt_bias)
        return _Tokens(
            q.unflatten(-1, (-1, module.head_k_dim)),
            k.unflatten(-1, (-1, module.head_k_dim)),
            v.unflatten(-1, (-1, module.head_v_dim)),
            g,
            b[:, self.context :].sigmoid(),
        )

    def _rule(self, tokens: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
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

    def _finish(self, out_BTVD: Tensor, z_BTVD: Tensor) -> Tensor:
        normed = self.module.norm(out_BTVD.reshape(-1, out_BTVD.shape[-1]), z_BTVD.reshape(-1, z_BTVD.shape[-1]))
        hidden: Tensor = self.module.out_proj(normed.view(*out_BTVD.shape[:2], -1))
        return hidden
