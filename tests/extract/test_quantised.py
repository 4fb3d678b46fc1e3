"""States in eight bits: how far off they may be follows from the number formats."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculators.errors import StoreError
from speculators.extract.quantised import GROUP, dequantise, quantise
from speculators.extract.store import HiddenStatesStore, shard_name
from tests.extract.test_store import IDENTITY, LENGTHS, fill, make_rows


def states(hidden_size: int) -> Tensor:
    """Magnitudes from 1e-3 to 30,000 beside each other, as verifiers have them, and a token of zeros."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.linspace(-3, 4.5, hidden_size)[torch.randperm(hidden_size, generator=generator)]
    made = torch.randn(7, 3, hidden_size, generator=generator) * sizes
    made[2] = 0
    return made


def largest_of_groups(given: Tensor) -> Tensor:
    """The largest magnitude in each value's group of channels."""
    found = torch.empty_like(given)
    for start in range(0, given.shape[-1], GROUP):
        group = given[..., start : start + GROUP]
        found[..., start : start + GROUP] = group.abs().amax(-1, keepdim=True)
    return found


@pytest.mark.parametrize("hidden_size", [GROUP, 5 * GROUP, 100, 8])
def test_int8_is_off_by_half_a_step_at_most(hidden_size: int) -> None:
    given = states(hidden_size)
    numbers, scales = quantise(given, "int8")
    assert (numbers.dtype, numbers.shape, scales.dtype) == (torch.int8, given.shape, torch.float32)
    assert scales.shape == (7, 3, -(-hidden_size // GROUP))
    off = (dequantise(numbers, scales, torch.float32) - given).abs()
    # 127 steps from zero to the largest.
    assert bool((off <= largest_of_groups(given) / 127 / 2 * (1 + 1e-5)).all())
    assert int(numbers.abs().max()) == 127
    assert bool((numbers[2] == 0).all())


@pytest.mark.parametrize("hidden_size", [GROUP, 100])
def test_float8_keeps_four_significant_bits(hidden_size: int) -> None:
    given = states(hidden_size)
    numbers, scales = quantise(given, "float8_e4m3fn")
    assert numbers.dtype == torch.float8_e4m3fn
    off = (dequantise(numbers, scales, torch.float32) - given).abs()
    # Three stored bits of significand; below 2^-6 the steps are 2^-9. Largest number: 448.
    bound = torch.maximum(given.abs() / 16, largest_of_groups(given) / 448 / 1024)
    assert bool((off <= bound * (1 + 1e-5)).all())
    assert float(numbers.float().abs().max()) == 448


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_store_quantises_all_layers_but_the_last(tmp_path: Path, dtype: str) -> None:
    identity = replace(IDENTITY, aux_dtype=dtype)
    # Two layers of 8 numbers and a float32 scale, one of 8 bfloat16, an id and a mask.
    assert identity.bytes_per_token == 2 * (8 + 4) + 8 * 2 + 8 + 1
    fill(tmp_path, identity=identity)
    store = HiddenStatesStore.open(tmp_path, verify=True)
    for number in range(len(LENGTHS)):
        _, _, given = make_rows()[number]
        sample = store[number]
        assert torch.equal(sample.last_hidden_states, given[:, 2].bfloat16())
        assert sample.aux_hidden_states.dtype == torch.bfloat16
        expected = dequantise(*quantise(given[:, :2].bfloat16(), dtype), torch.bfloat16)
        assert torch.equal(sample.aux_hidden_states, expected)
        torch.testing.assert_close(sample.aux_hidden_states.float(), given[:, :2], atol=0.02, rtol=0.07)
    sizes = {name: tensor.nbytes for name, tensor in load_file(tmp_path / shard_name(1)).items()}
    assert sum(sizes.values()) - sizes["row_offsets"] == identity.bytes_per_token * (9 + 1)


def test_an_aux_layer_that_is_the_last_is_not_quantised(tmp_path: Path) -> None:
    identity = replace(IDENTITY, aux_layer_ids=(1, 5), aux_dtype="int8")
    fill(tmp_path, identity=identity)
    sample = HiddenStatesStore.open(tmp_path, aux_layer_ids=(1, 5))[3]
    assert torch.equal(sample.aux_hidden_states[:, 1], make_rows(identity)[3][2][:, 1].bfloat16())


def test_quantised_and_full_stores_are_not_mixed(tmp_path: Path) -> None:
    fill(tmp_path, limit=2)
    with pytest.raises(StoreError, match="aux dtype None, now int8 is asked for"):
        fill(tmp_path, identity=replace(IDENTITY, aux_dtype="int8"))
    (tmp_path / "other").mkdir()
    fill(tmp_path / "other", limit=2, identity=replace(IDENTITY, aux_dtype="int8"))
    with pytest.raises(StoreError, match="aux dtype int8, now None is asked for"):
        fill(tmp_path / "other")
    with pytest.raises(StoreError, match="aux dtype 'int4': expected one of float8_e4m3fn, int8, or none"):
        replace(IDENTITY, aux_dtype="int4")
