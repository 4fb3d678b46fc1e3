"""Mamba-2 layers of transformers' own models over a slot cache, or over sequences in one row.

Such a layer reads its tokens one after another: a causal convolution over the last few of them, and then
S <- exp(dt A) S + dt x Bᵀ, y = S C + D x (Transformers are SSMs, arXiv 2405.21060). Shape suffixes as in `recurrent`;
M heads, P their size, G groups, N state size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.models.recurrent import RecurrentLayer

# Up to so many tokens one after another is faster than one chunk in matrix products.
_CHUNK_FROM = 24


@dataclass
class SpaceTokens:
    """What the recurrence reads: x [B, T, M, P], steps dt [B, T, M], and B and C [B, T, G, N]."""

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor

    @property
    def count(self) -> int:
        """How many tokens, T."""
        return self.dt.shape[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> SpaceTokens:
        """The same change of every tensor."""
        return SpaceTokens(change(self.x), change(self.dt), change(self.b), change(self.c))

    def only(self, valid_BT: Tensor) -> SpaceTokens:
        """Tokens that are not valid take no step: no decay, and nothing written."""
        return SpaceTokens(self.x, self.dt.masked_fill(~valid_BT[..., None], 0), self.b, self.c)


class Mamba2(RecurrentLayer[SpaceTokens]):
    """The computation of one Mamba-2 mixer of transformers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # The model's own function, because it runs on optional kernels where those are installed.
        self._chunked = sys.modules[type(module).__module__].mamba2_chunk_scan

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a row's state."""
        return self.module.num_heads, self.module.head_dim, self.module.ssm_state_size

    def project(self, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """What is taken in of each token: x, B and C, then dt; and the gate."""
        module = self.module
        if hasattr(module, "mup_vector"):
            projected = module.in_proj(hidden_BTH * module.ssm_in_multiplier) * module.mup_vector
        else:
            projected = module.in_proj(hidden_BTH)
        gate, inputs = projected.split([module.intermediate_size, module.conv_dim + module.num_heads], -1)
        return inputs, gate

    def convolve(self, joined_BTC: Tensor) -> SpaceTokens:
        """The tokens behind the first `context`, as the recurrence reads them."""
        module, states = self.module, self.module.n_groups * self.module.ssm_state_size
        mixed, dt = joined_BTC.split([module.conv_dim, module.num_heads], -1)
        conv = module.conv1d
        convolved = module.act(F.conv1d(mixed.transpose(1, 2), conv.weight, conv.bias, groups=conv.groups))
        x, b, c = convolved.transpose(1, 2).split([module.intermediate_size, states, states], -1)
        steps = F.softplus(dt[:, self.context :] + module.dt_bias.to(dt.dtype)).clamp(*module.time_step_limit)
        return SpaceTokens(
            x.unflatten(-1, (module.num_heads, -1)),
            steps,
            b.unflatten(-1, (module.n_groups, -1)),
            c.unflatten(-1, (module.n_groups, -1)),
        )

    def recur(self, tokens: SpaceTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [B, T, M, P] and the state behind the last token."""
        module = self.module
        decay_M = -module.A_log.float().exp()
        if tokens.count >= _CHUNK_FROM:
            out, new_state = self._chunked(
                tokens.x,
                tokens.dt,
                decay_M,
                tokens.b,
                tokens.c,
                chunk_size=module.chunk_size,
                D=module.D,
                initial_states=state,
                return_final_states=True,
            )
            return out, new_state
        repeats, outputs = module.num_heads // module.n_groups, []
        x, dt = tokens.x.float(), tokens.dt.float()
        b, c = (one.float().repeat_interleave(repeats, 2) for one in (tokens.b, tokens.c))
        kept, written = (dt * decay_M).exp()[..., None, None], (dt[..., None] * x)[..., None] * b[..., None, :]
        for t in range(tokens.count):
            state = kept[:, t] * state + written[:, t]
            outputs.append((state @ c[:, t, :, :, None]).squeeze(-1))
        return torch.stack(outputs, 1) + module.D[:, None] * x, state

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """Outputs of the recurrence, gated and normed, or only gated -> [B, T, H]."""
        module, flat = self.module, out.flatten(2)
        ungated = isinstance(module.norm, nn.Identity)
        normed = flat * F.silu(gate) if ungated else module.norm(flat, gate)
        hidden: Tensor = module.out_proj(normed.to(gate.dtype))
        return hidden
