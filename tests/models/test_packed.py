import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from speculators.models.hardware import multiplies_bfloat16
from speculators.models.layers import SkinnyLinear, use_skinny_linears
from speculators.models.packed import PackedGatedMlp, PackedLinear, pack_linears

HERE = multiplies_bfloat16(torch.device("cpu"))


def frozen_pair(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 160, bias=True), nn.Linear(160, 40, bias=False)).to(dtype).requires_grad_(False)
    use_skinny_linears(model)
    return model


@pytest.mark.parametrize("rows", [1, 128, 129, 700])
def test_packed_linears_give_the_product_rounded_once(rows: int) -> None:
    model = frozen_pair(torch.bfloat16)
    names, x = list(model.state_dict()), torch.randn(2, rows, 96).bfloat16()
    exact = [x.double() @ model[0].weight.double().T + model[0].bias.double()]
    exact.append(exact[0].bfloat16().double() @ model[1].weight.double().T)
    assert pack_linears(model, 2**20) == HERE
    assert list(model.state_dict()) == names
    with torch.inference_mode():
        found = [model[0](x), model[1](exact[0].bfloat16())]
    for out, expected in zip(found, exact, strict=True):
        # Half a unit of bfloat16's last of 8 bits, and float32's error in the sum.
        torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("copied", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_packed_linears_has_their_weights_alone(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, x = frozen_pair(torch.bfloat16), torch.randn(200, 96).bfloat16()
    pack_linears(model, 2**20)
    copy = copied(model)
    assert [type(child) for child in copy] == [SkinnyLinear, SkinnyLinear]
    assert copy.state_dict().keys() == model.state_dict().keys()
    with torch.inference_mode():
        torch.testing.assert_close(copy(x), model(x), rtol=2**-7, atol=2**-7)


def test_linears_are_packed_whole_and_frozen_and_in_memory_that_is_there() -> None:
    trained = frozen_pair(torch.bfloat16)
    trained[1].requires_grad_(True)
    for model, most in (
        (frozen_pair(torch.float32), 2**20),
        (frozen_pair(torch.bfloat16), 2 * 96 * 160),
        (trained, 2**20),
    ):
        assert not pack_linears(model, most)
        assert not any(isinstance(child, PackedLinear) for child in model.modules())


def frozen_mlp(kind: type[nn.Module], config: type, activation: str) -> nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 96, "intermediate_size": 160, "hidden_act": activation, "hidden_activation": activation}
    mlp = kind(config(**sizes)).to(torch.bfloat16).requires_grad_(False)
    use_skinny_linears(mlp)
    return mlp


GATED = [(LlamaMLP, LlamaConfig), (MistralMLP, MistralConfig), (Qwen2MLP, Qwen2Config), (Qwen3MLP, Qwen3Config)]


@pytest.mark.parametrize("rows", [3, 400])
@pytest.mark.parametrize(("kind", "config"), GATED)
def test_packed_gated_mlps_are_closer_to_the_exact_one(kind: type[nn.Module], config: type, rows: int) -> None:
    mlp, x = frozen_mlp(kind, config, "silu"), torch.randn(2, rows, 96).bfloat16()
    gate, up, down = (getattr(mlp, f"{name}_proj").weight.double().T for name in ("gate", "up", "down"))
    exact = (F.silu(x.double() @ gate) * (x.double() @ up)) @ down
    with torch.inference_mode():
        before = mlp(x)
        assert pack_linears(mlp, 2**20) == HERE
        after = mlp(x)
    assert isinstance(mlp, PackedGatedMlp) == HERE
    errors = [float((out.double() - exact).abs().mean()) for out in (before, after)]
    assert errors[1] <= 1.05 * errors[0] < 0.01 * float(exact.abs().mean())
    copy = deepcopy(mlp)
    with torch.inference_mode():
        torch.testing.assert_close(copy(x), before)


def test_other_mlps_keep_their_forward() -> None:
    gelu, gemma = frozen_mlp(LlamaMLP, LlamaConfig, "gelu"), frozen_mlp(GemmaMLP, GemmaConfig, "gelu_pytorch_tanh")
    for mlp in (gelu, gemma):
        pack_linears(mlp, 2**20)
        assert not isinstance(mlp, PackedGatedMlp)
