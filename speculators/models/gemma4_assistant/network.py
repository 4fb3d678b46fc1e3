"""The network of a Gemma 4 assistant: a token and a state in, logits and the next token's state out.

Every step of a proposal stands at the same position, that of the last token that the verifier has computed, and attends
to the verifier's keys up to there: nothing is written. Its input is [embedding ; state], the embedding as the verifier
scales it (by the root of its hidden size). The position is that of vLLM 0.32. Shape suffixes as in `cache`; V
vocabulary, H the assistant's hidden size, W the verifier's, C centroids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedTextRotaryEmbedding

from speculators.formats.checkpoint import load_tensors
from speculators.models.cache import SlotCache, SlotWrite, attend
from speculators.models.gemma4_assistant.sizes import AssistantSizes
from speculators.models.layers import RMSNorm, SkinnyLinear, rotate

# What makes cos and sin, by the type of the language part.
_ROTARIES: Mapping[str, type[nn.Module]] = {
    "gemma4_text": Gemma4TextRotaryEmbedding,
    "gemma4_unified_text": Gemma4UnifiedTextRotaryEmbedding,
}


@dataclass
class SharedKeys:
    """What one kind of layer reads in a proposal: keys and values [B, N, E, D], cos and sign-carrying sin [B, 1, D]."""

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor


class QueryAttention(nn.Module):
    """Attention of one position with queries of its own and the keys of others; scores are not scaled."""

    def __init__(self, sizes: AssistantSizes, layer: int) -> None:
        super().__init__()
        hidden, self.head_dim = int(sizes.text.hidden_size), sizes.head_dim(layer)
        queries, bias = int(sizes.text.num_attention_heads) * self.head_dim, bool(sizes.text.attention_bias)
        self.window = sizes.window(layer)
        self.q_proj = SkinnyLinear(hidden, queries, bias=bias)
        self.o_proj = SkinnyLinear(queries, hidden, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, sizes.text.rms_norm_eps)

    def forward(self, hidden_B1H: Tensor, shared: SharedKeys, write: SlotWrite) -> Tensor:
        """[B, 1, H] -> [B, 1, H]."""
        heads = self.q_norm(self.q_proj(hidden_B1H).unflatten(-1, (-1, self.head_dim)))
        q_BQ1D = rotate(heads, shared.cos, shared.sin).transpose(1, 2)
        out = attend(write, q_BQ1D, shared.keys, shared.values, 1.0, self.window)
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended


class GatedActivation(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, hidden: int, wide: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = SkinnyLinear(hidden, wide, bias=False)
        self.up_proj = SkinnyLinear(hidden, wide, bias=False)
        self.down_proj = SkinnyLinear(wide, hidden, bias=False)
        self.activation = ACT2FN[activation]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        out: Tensor = self.down_proj(self.activation(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class AssistantLayer(nn.Module):
    """A decoder layer with a norm on both sides of each part, and a scale on its output."""

    layer_scalar: Tensor

    def __init__(self, sizes: AssistantSizes, layer: int) -> None:
        super().__init__()
        text = sizes.text
        hidden, eps = int(text.hidden_size), text.rms_norm_eps
        self.self_attn = QueryAttention(sizes, layer)
        self.mlp = GatedActivation(hidden, int(text.intermediate_size), text.hidden_activation)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, hidden_B1H: Tensor, shared: SharedKeys, write: SlotWrite) -> Tensor:
        """[B, 1, H] -> [B, 1, H]."""
        attended = self.self_attn(self.input_layernorm(hidden_B1H), shared, write)
        hidden_B1H = hidden_B1H + self.post_attention_layernorm(attended)
        mixed = self.mlp(self.pre_feedforward_layernorm(hidden_B1H))
        scaled: Tensor = (hidden_B1H + self.post_feedforward_layernorm(mixed)) * self.layer_scalar
        return scaled


class OrderedEmbedding(nn.Module):
    """Which tokens have logits: those of the groups whose centroids are the nearest to a state."""

    token_ordering: Tensor

    def __init__(self, hidden: int, vocab: int, centroids: int, top: int) -> None:
        super().__init__()
        self.centroids = SkinnyLinear(hidden, centroids, bias=False)
        self.register_buffer("token_ordering", torch.zeros(vocab, dtype=torch.int64))
        self._top = top

    def forward(self, state_BH: Tensor, head_VH: Tensor) -> Tensor:
        """Logits [B, V], minus infinity for tokens of all other groups."""
        nearest_BC = self.centroids(state_BH).topk(self._top, -1).indices
        groups = self.token_ordering.view(self.centroids.out_features, -1)
        ids_BS = groups[nearest_BC].flatten(1)
        logits_BS = (head_VH[ids_BS] @ state_BH[:, :, None]).squeeze(-1)
        logits_BV = logits_BS.new_full((len(ids_BS), len(head_VH)), float("-inf"))
        return logits_BV.scatter_(1, ids_BS, logits_BS)


class Gemma4Assistant(nn.Module):
    """An assistant; names in its `state_dict()` are the file's, but for a tied head, which is the embedding."""

    def __init__(self, sizes: AssistantSizes) -> None:
        super().__init__()
        text, hidden, wide = sizes.text, int(sizes.text.hidden_size), sizes.backbone_hidden_size
        self.sizes = sizes
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(sizes.vocab_size, hidden),
                "layers": nn.ModuleList(AssistantLayer(sizes, layer) for layer in range(len(sizes.layer_types))),
                "norm": RMSNorm(hidden, text.rms_norm_eps),
            }
        )
        self.pre_projection = SkinnyLinear(2 * wide, hidden, bias=False)
        self.post_projection = SkinnyLinear(hidden, wide, bias=False)
        self.lm_head = None if sizes.tied else SkinnyLinear(hidden, sizes.vocab_size, bias=False)
        self.masked_embedding = None
        if sizes.num_centroids is not None and sizes.top_centroids is not None:
            self.masked_embedding = OrderedEmbedding(hidden, sizes.vocab_size, sizes.num_centroids, sizes.top_centroids)
        self._softcap: float | None = text.final_logit_softcapping
        with torch.device("cpu"):
            # Of the module only its method is kept, so that a change of dtype does not round the frequencies.
            self._turns: Callable[..., tuple[Tensor, Tensor]] = _ROTARIES[text.model_type](text).forward

    @classmethod
    def from_pretrained(cls, directory: Path) -> Gemma4Assistant:
        """Read a local directory, in the dtype that is stored; FormatError lists what does not belong together."""
        sizes = AssistantSizes.read(directory)
        tensors = load_tensors(directory, sizes.expected_tensors())
        if sizes.tied:
            tensors.pop("lm_head.weight", None)
        with torch.device("meta"):
            assistant = cls(sizes)
        assistant.load_state_dict(tensors, assign=True)
        return assistant.eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.pre_projection.weight.dtype

    def reading(self, cache: SlotCache, key_layers: Mapping[str, int], write: SlotWrite) -> dict[str, SharedKeys]:
        """What each kind of layer reads of a verifier's cache at the one position a row of `write`.

        `key_layers` says which of the verifier's layers that is (`AssistantSizes.key_layers`).
        """
        found = {}
        like = self.pre_projection.weight[:0]
        for kind, layer in key_layers.items():
            cos, sin = self._turns(like, write.positions_BT, kind)
            first, second = sin.chunk(2, -1)
            found[kind] = SharedKeys(*cache.read(layer, write), cos, torch.cat((-first, second), -1))
        return found

    def forward(
        self, embeds_BW: Tensor, states_BW: Tensor, shared: Mapping[str, SharedKeys], write: SlotWrite
    ) -> tuple[Tensor, Tensor]:
        """The verifier's embedding of a token and the state before it -> logits [B, V], state of the next step."""
        hidden_B1H = self.pre_projection(torch.cat((embeds_BW, states_BW), -1))[:, None]
        for kind, layer in zip(self.sizes.layer_types, cast(nn.ModuleList, self.model["layers"]), strict=True):
            hidden_B1H = layer(hidden_B1H, shared[kind], write)
        state_BH = self.model["norm"](hidden_B1H[:, 0])
        return self._logits(state_BH), self.post_projection(state_BH)

    def _logits(self, state_BH: Tensor) -> Tensor:
        embedding = cast(nn.Embedding, self.model["embed_tokens"])
        head_VH = embedding.weight if self.lm_head is None else self.lm_head.weight
        if self.masked_embedding is not None:
            ordered: Tensor = self.masked_embedding(state_BH, head_VH)
            return ordered
        logits_BV = F.linear(state_BH, head_VH)
        return logits_BV if self._softcap is None else self._softcap * torch.tanh(logits_BV / self._softcap)
