import json
import resource
from pathlib import Path

import pytest

from speculators.errors import TrainingError
from speculators.models.family import Count
from speculators.train.metrics import MetricsLog, MetricSums, Throughput, read_metrics


def test_rates_are_sums_over_sums() -> None:
    sums = MetricSums()
    sums.add({"loss": Count(10.0, 4.0), "full_acc_0": Count(1.0, 4.0)})
    sums.add({"loss": Count(2.0, 2.0), "full_acc_0": Count(2.0, 2.0)})
    assert sums.rate("loss") == 2.0
    assert sums.rate("full_acc_0") == 0.5
    assert sums.rate("confidence") is None


def test_positions_come_in_order_of_their_number() -> None:
    sums = MetricSums({f"full_acc_{k}": (float(k), 20.0) for k in (10, 2, 0, 1)} | {"cond_acc_0": (1.0, 2.0)})
    assert [count.sum for count in sums.per_position()] == [0.0, 1.0, 2.0, 10.0]


def test_sums_survive_json() -> None:
    sums = MetricSums({"loss": Count(1.5, 3.0)})
    assert MetricSums(json.loads(json.dumps(sums.to_json()))).counts == sums.counts


def test_throughput_leaves_out_the_warm_up() -> None:
    meter = Throughput(warmup_steps=2)
    assert meter.tokens_per_second is None
    for tokens, seconds in ((5, 100.0), (5, 100.0), (30, 2.0), (10, 2.0)):
        meter.add(tokens, seconds)
    assert meter.tokens_per_second == 10.0


def test_a_log_forgets_what_a_resumed_run_writes_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.forget_after(3)
    for step in range(1, 6):
        log.write({"step": step})
    with log.path.open("a", encoding="utf-8") as stream:
        stream.write('{"step": 6, "lo')
    log.forget_after(3)
    assert [line["step"] for line in read_metrics(log.path)] == [1, 2, 3]
    log.write({"step": 4})
    assert log.path.read_text(encoding="utf-8").count("\n") == 4


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnothing\n{"step": 3}\n', encoding="utf-8")
    with pytest.raises(TrainingError, match=r"metrics\.jsonl:2: not JSON"):
        list(read_metrics(path))


def test_a_log_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size, limits[1]))
    try:
        with pytest.raises(TrainingError, match=r"metrics\.jsonl cannot be written: .*make room and run again"):
            log.write({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [line["step"] for line in read_metrics(log.path)] == [1]
