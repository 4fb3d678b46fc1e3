"""Building blocks of draft decoders; their parameter names are the checkpoint's.

Shape suffixes: `...` any leading dimensions, Q query heads, N key heads, D head size, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speculators.errors import FormatError
from speculators.formats.decoder import DecoderConfig
from speculators.models.compiling import compilable
from speculators.models.hardware import padded_training_rows, with_padded_rows

# Rope types whose table does not depend on the length of the sequence, so that a token's rotation never changes.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
SKINNY_ROWS = range(1, 129)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - as F.linear has it
    """F.linear, [..., in] -> [..., out]; under autocast the number of rows is padded as
    `hardware.padded_training_rows` says.
    """
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return F.linear(input, weight, bias)
    dtype, size = torch.get_autocast_dtype(kind), input.shape[-1]
    rows = input.numel() // size
    if padded_training_rows(rows, dtype, input.device) == rows:
        return F.linear(input, weight, bias)
    padded = with_padded_rows(input.reshape(rows, size).to(dtype))
    out: Tensor = F.linear(padded, weight, bias)[:rows].reshape(*input.shape[:-1], weight.shape[0])
    return out


class SkinnyLinear(nn.Linear):
    """A linear layer that is fast for a few rows on a CPU.

    Without gradients, in float32 on a CPU and for up to 128 rows, it multiplies in the order (W xᵀ)ᵀ: the BLAS kernel
    of the other order is two to three times slower there. So is the one for a single row, which is therefore doubled.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
        """[..., in] -> [..., out]."""
        rows = input.numel() // self.in_features
        if (
            torch.is_grad_enabled()
            or rows not in SKINNY_ROWS
            or input.dtype != torch.float32
            or self.weight.dtype != torch.float32
            or input.device.type != "cpu"
        ):
            return linear(input, self.weight, self.bias)
        columns = input.reshape(rows, self.in_features)
        out = torch.mm(self.weight, (columns.repeat(2, 1) if rows == 1 else columns).t()).t()[:rows]
        if self.bias is not None:
            out = out + self.bias
        # Some callers view the result, as that of any linear layer.
        contiguous: Tensor = out.contiguous()
        return contiguous.view(*input.shape[:-1], self.out_features)


def use_skinny_linears(module: nn.Module) -> None:
    """Turn every plain `nn.Linear` inside `module` into a `SkinnyLinear`, in place; weights and names stay."""
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = SkinnyLinear


@torch.no_grad()
def draw_parameters(
    named: Iterable[tuple[str, nn.Parameter]], deviation: float, generator: torch.Generator, *, gain: float = 1.0
) -> None:
    """Draw every trained matrix from N(0, deviation²), in order; norms start at `gain`, biases at 0."""
    for name, parameter in named:
        if parameter.is_meta or not parameter.requires_grad:
            continue
        if parameter.dim() > 1:
            parameter.normal_(0.0, deviation, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else gain)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in float32 for half-precision inputs."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., size] -> [..., size], dtype kept."""
        if hidden.dtype == torch.float32 == self.weight.dtype:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(hidden.float(), self.weight.shape, self.weight.float(), self.eps).to(hidden.dtype)


