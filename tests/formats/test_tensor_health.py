"""What stored numbers betray, compared with a tensor library's own judgement."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from speculators.formats.checkpoint import read_header
from speculators.formats.tensor_health import constant_faults, is_norm, number_faults, read_integers, read_marked

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-30, 3e38, -3e38, 65504.0, 40000.0, float("nan"), float("inf"), float("-inf")]


def slugs(path: Path, tensors: dict[str, torch.Tensor]) -> list[str]:
    save_file(tensors, path / "w.safetensors")
    return [fault.slug for fault in number_faults(read_header(path / "w.safetensors"))]


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(DTYPES)), st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=6))
def test_judgement_is_that_of_torch(tmp_path_factory: pytest.TempPathFactory, dtype: str, values: list[float]) -> None:
    tensor = torch.tensor(values).to(DTYPES[dtype])
    expected = []
    if not bool(torch.isfinite(tensor).all()):
        expected.append("not-finite")
    elif not bool(tensor.view(torch.uint8).any()):
        expected.append("all-zero")
    if bool((tensor == 1).all()):
        expected.append("norms-all-ones")
    assert slugs(tmp_path_factory.mktemp("health"), {"norm.weight": tensor}) == expected


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("position", [0, 1_000_003, -1])
def test_one_bad_number_in_a_large_tensor_is_found(tmp_path: Path, dtype: torch.dtype, position: int) -> None:
    tensor = torch.full((1_500_000,), 0.5, dtype=dtype)
    assert slugs(tmp_path, {"fc.weight": tensor}) == []
    tensor[position] = float("nan")
    assert slugs(tmp_path, {"fc.weight": tensor}) == ["not-finite"]


def test_untrained_norms_are_listed_in_one_fault(tmp_path: Path) -> None:
    """Pitfall 6 and pitfall 13: norms of exactly one were never trained, or lost their steps to bfloat16."""
    names = ["norm.weight", "layers.0.input_layernorm.weight", "layers.0.self_attn.q_norm.weight", "fc_norm.1.weight"]
    tensors = {name: torch.ones(4) for name in names}
    tensors["layers.0.hidden_norm.weight"] = torch.tensor([1.0, 1.0, 1.0, 0.99])
    save_file(tensors, tmp_path / "w.safetensors")
    (found,) = number_faults(read_header(tmp_path / "w.safetensors"))
    assert "4 of 5 norm weights" in found.message
    assert all(name in found.message for name in names)


def test_zero_biases_and_empty_tensors_are_no_faults(tmp_path: Path) -> None:
    tensors = {"layers.0.self_attn.q_proj.bias": torch.zeros(4), "empty.weight": torch.zeros(0)}
    assert slugs(tmp_path, tensors | {"d2t": torch.zeros(4, dtype=torch.int64)}) == []


def test_constant_tensors_are_found_to_the_last_number(tmp_path: Path) -> None:
    almost = torch.full((1_500_000,), 0.25)
    almost[-1] = 0.5
    tensors = {
        "fc.weight": torch.full((3, 4), 0.25),
        "norm.weight": torch.full((8,), 0.5, dtype=torch.bfloat16),
        "lm_head.weight": almost,
        # Zeros and norms of ones have faults of their own; a bias may be constant, and one number is no pattern.
        "embed_tokens.weight": torch.zeros(4, 4),
        "layers.0.hidden_norm.weight": torch.ones(4),
        "fc.bias": torch.full((4,), 2.0),
        "confidence.weight": torch.full((1,), 3.0),
    }
    save_file(tensors, tmp_path / "w.safetensors")
    found = list(constant_faults(read_header(tmp_path / "w.safetensors")))
    assert [item.slug for item in found] == ["constant", "constant"]
    assert sorted(item.message.split()[0] for item in found) == ["fc.weight", "norm.weight"]
    assert "[3, 4] times" in next(item.message for item in found if item.message.startswith("fc"))


def test_names_of_norms() -> None:
    assert is_norm("norm.weight")
    assert is_norm("fc_norm.0.weight")
    assert is_norm("layers.3.post_attention_layernorm.weight")
    assert not is_norm("lm_head.weight")
    assert not is_norm("norm.bias")
    assert not is_norm("layers.0.mlp.up_proj.weight")


def test_maps_are_read(tmp_path: Path) -> None:
    mask = torch.tensor([False, True, True, False])
    save_file({"d2t": torch.tensor([-5, 0, 2**40]), "t2d": mask}, tmp_path / "w.safetensors")
    headers = read_header(tmp_path / "w.safetensors")
    assert read_integers(headers["d2t"]) == [-5, 0, 2**40]
    assert read_marked(headers["t2d"]) == [1, 2]
