"""Weights of eight bits and their scales: what they mean by the book, and every other kind refused by its name."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculators.convert.dequantise import dequantise
from speculators.convert.plan import Ledger
from speculators.convert.source import SourceCheckpoint
from speculators.errors import FormatError
from tests.convert.foreign import Drawn, ForeignCheckpoint
from tests.convert.layouts_native import quantised_blocks

FLOAT32 = {"torch_dtype": "float32"}


def opened(tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> Ledger:
    case = ForeignCheckpoint("quantised", config, tensors)
    return Ledger(SourceCheckpoint.open(case.write(tmp_path / "source")))


def spread(scales: Tensor, size: tuple[int, int], shape: torch.Size) -> Tensor:
    """Each scale over its block."""
    return torch.kron(scales, torch.ones(size))[: shape[0], : shape[1]]


@pytest.mark.parametrize("shape", [(128, 128), (130, 300), (7, 129), (256, 40)])
def test_blocks_are_of_128_by_128_unless_they_are_said_to_be_others(shape: tuple[int, int], tmp_path: Path) -> None:
    """Also where the last blocks are cut off."""
    numbers, scales = quantised_blocks(Drawn(1).matrix(*shape), (128, 128))
    ledger = opened(tmp_path, {"a.weight": numbers, "a.weight_scale_inv": scales}, FLOAT32)
    dequantise(ledger, FLOAT32)
    assert torch.equal(ledger.stored("a.weight").read(), numbers.float() * spread(scales, (128, 128), numbers.shape))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("scale_shape", [(), (1,), (6,), (6, 1), (2, 3)])
def test_a_scale_holds_for_all_a_row_or_a_block(
    dtype: torch.dtype, scale_shape: tuple[int, ...], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(2)
    numbers = (30 * torch.randn(6, 5, generator=generator)).to(dtype)
    scale = torch.rand(scale_shape, generator=generator)
    config = {**FLOAT32, "quantization_config": {"weight_block_size": [3, 2]}}
    ledger = opened(tmp_path, {"a.weight": numbers, "a.weight_scale": scale, "a.input_scale": torch.ones(())}, config)
    dequantise(ledger, config)
    factors = {(): scale, (1,): scale, (6,): scale.reshape(-1, 1), (6, 1): scale}
    by = factors[scale_shape] if scale_shape in factors else spread(scale, (3, 2), numbers.shape)
    assert torch.equal(ledger.stored("a.weight").read(), numbers.float() * by)
    assert ledger.left == ("a.weight",)
    assert ledger.dropped == {
        "a.weight_scale": "multiplied into a.weight",
        "a.input_scale": "a scale of activations, which the weights do not depend on",
    }


def test_weights_get_the_configurations_dtype_or_bfloat16(tmp_path: Path) -> None:
    numbers = Drawn(1).matrix(6, 5).to(torch.float8_e4m3fn)
    for index, (config, dtype) in enumerate(
        (({}, torch.bfloat16), ({"dtype": "float16"}, torch.float16), (FLOAT32, torch.float32))
    ):
        tensors = {"a.weight": numbers, "a.weight_scale": torch.tensor(0.25)}
        ledger = opened(tmp_path / str(index), tensors, config)
        dequantise(ledger, config)
        assert torch.equal(ledger.stored("a.weight").read(), (numbers.float() / 4).to(dtype))
    with pytest.raises(FormatError, match="dtype is 'int4'; expected bfloat16, float16, float32"):
        dequantise(opened(tmp_path / "other", tensors, {}), {"dtype": "int4"})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.weight_scale_2", "NVFP4"),
        ("a.weight_packed", "compressed-tensors, packed"),
        ("a.weight_zero_point", "compressed-tensors with zero points"),
        ("a.qweight", "GPTQ or AWQ"),
        ("a.SCB", "LLM.int8"),
        ("a.absmax", "bitsandbytes"),
        ("gate_proj_blocks", "MXFP4"),
    ],
)
def test_other_ways_to_quantise_are_refused_by_name(name: str, kind: str, tmp_path: Path) -> None:
    ledger = opened(tmp_path, {"a.weight": torch.zeros(4, 4, dtype=torch.uint8), name: torch.ones(4)}, {})
    with pytest.raises(FormatError, match=rf"{name} belongs to quantised weights that are not read \({kind}"):
        dequantise(ledger, {})