class RotaryTable(nn.Module):
    """cos and sin of every position, grown on demand.

    The frequencies are those of transformers' rope code for the decoder's `rope_parameters`; `rotated` dimensions of a
    head are turned, fewer than all with a `partial_rotary_factor`. Raises FormatError for a rope type whose rotation
    depends on the sequence's length: a fallback would train what no server computes.
    """

    def __init__(self, decoder: DecoderConfig) -> None:
        super().__init__()
        self._frequencies, self._scaling = _frequencies(decoder)
        self.rotated = 2 * self._frequencies.numel()
        self._cos = self._sin = torch.empty(0, self.rotated)

    def at(self, positions: Tensor, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sign-carrying sin [..., rotated] at int64 `positions`, all of them below `end`."""
        if end > self._cos.shape[0] or self._cos.device != positions.device:
            self._grow(max(end, 2 * self._cos.shape[0], 512), positions.device)
        return self._cos[positions].to(dtype), self._sin[positions].to(dtype)

    def _grow(self, length: int, device: torch.device) -> None:
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        self._cos = torch.cat((cos, cos), -1).to(device)
        self._sin = torch.cat((-sin, sin), -1).to(device)


def _frequencies(decoder: DecoderConfig) -> tuple[Tensor, float]:
    parameters = dict(decoder.rope_parameters)
    kind, share = parameters["rope_type"], parameters.get("partial_rotary_factor", 1.0)
    if kind not in STATIC_ROPE_TYPES:
        raise FormatError(f"rope_type {kind!r} of transformer_layer_config; drafts know {', '.join(STATIC_ROPE_TYPES)}")
    config = LlamaConfig(
        # Heads need not divide the hidden size evenly, which transformers insists on; only their own size matters here.
        hidden_size=decoder.num_attention_heads * decoder.head_dim,
        num_attention_heads=decoder.num_attention_heads,
        # Of transformers' rope functions, only that of the default type does not know the share.
        head_dim=int(decoder.head_dim * share) if kind == "default" else decoder.head_dim,
        max_position_embeddings=decoder.max_position_embeddings,
        rope_parameters=parameters,
    )
    if kind == "default":
        frequencies, scaling = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(scaling)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., heads, D] by the tables [..., rotated] of `RotaryTable.at`; dimensions beyond pass unchanged."""
    rotated = cos.shape[-1]
    turned = heads if rotated == heads.shape[-1] else heads[..., :rotated]
    first, second = turned.chunk(2, -1)
    turned = turned * cos.unsqueeze(-2) + torch.cat((second, first), -1) * sin.unsqueeze(-2)
    return turned if rotated == heads.shape[-1] else torch.cat((turned, heads[..., rotated:]), -1)


class SelfAttention(nn.Module):
    """The projections of one attention layer; scores are computed by whoever holds keys and values.

    A draft's first layer may read a token beside a state, so `input_size` need not be the hidden size. `window` is what
    the layer is trained with, `serving_window` what it is served with, by default the same.
    """

    compiles = False

    def __init__(self, decoder: DecoderConfig, input_size: int, window: int | None) -> None:
        super().__init__()
        self.head_dim = decoder.head_dim
        self.scale = decoder.head_dim**-0.5
        self.window = self.serving_window = window
        bias = decoder.attention_bias
        queries, keys = decoder.num_attention_heads * self.head_dim, decoder.num_key_value_heads * self.head_dim
        self.q_proj = SkinnyLinear(input_size, queries, bias=bias)
        self.k_proj = SkinnyLinear(input_size, keys, bias=bias)
        self.v_proj = SkinnyLinear(input_size, keys, bias=bias)
        self.o_proj = SkinnyLinear(queries, decoder.hidden_size, bias=bias and decoder.model_type == "llama")
        normed = decoder.model_type == "qwen3"
        self.q_norm = RMSNorm(self.head_dim, decoder.rms_norm_eps) if normed else None
        self.k_norm = RMSNorm(self.head_dim, decoder.rms_norm_eps) if normed else None

    @compilable
    def query(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., input] -> rotated queries [..., Q, D]."""
        return self.as_query(self.q_proj(hidden), cos, sin)

    @compilable
    def key_value(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., input] -> rotated keys and values, each [..., N, D]."""
        return self.as_key(self.k_proj(hidden), cos, sin), self.as_heads(self.v_proj(hidden))

    def as_heads(self, projected: Tensor) -> Tensor:
        """[..., heads * D] -> [..., heads, D]."""
        heads: Tensor = projected.unflatten(-1, (projected.shape[-1] // self.head_dim, self.head_dim))
        return heads

    @compilable
    def as_query(self, projected: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What `q_proj` gave -> rotated queries [..., Q, D]."""
        heads = self.as_heads(projected)
        return rotate(heads if self.q_norm is None else self.q_norm(heads), cos, sin)

    @compilable
    def as_key(self, projected: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What `k_proj` gave -> rotated keys [..., N, D]."""
        heads = self.as_heads(projected)
        return rotate(heads if self.k_norm is None else self.k_norm(heads), cos, sin)

    def output(self, attended: Tensor) -> Tensor:
        """[..., Q, D] -> [..., H]."""
        out: Tensor = self.o_proj(attended.flatten(-2))
        return out


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, decoder: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = SkinnyLinear(decoder.hidden_size, decoder.intermediate_size, bias=False)
        self.up_proj = SkinnyLinear(decoder.hidden_size, decoder.intermediate_size, bias=False)
        self.down_proj = SkinnyLinear(decoder.intermediate_size, decoder.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer, cut where keys are stored and where attention happens.

    `prepare` gives the attention's input and the residual, `finish` takes the attended heads. A caller that needs keys
    of many positions but outputs of few projects queries and finishes for those few alone.
    """

    compiles = False

    def __init__(self, decoder: DecoderConfig, index: int, input_size: int | None = None) -> None:
        super().__init__()
        window = decoder.sliding_window if decoder.layer_types[index] == "sliding_attention" else None
        self.input_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.self_attn = SelfAttention(decoder, input_size or decoder.hidden_size, window)
        self.post_attention_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.mlp = GatedMLP(decoder)

    def prepare(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H] -> (attention input, residual)."""
        return self.input_layernorm(hidden), hidden

    @compilable
    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual [..., H] and attended heads [..., Q, D] -> the layer's output [..., H]."""
        hidden = residual + self.self_attn.output(attended)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out
