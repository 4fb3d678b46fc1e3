"""The DFlash 2 network: DFlash's, with convolutions around attention and MLP, and a walk over each slot's candidates.

Shape suffixes as in `dflash.model`; `...` any leading dimensions, K slots that predict, C candidates of a slot, R rank
of the selector, G groups of channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speculators.models.compiling import compilable
from speculators.models.dflash.config import BlockDraftConfig
from speculators.models.dflash.model import Attend, BlockLayer, DFlashModel
from speculators.models.dflash2.config import DFlash2Config
from speculators.models.layers import SkinnyLinear
from speculators.models.proposing import Drafts


class GroupedDynamicCausalConv(nn.Module):
    """Two convolutions along the slots of a block, one before and one after what they surround.

    A slot's kernel is a learned one a channel plus a correction a group of channels, projected from the slot's own
    state: out_s = sum over taps t of (base[side, t] + correction[side, t, group]) * in_{s-t}. A tap that would reach
    before the block's first slot reads nothing.
    """

    compiles = False

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        hidden = config.transformer_layer_config.hidden_size
        self.taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, hidden))
        self.kernel_projection = SkinnyLinear(hidden, config.num_conv_coefficients, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as the identity: the first tap passes its input, nothing depends on the state."""
        with torch.no_grad():
            self.base_kernel.zero_()
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def corrections(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Normed states [..., H] -> what is added to the base kernels of either side, each [..., taps, G]."""
        before, after = self.kernel_projection(states).unflatten(-1, (2, self.taps, -1)).unbind(-3)
        return before, after

    @compilable
    def forward(self, states_ASH: Tensor, side: int, corrections: Tensor) -> Tensor:
        """Convolve [A, S, H] along the slots; `side` 0 is the one before, 1 the one after."""
        out = torch.zeros_like(states_ASH)
        for tap in range(min(self.taps, states_ASH.shape[1])):
            earlier = F.pad(states_ASH, (0, 0, tap, 0))[:, : states_ASH.shape[1]]
            base_HG = self.base_kernel[side, tap].unflatten(0, (-1, self.group_size))
            kernel = base_HG + corrections[..., tap, :, None]
            out = out + earlier * kernel.flatten(-2)
        return out


class DFlash2Layer(BlockLayer):
    """A block layer whose attention and MLP stand each between two convolutions."""

    def __init__(self, config: BlockDraftConfig, index: int) -> None:
        super().__init__(config, index)
        assert isinstance(config, DFlash2Config)
        self.attention_conv = GroupedDynamicCausalConv(config)
        self.mlp_conv = GroupedDynamicCausalConv(config)

    def run(self, hidden_ASH: Tensor, attend: Attend) -> Tensor:
        """States of all slots [A, S, H] in and out."""
        normed, residual = self.prepare(hidden_ASH)
        before, after = self.attention_conv.corrections(normed)
        attended = self.self_attn.output(attend(self.attention_conv(normed, 0, before)))
        hidden_ASH = residual + self.attention_conv(attended, 1, after)
        normed = self.post_attention_layernorm(hidden_ASH)
        before, after = self.mlp_conv.corrections(normed)
        out: Tensor = hidden_ASH + self.mlp_conv(self.mlp(self.mlp_conv(normed, 0, before)), 1, after)
        return out


class CandidateSelector(nn.Module):
    """Scores candidates of a slot by how well each follows the token before: a low-rank bilinear form.

    The form is (P[previous] * W h) . S[candidate]; token ids are the verifier's.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        layer = config.transformer_layer_config
        self.predecessor_codebook = nn.Parameter(torch.empty(layer.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(layer.vocab_size, config.selector_rank))
        self.hidden_projection = SkinnyLinear(layer.hidden_size, config.selector_rank, bias=False)

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """States [..., H], tokens before [...] and candidates [..., C], both int64 -> what to add, float [..., C]."""
        query = F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(hidden)
        keys = F.embedding(candidates, self.successor_codebook)
        added: Tensor = torch.linalg.vecdot(query.unsqueeze(-2), keys)
        return added


class DFlash2Model(DFlashModel):
    """A DFlash 2 draft; embeddings and head are the verifier's."""

    config: DFlash2Config
    tables = (*DFlashModel.tables, "candidate_selector.*_codebook")
    layer_type = DFlash2Layer

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw every trained matrix from N(0, initializer_range²), but let convolutions start as the identity."""
        super().reset_parameters(generator)
        for module in self.modules():
            if isinstance(module, GroupedDynamicCausalConv):
                module.reset_parameters()

    def choose(self, states_BSH: Tensor, anchor_ids_B: Tensor, drafts: Drafts) -> None:
        """Walk left to right: of each slot's candidates, draw one by its logit and how well it follows the last.

        Tokens that are no candidates have the logit -inf.
        """
        states_BKH, previous_B = states_BSH[:, self.config.first_slot :], anchor_ids_B
        best = self.lm_head(states_BKH).topk(self.config.selector_top_k)
        for step in range(states_BKH.shape[1]):
            candidates_BC, unary_BC = best.indices[:, step], best.values[:, step]
            scores_BC = unary_BC + self.candidate_selector(states_BKH[:, step], previous_B, candidates_BC)
            logits_BD = scores_BC.new_full((len(scores_BC), self.config.draft_vocab_size), float("-inf"))
            previous_B = drafts.draw(logits_BD.scatter_(-1, candidates_BC, scores_BC))
