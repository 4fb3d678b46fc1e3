"""Short convolutions of transformers' own models (LFM2) over a slot cache, or over sequences in one row.

Such a layer sees its own and the last few tokens, and keeps no other state: y = C conv(B x). Shape suffixes as in
`recurrent`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.models.attention_interface import SlotKeyValues
from speculators.models.branches import Branches
from speculators.models.recurrent import SlotLayer


class ShortConvolution(SlotLayer):
    """The gated convolution of LFM2."""

    def over_slots(self, hidden_BTH: Tensor, slots: SlotKeyValues) -> Tensor:
        """One write, [B, T, H] -> [B, T, H]."""
        layer, plan, states = self.module.layer_idx, slots.state_plan, slots.running
        inputs_BTH, gate_BTH = self._project(hidden_BTH)
        joined = states.joined(layer, plan, inputs_BTH, self.context)
        states.keep(layer, plan, joined, self.context)
        return self._finish(self._convolve(joined)[plan.batch, plan.written_BT], gate_BTH)

    def over_branches(self, hidden_1TH: Tensor, branches: Branches) -> Tensor:
        """Whole sequences in one row."""
        inputs_1TH, gate_1TH = self._project(hidden_1TH)
        shared, rest, filling = self.branch_inputs(inputs_1TH, branches)
        outputs = [self._convolve(one) for one in (rest if shared is None else [shared, *rest])]
        return self._finish(torch.cat([*outputs, torch.zeros_like(filling)], 1), gate_1TH)

    def _project(self, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
        b_BTH, c_BTH, x_BTH = self.module.in_proj(hidden_BTH).chunk(3, -1)
        return b_BTH * x_BTH, c_BTH

    def _convolve(self, joined_BTH: Tensor) -> Tensor:
        """What the tokens behind the first `context` become."""
        conv = self.module.conv
        out = F.conv1d(joined_BTH.transpose(1, 2), conv.weight, conv.bias, groups=conv.groups)
        return out.transpose(1, 2)

    def _finish(self, out_BTH: Tensor, gate_BTH: Tensor) -> Tensor:
        hidden: Tensor = self.module.out_proj(gate_BTH * out_BTH)
        return hidden
