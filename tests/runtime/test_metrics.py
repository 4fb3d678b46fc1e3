"""Counters and the log line, against counts that follow from how the drafts were made."""

from pathlib import Path

import httpx

from speculators.runtime.metrics import DraftCounts, DraftLog, ServerMetrics
from speculators.runtime.verifier import Verifier
from tests.runtime.replaying import greedy, replaying_llm
from tests.runtime.serving import samples, serving

PROMPTS = ["The quick brown fox jumps over", "Name three cities near a river", "What is the sum of twelve and thirty?"]


def test_metrics_count_what_was_generated(tiny_verifier: Path) -> None:
    """Drafts of two, every third token of them wrong: see test_stream for the counting."""
    llm = replaying_llm(Verifier.from_pretrained(tiny_verifier, dtype="float32"), PROMPTS, 2)
    with serving(llm, "tiny") as address:
        usage = {"prompt_tokens": 0, "completion_tokens": 0}
        for prompt in PROMPTS:
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 14, "ignore_eos": True}
            got = httpx.post(f"{address}/v1/completions", json=body).json()
            usage = {name: count + got["usage"][name] for name, count in usage.items()}
            assert got["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 1 + 9 / 5
            assert got["metrics"]["speculative_decoding"]["acceptance_histogram"] == [0, 1, 4]
        found = samples(address)
    assert found["vllm:spec_decode_num_drafts_total", ""] == 15
    assert found["vllm:spec_decode_num_draft_tokens_total", ""] == 30
    assert found["vllm:spec_decode_num_accepted_tokens_total", ""] == 27
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"] == 15
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 12
    assert found["vllm:prompt_tokens_total", ""] == usage["prompt_tokens"]
    assert found["vllm:generation_tokens_total", ""] == usage["completion_tokens"] == 42
    assert found["vllm:request_success_total", "length"] == 3
    assert found["vllm:request_success_total", "abort"] == found["vllm:request_success_total", "stop"] == 0
    assert found["vllm:num_requests_running", ""] == found["vllm:num_requests_waiting", ""] == 0


def test_the_log_line_is_vllms() -> None:
    before = DraftCounts(5, 10, 6, (4, 2))
    line = DraftCounts(15, 40, 21, (12, 9)).since(before).log_line(10.0)
    assert line == (
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 1.50 tokens/s, "
        "Drafted throughput: 3.00 tokens/s, Accepted: 15 tokens, Drafted: 30 tokens, "
        "Per-position acceptance rate: 0.800, 0.700, Avg Draft acceptance rate: 50.0%"
    )


def test_the_log_tells_of_intervals_with_drafts_alone(tiny_verifier: Path) -> None:
    llm = replaying_llm(Verifier.from_pretrained(tiny_verifier, dtype="float32"), PROMPTS[:1], 2)
    metrics = ServerMetrics(llm.engine, "tiny")
    log = DraftLog(metrics, 100.0)
    assert log.line(110.0) is None
    llm.engine.add_request("a", llm.prompt_ids(PROMPTS[0])[1], greedy(14))
    while llm.engine.has_unfinished:
        metrics.stepped(llm.engine.step())
    line = log.line(115.0)
    assert line is not None
    assert "Mean acceptance length: 2.80, Accepted throughput: 1.80 tokens/s" in line
    assert log.line(125.0) is None
