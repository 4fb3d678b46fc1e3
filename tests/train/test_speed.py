import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from speculators.train.loop import train
from speculators.train.speed import Speed, measured_peak, peak_flops, peak_of
from tests.train.test_loop import assert_same_bits, config, lines, weights
from tests.train.tiny_training import make_task

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA A1000", None, None),
    ],
)
def test_peaks_are_known_by_name(name: str, bfloat16: float | None, float32: float | None) -> None:
    assert peak_of(name, torch.bfloat16) == bfloat16
    assert peak_of(name, torch.float32) == float32


def test_the_peak_of_a_cpu_is_what_a_product_reaches() -> None:
    peak = measured_peak(torch.float32, torch.get_num_threads())
    assert peak == peak_flops(CPU, torch.float32)
    matrix = torch.ones(512, 512)
    started = time.perf_counter()
    matrix @ matrix
    # Another product, timed once, is not much faster than the fastest of several.
    assert 2 * 512**3 / (time.perf_counter() - started) < 3 * peak
    assert peak > 1e8


def test_operations_are_those_of_products_and_attention() -> None:
    """A linear map of N tokens from I to O: 2 N I O forward, as much again for each of its two gradients."""
    speed = Speed(CPU, torch.float32, counts_flops=True)
    linear, inputs = nn.Linear(8, 6), torch.randn(10, 8, requires_grad=True)
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    for _ in range(2):
        with speed.computing(10):
            linear(inputs).sum().backward()
            nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
        speed.add("data", 1.0)
        speed.end_step(7)
    sums = speed.take().counts
    # Attention is two products forward; its gradients are four, and the first of the two once more.
    flops = 3 * 2 * 10 * 8 * 6 + (2 + 5) * 2 * 2 * 5 * 5 * 4
    assert sums["mfu"].sum == pytest.approx(7 * flops / 10)
    seconds = sums["compute"].sum
    assert (sums["data"].sum, sums["data"].count) == (2.0, 2.0)
    # Of two steps the second counts, which was one second of waiting and some of computing.
    peak = measured_peak(torch.float32, torch.get_num_threads())
    assert peak < sums["mfu"].count < peak * (1 + seconds)
    assert speed.take().counts == {}


def test_what_is_compiled_is_counted_and_stays_compiled() -> None:
    speed, x = Speed(CPU, torch.float32, counts_flops=True), torch.randn(1, 2, 128, 16)
    mask = create_block_mask(lambda _, __, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    attend = torch.compile(flex_attention, backend="aot_eager")
    expected = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    for _ in range(2):
        with speed.computing(1):
            torch.testing.assert_close(attend(x, x, x, block_mask=mask), expected)
        speed.end_step(1)
    assert speed.take().counts["mfu"].sum == 2 * 2 * 2 * 128 * 128 * 16


def test_without_counting_there_is_no_utilisation() -> None:
    speed = Speed(CPU, torch.float32, counts_flops=False)
    for _ in range(2):
        with speed.computing(4):
            torch.ones(2, 2) @ torch.ones(2, 2)
        speed.end_step(4)
    assert set(speed.take().counts) == {"compute"}


def test_a_step_is_split_into_its_parts(tiny_verifier: Path, tmp_path: Path) -> None:
    counted, uncounted = make_task(tiny_verifier), make_task(tiny_verifier)
    started = time.perf_counter()
    train(counted, config(log_every=2, norm_rate=0.5), tmp_path / "counted")
    took = time.perf_counter() - started
    found = lines(tmp_path / "counted")
    assert [line["seconds"]["compute"]["count"] for line in found] == [2, 2, 2, 2, 1]
    parts = [part for line in found for part in line["seconds"].values()]
    assert all(part["sum"] > 0 for part in parts)
    assert sum(part["sum"] for part in parts) < took
    for line in found:
        assert set(line["seconds"]) == {"data", "compute", "optimizer"}
        assert (line["lr_norms"], line["lr_heads"]) == (line["lr"] * 0.5, line["lr"])
        # In the first step operations are counted; in the second they are used.
        assert 0 < line["mfu"]["sum"] < line["mfu"]["count"]
    assert found[-1]["mfu"]["count"] == pytest.approx(
        measured_peak(torch.float32, torch.get_num_threads())
        * sum(part["sum"] for part in found[-1]["seconds"].values())
    )
    train(uncounted, config(log_every=2, norm_rate=0.5, count_flops=False), tmp_path / "uncounted")
    assert [line["mfu"] for line in lines(tmp_path / "uncounted")] == [None] * 5
    assert_same_bits(weights(counted.draft), weights(uncounted.draft))
