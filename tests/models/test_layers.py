import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from speculators.formats.decoder import DecoderConfig
from speculators.models.attention import packed_attention, plan_blocks
from speculators.models.layers import (
    DecoderLayer,
    RMSNorm,
    RotaryTable,
    SkinnyLinear,
    rotate,
    use_skinny_linears,
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
ROPES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    LLAMA3,
    YARN,
]


def decoder(model_type: str = "llama", rope: dict | None = None, **changes) -> DecoderConfig:
    return DecoderConfig(model_type=model_type, rope_parameters=rope or ROPES[0], **{**SIZES, **changes})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 6), (2, 6), (3, 5, 6), (128, 6), (129, 6)])
def test_skinny_linear_is_linear(shape: tuple[int, ...], bias: bool) -> None:
    layer = SkinnyLinear(6, 7, bias=bias)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    expected = F.linear(x, layer.weight, layer.bias)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
        half = layer.to(torch.bfloat16)
        assert half(x.bfloat16()).dtype == torch.bfloat16
    x.requires_grad_()
    layer.float()(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(x.shape))


def test_plain_linears_become_skinny_in_place() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 4), nn.ModuleDict({"inner": nn.Linear(4, 2)}), Special(2, 2))
    names = list(model.state_dict())
    use_skinny_linears(model)
    assert [type(module) for module in model.modules() if isinstance(module, nn.Linear)] == [
        SkinnyLinear,
        SkinnyLinear,
        Special,
    ]
    assert list(model.state_dict()) == names


def test_rms_norm_is_that_of_transformers() -> None:
    ours, theirs = RMSNorm(16, 1e-5), LlamaRMSNorm(16, 1e-5)
    weight = torch.rand(16, generator=torch.Generator().manual_seed(0))
    x = 3 * torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(ours(x.bfloat16()).float(), theirs(x), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope['rope_type']}-{rope['rope_theta']:g}")
def test_rotation_is_that_of_transformers(rope: dict) -> None:
    """Base and type of the rotation are the verifier's (pitfall 5)."""
    table = RotaryTable(decoder(rope=rope))
    config = LlamaConfig(**SIZES, rope_parameters=dict(rope))
    positions = torch.tensor([[0, 1, 700], [5, 63, 64]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    heads = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    first, second = heads.chunk(2, -1)
    expected = heads * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None]
    torch.testing.assert_close(rotate(heads, *table.at(positions, 701, torch.float32)), expected)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope['rope_type']}-{rope['rope_theta']:g}")
def test_a_part_of_a_head_is_rotated_as_a_head_of_that_size(rope: dict) -> None:
    """What is turned is what the config says (pitfall 4)."""
    part = RotaryTable(decoder(rope={**rope, "partial_rotary_factor": 0.5}))
    small = RotaryTable(decoder(rope=rope, head_dim=4))
    positions = torch.arange(5)
    heads = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    found = rotate(heads, *part.at(positions, 5, torch.float32))
    assert part.rotated == 4
    assert torch.equal(found[..., 4:], heads[..., 4:])
    torch.testing.assert_close(found[..., :4], rotate(heads[..., :4], *small.at(positions, 5, torch.float32)))


def test_yarn_scales_the_rotation() -> None:
    """Base and type of the rotation are the verifier's (pitfall 5)."""
    cos, sin = RotaryTable(decoder(rope=YARN)).at(torch.tensor([0, 9]), 10, torch.float32)
    factor = 0.1 * math.log(4.0) + 1.0
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, factor**2))


def test_the_rotary_table_grows_and_keeps_its_values() -> None:
    table = RotaryTable(decoder())
    early = table.at(torch.tensor([3, 500]), 501, torch.float32)
    late = table.at(torch.tensor([3, 500, 5000]), 5001, torch.float32)
    assert torch.equal(late[0][:2], early[0])
    assert torch.equal(late[1][:2], early[1])
    assert late[0][2, 0].item() == pytest.approx(torch.tensor(5000.0).cos().item(), abs=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_decoder_layer_is_that_of_transformers(model_type: str, bias: bool) -> None:
    config = decoder(model_type, attention_bias=bias)
    ours = DecoderLayer(config, 0)
    their_config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[model_type](
        **SIZES, rope_parameters=dict(ROPES[0]), attention_bias=bias, attn_implementation="eager"
    )
    theirs = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}[model_type](their_config, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        if model_type == "qwen3" and bias:
            theirs.self_attn.o_proj.bias.zero_()
    # vLLM gives qwen3 layers no output bias, whatever the key says.
    missing = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert missing.missing_keys == []
    assert missing.unexpected_keys == (["self_attn.o_proj.bias"] if model_type == "qwen3" and bias else [])
    x = torch.randn(1, 6, 32, generator=generator)
    positions = torch.arange(6)[None]
    rotation = LlamaRotaryEmbedding(their_config)(x, positions)
    mask = torch.full((6, 6), float("-inf")).triu(1)[None, None]
    expected = theirs(x, attention_mask=mask, position_embeddings=rotation)
    state, residual = ours.prepare(x[0])
    tables = RotaryTable(config).at(positions[0], 6, torch.float32)
    attention = ours.self_attn
    keys, values = attention.key_value(state, *tables)
    blocks = plan_blocks(torch.arange(6), [6], None)
    attended = packed_attention(attention.query(state, *tables), keys, values, [], blocks, attention.scale)
    torch.testing.assert_close(ours.finish(residual, attended)[None], expected, atol=1e-5, rtol=1e-5)


def test_a_window_belongs_to_sliding_layers_alone() -> None:
    """Windows and causality are where the config says (pitfall 12)."""
    config = decoder(
        "qwen3",
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=5,
        use_sliding_window=True,
    )
    assert [DecoderLayer(config, index).self_attn.window for index in (0, 1)] == [None, 5]


@pytest.mark.parametrize("shape", [(1, 1, 6), (2, 3, 6), (5, 6)])
def test_a_skinny_product_can_be_viewed_like_that_of_any_linear_layer(shape: tuple[int, ...]) -> None:
    linear = SkinnyLinear(6, 8)
    with torch.no_grad():
        out = linear(torch.randn(shape))
    assert out.is_contiguous()
    assert out.view(-1, 2).shape == (out.numel() // 2, 2)
