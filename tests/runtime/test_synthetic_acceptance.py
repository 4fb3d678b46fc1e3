"""Acceptance by coin through `LLM`: what was asked for is what its counters show."""

from typing import Any

import pytest

from speculators import LLM, SamplingParams
from tests.runtime.served import Directories

STEPS, DEPTH, BATCH = 5000, 4, 64


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("asked", "length", "rates"),
    [
        ({"synthetic_acceptance_rates": [0.9, 0.7, 0.35, 0.1]}, 3.05, [0.9, 0.7, 0.35, 0.1]),
        ({"synthetic_acceptance_rates": [1, 0.5, 0.5, 0]}, 3.0, [1, 0.5, 0.5, 0]),
        ({"synthetic_acceptance_rates": [0, 0, 0, 0]}, 1.0, [0, 0, 0, 0]),
        # A length is made of positions that are always kept, one that is kept now and then, and none behind it.
        ({"synthetic_acceptance_length": 1.3}, 1.3, [0.3, 0, 0, 0]),
        ({"synthetic_acceptance_length": 3.55}, 3.55, [1, 1, 0.55, 0]),
        ({"synthetic_acceptance_length": 5}, 5.0, [1, 1, 1, 1]),
    ],
)
def test_the_length_of_5000_verifications_is_the_one_asked_for(
    asked: dict[str, Any], length: float, rates: list[float], temperature: float, made: Directories
) -> None:
    """Within 2 %, and each position's share within five standard errors; 0 and 1 exactly."""
    llm = LLM(
        made.verifier(),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=BATCH,
        speculative_config={
            "model": made.speculator("eagle3"),
            "num_speculative_tokens": DEPTH,
            "rejection_sample_method": "synthetic",
            **asked,
        },
    )
    tokens = int(1 + length * (STEPS / BATCH + 2))
    params = [
        SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=row) for row in range(BATCH)
    ]
    llm.generate([[row + 2, 7] for row in range(BATCH)], params, use_tqdm=False)
    assert llm.stats is not None
    assert llm.stats.num_drafts >= STEPS
    assert llm.stats.acceptance_length == pytest.approx(length, rel=0.02)
    for share, rate in zip(llm.stats.acceptance_rate_per_position, rates, strict=True):
        assert abs(share - rate) <= 5 * (rate * (1 - rate) / STEPS) ** 0.5
